"""The demo's options: what can be asked, and what is said of a question that makes no sense."""

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swapkit.demo.sizes import SIZES
from swapkit.errors import InvalidArgument
from swapkit.units import format_bytes, parse_bytes

DEFAULT_BUDGETS = ("60%", "45%")
DEFAULT_SIZE = "compact"
DEFAULT_SHARES = "80%,60%,45%,30%,20%"
SWEEP_STEPS = 5
_ANY_WHOLE_BYTES = 1 << 40


class OptionError(ValueError):
    """An option's value makes no sense; says what was asked and what is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget as the user wrote it: a share of the peak without a limit, or bytes.

    Args:
        text: as written.
    """

    text: str

    def resolve(self, *, peak_bytes: int, least_bytes: int) -> int:
        """Give the budget in bytes.

        Args:
            peak_bytes: of the run without a limit.
            least_bytes: parameters, gradients and optimizer states, which nothing can do without.

        Raises:
            OptionError: it is not between the two.
        """
        resolved = parse_bytes(self.text, whole_bytes=peak_bytes, name="--budget")
        if least_bytes < resolved < peak_bytes:
            return resolved
        msg = (
            f"--budget {self.text} is {format_bytes(resolved)}; it must be below "
            f"{format_bytes(peak_bytes)}, the peak of this training without a limit (or nothing "
            f"would be shown), and above {format_bytes(least_bytes)}, its parameters, gradients "
            "and optimizer states"
        )
        raise OptionError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user asked for."""

    budgets: tuple[Budget, ...]
    size: str
    steps: int
    output: Path
    json: str | None
    seed: int
    threads: int
    shares: tuple[float, ...]
    sweep_steps: int


def parse_shares(text: str | None) -> tuple[float, ...]:
    """Read the budgets of the sweep.

    Args:
        text: "80%,45%"; None for no sweep.

    Raises:
        OptionError: it is something else.
    """
    if text is None:
        return ()
    shares = []
    for part in text.split(","):
        number = part.strip().removesuffix("%")
        try:
            share = float(number) / 100
        except ValueError:
            share = 0.0
        if not part.strip().endswith("%") or not 0 < share < 1:
            msg = (
                f"--sweep {text!r}: possible are shares of the activations with commas between "
                'them, each above 0% and below 100%, as in "80%,45%"'
            )
            raise OptionError(msg)
        shares.append(share)
    return tuple(dict.fromkeys(shares))


def parse_budget(text: str) -> Budget:
    """Read one budget.

    Args:
        text: "60%" or "300MiB" or a number of bytes.

    Raises:
        OptionError: it is none of these.
    """
    text = text.strip()
    try:
        nbytes = parse_bytes(text, whole_bytes=_ANY_WHOLE_BYTES, name="--budget")
    except InvalidArgument:
        nbytes = 0
    is_whole = text.endswith("%") and nbytes == _ANY_WHOLE_BYTES
    if nbytes == 0 or is_whole:
        msg = (
            f"--budget {text!r}: possible are a share of the peak without a limit, above 0% and "
            'below 100%, as in "60%", and a number of bytes, as in "300MiB"'
        )
        raise OptionError(msg)
    return Budget(text=text)


def parse_budgets(texts: Iterable[str]) -> tuple[Budget, ...]:
    """Read budgets, each text one or several with commas between them.

    Args:
        texts: what was given.

    Returns:
        The budgets in their order, those given twice only once.

    Raises:
        OptionError: one of them is no budget.
    """
    budgets = (parse_budget(each) for text in texts for each in text.split(","))
    return tuple({each.text: each for each in budgets}.values())


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options.

    Args:
        parser: of the subcommand.
    """
    parser.add_argument(
        "--budget",
        action="append",
        metavar="BUDGET",
        help='share of the peak without a limit, "60%%", or bytes, "300MiB"; may be repeated, or '
        f"several with commas (default: {','.join(DEFAULT_BUDGETS).replace('%', '%%')})",
    )
    parser.add_argument(
        "--size",
        default=DEFAULT_SIZE,
        help=f"of the model: {', '.join(SIZES)} (default: {DEFAULT_SIZE})",
    )
    parser.add_argument("--steps", type=int, help="timed steps of every run")
    parser.add_argument(
        "--sweep",
        nargs="?",
        const=DEFAULT_SHARES,
        metavar="SHARES",
        help="compare all policies, too, at these budgets over a fast and a slow link: shares of "
        f"the activations (without any: {DEFAULT_SHARES.replace('%', '%%')}); takes ten minutes",
    )
    parser.add_argument(
        "--sweep-steps",
        type=int,
        default=SWEEP_STEPS,
        help=f"timed steps of every run of the sweep (default: {SWEEP_STEPS})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("swapkit-demo"),
        help="folder for chart.png and result.json (default: ./swapkit-demo)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there too; - for stdout")
    parser.add_argument("--seed", type=int, default=0, help="of model and batches (default: 0)")
    parser.add_argument(
        "--threads",
        type=int,
        help="torch's, in every run (default: one per two processors; the others copy)",
    )


def from_arguments(arguments: argparse.Namespace) -> DemoOptions:
    """Check the values that were given.

    Args:
        arguments: parsed by what `add_arguments` declared.

    Raises:
        OptionError: one of them makes no sense.
    """
    if arguments.size not in SIZES:
        msg = f"--size {arguments.size!r}: there is no such size; possible: {', '.join(SIZES)}"
        raise OptionError(msg)
    steps = SIZES[arguments.size].steps if arguments.steps is None else arguments.steps
    if steps < 1:
        msg = f"--steps {steps}: at least 1 timed step is needed"
        raise OptionError(msg)
    if arguments.sweep_steps < 1:
        msg = f"--sweep-steps {arguments.sweep_steps}: at least 1 timed step is needed"
        raise OptionError(msg)
    # Copies need processors, too, on a CPU, where other devices have engines for them.
    threads = max(1, processors() // 2) if arguments.threads is None else arguments.threads
    if not 1 <= threads <= processors():
        msg = f"--threads {threads}: possible are 1 to {processors()}, the processors there are"
        raise OptionError(msg)
    if arguments.output.exists() and not arguments.output.is_dir():
        msg = f"--output {arguments.output}: this is a file; a folder is needed, old or new"
        raise OptionError(msg)
    return DemoOptions(
        budgets=parse_budgets(arguments.budget or DEFAULT_BUDGETS),
        size=arguments.size,
        steps=steps,
        output=arguments.output,
        json=arguments.json,
        seed=arguments.seed,
        threads=threads,
        shares=parse_shares(arguments.sweep),
        sweep_steps=arguments.sweep_steps,
    )
