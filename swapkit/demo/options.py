"""The demo's options and their validation."""

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
    """An option's value is invalid; the message has the value and the valid ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget as the user wrote it: a share of the peak without a limit, or bytes.

    Args:
        text: the user's text.
    """

    text: str

    def resolve(self, *, peak_bytes: int, least_bytes: int) -> int:
        """Return the budget in bytes.

        Args:
            peak_bytes: peak of the run without a limit.
            least_bytes: parameters, gradients and optimizer states, which every run needs.

        Raises:
            OptionError: the budget is not between the two.
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
    """The options of the demo."""

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
    """Parse the budgets of the sweep.

    Args:
        text: such as "80%,45%"; None: no sweep.

    Raises:
        OptionError: the text has another form.
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
                f"--sweep {text!r}: expected shares of the activations, separated by commas, each "
                'above 0% and below 100%, e.g. "80%,45%"'
            )
            raise OptionError(msg)
        shares.append(share)
    return tuple(dict.fromkeys(shares))


def parse_budget(text: str) -> Budget:
    """Parse one budget.

    Args:
        text: such as "60%" or "300MiB", or a number of bytes.

    Raises:
        OptionError: the text is none of these.
    """
    text = text.strip()
    try:
        nbytes = parse_bytes(text, whole_bytes=_ANY_WHOLE_BYTES, name="--budget")
    except InvalidArgument:
        nbytes = 0
    is_whole = text.endswith("%") and nbytes == _ANY_WHOLE_BYTES
    if nbytes == 0 or is_whole:
        msg = (
            f"--budget {text!r}: expected a share of the peak without a limit, above 0% and below "
            '100%, e.g. "60%", or a number of bytes, e.g. "300MiB"'
        )
        raise OptionError(msg)
    return Budget(text=text)


def parse_budgets(texts: Iterable[str]) -> tuple[Budget, ...]:
    """Parse budgets; each text has one budget or several separated by commas.

    Args:
        texts: the user's texts.

    Returns:
        The budgets in order, without duplicates.

    Raises:
        OptionError: one of them is not a budget.
    """
    budgets = (parse_budget(each) for text in texts for each in text.split(","))
    return tuple({each.text: each for each in budgets}.values())


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser.

    Args:
        parser: parser of the subcommand.
    """
    parser.add_argument(
        "--budget",
        action="append",
        metavar="BUDGET",
        help='share of the peak without a limit, "60%%", or bytes, "300MiB"; repeat, or '
        f"separate several with commas (default: {','.join(DEFAULT_BUDGETS).replace('%', '%%')})",
    )
    parser.add_argument(
        "--size",
        default=DEFAULT_SIZE,
        help=f"size of the model: {', '.join(SIZES)} (default: {DEFAULT_SIZE})",
    )
    parser.add_argument("--steps", type=int, help="timed steps of every run")
    parser.add_argument(
        "--sweep",
        nargs="?",
        const=DEFAULT_SHARES,
        metavar="SHARES",
        help="also compare all policies at these budgets over a fast and a slow link: shares of "
        f"the activations (without a value: {DEFAULT_SHARES.replace('%', '%%')}); takes ten "
        "minutes",
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
    parser.add_argument(
        "--json", metavar="FILE", help="also write the result to FILE; - for stdout"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of model and batches (default: 0)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="torch's threads in every run (default: half of the processors; the others copy)",
    )


def from_arguments(arguments: argparse.Namespace) -> DemoOptions:
    """Return the options from parsed arguments, after checking them.

    Args:
        arguments: the parsed arguments of `add_arguments`.

    Raises:
        OptionError: a value is invalid.
    """
    if arguments.size not in SIZES:
        msg = f"--size {arguments.size!r}: expected one of {', '.join(SIZES)}"
        raise OptionError(msg)
    steps = SIZES[arguments.size].steps if arguments.steps is None else arguments.steps
    if steps < 1:
        msg = f"--steps {steps}: expected at least 1 timed step"
        raise OptionError(msg)
    if arguments.sweep_steps < 1:
        msg = f"--sweep-steps {arguments.sweep_steps}: expected at least 1 timed step"
        raise OptionError(msg)
    # On a CPU, copies need processors too; other devices have copy engines.
    threads = max(1, processors() // 2) if arguments.threads is None else arguments.threads
    if not 1 <= threads <= processors():
        msg = f"--threads {threads}: expected 1 to {processors()}, the number of processors"
        raise OptionError(msg)
    if arguments.output.exists() and not arguments.output.is_dir():
        msg = f"--output {arguments.output}: this is a file; expected a folder, existing or new"
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
