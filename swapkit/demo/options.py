"""The demo's options and their validation."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """The demo's options as a user gave them; `read_options` checks them."""

    budgets: tuple[str, ...] = ()
    size: str = DEFAULT_SIZE
    steps: int | None = None
    sweep: str | None = None
    sweep_steps: int = SWEEP_STEPS
    output: Path = Path("swapkit-demo")
    json: str | None = None
    seed: int = 0
    threads: int | None = None


def read_options(given: GivenOptions) -> DemoOptions:
    """Return the options after checking them.

    Raises:
        OptionError: a value is invalid.
    """
    if given.size not in SIZES:
        msg = f"--size {given.size!r}: expected one of {', '.join(SIZES)}"
        raise OptionError(msg)
    steps = SIZES[given.size].steps if given.steps is None else given.steps
    if steps < 1:
        msg = f"--steps {steps}: expected at least 1 timed step"
        raise OptionError(msg)
    if given.sweep_steps < 1:
        msg = f"--sweep-steps {given.sweep_steps}: expected at least 1 timed step"
        raise OptionError(msg)
    # On a CPU, copies need processors too; other devices have copy engines.
    threads = max(1, processors() // 2) if given.threads is None else given.threads
    if not 1 <= threads <= processors():
        msg = f"--threads {threads}: expected 1 to {processors()}, the number of processors"
        raise OptionError(msg)
    if given.output.exists() and not given.output.is_dir():
        msg = f"--output {given.output}: this is a file; expected a folder, existing or new"
        raise OptionError(msg)
    return DemoOptions(
        budgets=parse_budgets(given.budgets or DEFAULT_BUDGETS),
        size=given.size,
        steps=steps,
        output=given.output,
        json=given.json,
        seed=given.seed,
        threads=threads,
        shares=parse_shares(given.sweep),
        sweep_steps=given.sweep_steps,
    )
