"""Command line: `python -m swapkit COMMAND`."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its options; the process's own if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m swapkit", description="Train PyTorch models inside a memory budget."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `demo`."""
    from swapkit.demo import options

    parser = commands.add_parser(
        "demo",
        help="train a small language model with and without a budget, and compare",
        description="Train a small language model on the Python standard library's sources, "
        "with and without a memory budget, and compare.",
    )
    options.add_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        from swapkit.demo.command import run_demo

        try:
            asked = options.from_arguments(arguments)
        except options.OptionError as error:
            parser.error(str(error))
        return run_demo(asked)

    parser.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
