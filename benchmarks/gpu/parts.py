"""The parts of `make gpu`, in the order in which they run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: a module with `run(context)`, and for how long it may run."""

    name: str
    module: str
    what: str
    seconds: float
    quick_seconds: float = 0.0  # 0: not run by --quick
    first_seconds: float = 0.0  # 0: not run by --first
    shape: str = ""  # that is trained, given to `run` too
    dry_shape: str = "tiny"

    def load(self, *, dry: bool) -> Callable[[Context], None]:
        """Import the part and return what runs it."""
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        run: Callable[..., None] = module.run
        if not self.shape:
            return run
        return partial(run, shape=self.dry_shape if dry else self.shape)


PARTS = (
    Part(
        name="contract",
        module="contract",
        what="contract, conformance and fault suites, delayed kernels, C tests, memory checker",
        seconds=420,
        quick_seconds=60,
        first_seconds=65,
    ),
    Part(
        name="link",
        module="link",
        what="bandwidth of the swap engine beside pinned copies",
        seconds=75,
        quick_seconds=25,
        first_seconds=25,
    ),
    Part(
        name="pool",
        module="pool",
        what="the pool beside torch's allocator and expandable segments; cost of driver memory",
        seconds=120,
        quick_seconds=40,
    ),
    Part(
        name="operators",
        module="operators",
        what="an operator with hooks, built as a CUDA extension: the same bits under evictions",
        seconds=240,
    ),
    Part(
        name="train_1b_4k",
        module="train",
        what="about 1B parameters, 4k tokens, every way to train",
        seconds=150,
        quick_seconds=75,
        first_seconds=150,
        shape="1b_4k",
    ),
    Part(
        name="train_1b_8k",
        module="train",
        what="about 1B parameters, 8k tokens",
        seconds=180,
        shape="1b_8k",
    ),
    Part(
        name="train_8b_8k",
        module="train",
        what="six blocks of an 8B model, 8k tokens",
        seconds=180,
        shape="8b_8k",
    ),
    Part(
        name="train_8b_32k",
        module="train",
        what="six blocks of an 8B model, 32k tokens",
        seconds=360,
        shape="8b_32k",
    ),
    Part(
        name="transformers",
        module="huggingface",
        what="LlamaForCausalLM of transformers, about 1B parameters",
        seconds=90,
        quick_seconds=40,
        shape="hf_1b_4k",
        dry_shape="hf_tiny",
    ),
)
MOST_SECONDS = 530.0  # of a part by default: below nine minutes
DRY_SECONDS = 900.0  # of a part of a dry run, whose steps take as long as a CPU takes


def choose(words: str, *, quick: bool, first: bool = False, dry: bool = False) -> list[Part]:
    """Return the parts that are asked for, in their order; "train" means all that begin so.

    A dry run trains one shape instead of most: it runs only the first of such parts.

    Raises:
        ValueError: there is no such part; the message names those that there are.
    """
    asked = words.replace(",", " ").split()
    for word in asked:
        if not any(is_meant(part, word) for part in PARTS):
            known = ", ".join(part.name for part in PARTS)
            raise ValueError(
                f"no part is named {word!r}; the parts are {known}; train means all train parts"
            )
    if asked:
        return [part for part in PARTS if any(is_meant(part, word) for word in asked)]
    usual = [part for part in PARTS if is_usual(part, quick=quick, first=first)]
    return without_alike(usual) if dry else usual


def without_alike(parts: list[Part]) -> list[Part]:
    """Return parts without those that do the same in a dry run."""
    first: dict[tuple[str, str], Part] = {}
    for part in parts:
        first.setdefault((part.module, part.shape and part.dry_shape), part)
    return list(first.values())


def is_usual(part: Part, *, quick: bool, first: bool) -> bool:
    """Return whether a part runs unless some are asked for."""
    return part.first_seconds > 0 if first else part.quick_seconds > 0 or not quick


def is_meant(part: Part, word: str) -> bool:
    """Return whether a word means a part."""
    return word in {part.name, part.module}


def limit_of(
    part: Part,
    *,
    quick: bool,
    asked_seconds: float | None,
    first: bool = False,
    dry: bool = False,
) -> float:
    """Return for how long a part may run."""
    if asked_seconds is not None:
        return asked_seconds
    if dry:
        return DRY_SECONDS
    if first and part.first_seconds:
        return part.first_seconds
    return (part.quick_seconds or part.seconds / 3) if quick or first else part.seconds
