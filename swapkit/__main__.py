"""Command line: `python -m swapkit COMMAND` is `swapkit COMMAND`."""

import sys

from swapkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
