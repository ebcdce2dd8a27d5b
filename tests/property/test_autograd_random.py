"""Random autograd programs give the same bits whether or not what they save is moved or recomputed.

A program is data: a list of steps over a stack of values, with evictions, losses and backwards at
random places. It is interpreted twice, plainly and in a mode; the results must have the same bits.

The suite runs 800 examples; SWAPKIT_TEST_EXAMPLES in the environment sets another number.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import swapkit
from tests.conformance.modes import MODES, Mode, frozen_objects
from tests.programs import assert_same_bits, is_same
from tests.property.random_operators import COLUMNS, OPERATORS, ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.programs import Evict

TORCHS = "torch's"
# What may lie around an operator, as torch's checkpoint may: parts of swapkit's, made once, since
# what a part does depends on what its first run has shown.
PARTS: dict[str, Callable[[Any], Any]] = {
    "part": swapkit.checkpoint,
    "saving": swapkit.checkpoint(save=["matmul", "softmax"]),
}
AROUND = [
    (TORCHS,), (TORCHS, TORCHS), ("part",), ("part",), ("saving",), ("part", "part"),
    ("part", TORCHS), (TORCHS, "saving"),
]  # fmt: skip
ENDS = ("backward", "keep", "retain", "double", "drop", "grad_of_inner")


@dataclass(frozen=True, slots=True)
class Apply:
    """Make a value from two others; checkpoints lie around the operator, the innermost first."""

    operator: str
    first: int
    second: int
    around: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """Let go of a value."""

    index: int


@dataclass(frozen=True, slots=True)
class Move:
    """Evict."""


@dataclass(frozen=True, slots=True)
class End:
    """Make a loss of the newest values, and do with its graph what `how` says."""

    how: str
    width: int


INDICES = st.integers(0, 7)
APPLY = st.builds(
    Apply,
    st.sampled_from(sorted(OPERATORS)),
    INDICES,
    INDICES,
    st.sampled_from([(), (), (), *AROUND]),
)
STEPS = st.one_of(
    APPLY, APPLY, APPLY, st.builds(Forget, INDICES), st.builds(Move),
    st.builds(End, st.sampled_from(ENDS), st.integers(1, 4)),
)  # fmt: skip
PROGRAMS = st.lists(STEPS, min_size=2, max_size=14)


class Machine:
    """Interprets a program."""

    def __init__(self, evict: Evict, *, reentrant: bool, has_parts: bool = False) -> None:
        torch.manual_seed(0)
        self.evict = evict
        self.has_parts = has_parts  # else what they are around runs without
        self.reentrant = reentrant  # reentrant checkpoints know only `backward()`
        self.leaves = [torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(2)]
        self.values = [leaf * 1.0 for leaf in self.leaves]
        self.results: list[torch.Tensor] = []
        self.waiting: list[torch.Tensor] = []

    def run(self, program: list[Any]) -> list[torch.Tensor]:
        """Return everything that the program computes."""
        for step in [*program, End("keep", 2), Move()]:
            if isinstance(step, Apply):
                self.apply(step)
            elif isinstance(step, Forget):
                if len(self.values) > 1:
                    del self.values[step.index % len(self.values)]
            elif isinstance(step, Move):
                self.evict()
            else:
                self.end(step)
        while self.waiting:
            self.results += self.walk(self.waiting.pop(0))
        self.results.append(torch.get_rng_state())
        return [result.detach() for result in self.results]

    def apply(self, step: Apply) -> None:
        around = () if step.operator == "reads_twice" else step.around  # torch forbids it
        around = tuple(each for each in around if self.has_parts or each == TORCHS)
        function = wrapped(step.operator, around, reentrant=self.reentrant)
        first, second = (self.values[i % len(self.values)] for i in (step.first, step.second))
        self.values.append(function(first, second).tanh())

    def end(self, step: End) -> None:
        loss = torch.stack([value.sum() for value in self.values[-step.width :]]).sin().sum()
        if step.how == "keep":
            self.waiting.append(loss)
        elif step.how == "double":
            self.double(loss)
        elif step.how == "grad_of_inner":
            self.results += self.walk(loss, self.values[-1], retain_graph=True)
        elif step.how != "drop":
            self.results += self.walk(loss, retain_graph=True)
            if step.how == "retain":
                self.evict()
                self.results += self.walk(loss, retain_graph=True)
            else:
                self.values = [value.detach().requires_grad_() * 1.0 for value in self.leaves]

    def double(self, loss: torch.Tensor) -> None:
        grads = self.walk(loss, create_graph=True)
        self.evict()
        second = torch.stack([grad.square().sum() for grad in grads]).sum()
        self.results += grads
        if second.requires_grad:
            self.results += self.walk(second, retain_graph=True)

    def walk(self, loss: torch.Tensor, *inputs: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        """Return gradients; zeros where there is none."""
        if self.reentrant:
            loss.backward(retain_graph=True)
            grads = [leaf.grad for leaf in self.leaves]
            for leaf in self.leaves:
                leaf.grad = None
            return [torch.zeros(0) if grad is None else grad for grad in grads]
        wanted = inputs or tuple(self.leaves)
        options.setdefault("retain_graph", True)
        return list(
            torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True, **options)
        )


@functools.cache
def wrapped(operator: str, around: tuple[str, ...], *, reentrant: bool) -> Any:
    if not around:
        return OPERATORS[operator]
    function = wrapped(operator, around[:-1], reentrant=reentrant)
    if around[-1] != TORCHS:
        return PARTS[around[-1]](function)
    return lambda *values: checkpoint(function, *values, use_reentrant=reentrant)


def run_plainly(program: list[Any], *, reentrant: bool = False) -> list[torch.Tensor]:
    """Return what a program computes; one that torch itself refuses is no example."""
    try:
        return Machine(lambda: None, reentrant=reentrant).run(program)
    except RuntimeError:
        reject()


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Make sessions quick."""
    with frozen_objects():
        yield


FAST = [mode for mode in MODES if mode.latency_ms == 0]


@pytest.mark.promise("A3")
@pytest.mark.parametrize("mode", FAST, ids=lambda mode: mode.name)
def test_random_program_when_saved_tensors_move_then_same_bits(
    mode: Mode,
) -> None:
    wanted = int(os.environ.get("SWAPKIT_TEST_EXAMPLES", "800"))
    examples = int(wanted * (0.11 if mode.name.startswith("rescue") else 0.26))  # rescues are slow

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @seed(FAST.index(mode))  # other programs in each mode
    @given(PROGRAMS, st.booleans())
    def check(program: list[Any], reentrant: bool) -> None:
        expected = run_plainly(program, reentrant=reentrant)
        with mode.open() as evict:
            results = Machine(evict, reentrant=reentrant, has_parts=True).run(program)
        assert_same_bits(results, expected)

    check()


def test_random_programs_when_unpack_returns_zeros_then_noticed() -> None:
    """They can fail: most of them depend on what was saved."""
    noticed = []

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(PROGRAMS)
    def check(program: list[Any]) -> None:
        expected = run_plainly(program)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.zeros_like):
            results = Machine(lambda: None, reentrant=False).run(program)
        noticed.append(not all(map(is_same, results, expected)))

    check()
    assert sum(noticed) > len(noticed) / 2
