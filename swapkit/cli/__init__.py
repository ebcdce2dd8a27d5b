"""The command line: `swapkit COMMAND`, and the same as `python -m swapkit COMMAND`."""

from swapkit.cli.root import main

__all__ = ["main"]
