"""Random autograd programs give the same bits whether or not what they save is moved.

A program is data: a list of steps over a stack of values, with evictions, losses and backwards at
random places. It is interpreted twice, plainly and in a mode; the results must have the same bits.

The suite runs 2,000 examples; SWAPKIT_TEST_EXAMPLES in the environment sets another number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.conformance.modes import MODES, Mode, frozen_objects
from tests.programs import assert_same_bits, is_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.programs import Evict

ROWS, COLUMNS = 16, 24  # 1.5 KiB: just above the least size that is moved


class Own(torch.autograd.Function):
    """Saves its input, its output and a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y, x.t())
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y, turned = ctx.saved_tensors
        result: torch.Tensor = grad * (2 * x.cos() + 0 * y + 0 * turned.t())
        return result


class ReadsTwice(Own):
    """The same, but reads them twice."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, _, _ = ctx.saved_tensors
        _, y, turned = ctx.saved_tensors
        result: torch.Tensor = grad * (2 * x.cos() + 0 * y + 0 * turned.t())
        return result


def bounded(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def in_place(x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    fresh = x * 1.5  # saves neither x nor its result
    return fresh.add_(0.25).mul_(0.5).exp()


def write_into(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(2, ROWS, COLUMNS)
    room[0], room[1] = x, y
    return room.prod(0)


def split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = (x * y).chunk(2, dim=1)
    return torch.cat([right.exp() * left, left.sin()], dim=1)


def attend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y.t()).softmax(-1) @ (x * y)


def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > y, x * y, y.sin())


def low_precision(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ y.bfloat16().t() @ y.bfloat16()).float().mul(0.1)


def dropped_out(x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.3)


def complex_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    pair = torch.complex(x, y)
    return (pair * pair.conj().t().conj().t()).imag + pair.abs()


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "exp": lambda x, _y: x.exp(),
    "sigmoid": lambda x, _y: x.sigmoid(),
    "square": lambda x, _y: x * x,
    "attend": attend,
    "transpose": lambda x, y: (x.t() * y.t().sin()).t(),
    "expand": lambda x, y: x[:1].expand(ROWS, -1) * y,
    "slice": lambda x, y: torch.cat([x[1::2] * y[::2], y[: ROWS // 2].exp()]),
    "gather": lambda x, y: x[:, torch.arange(COLUMNS - 1, -1, -1)] * y,
    "permute": lambda x, y: x.view(4, 4, COLUMNS).permute(1, 0, 2).reshape(ROWS, COLUMNS) * y,
    "function": lambda x, _y: Own.apply(x),
    "reads_twice": lambda x, _y: ReadsTwice.apply(x),
    "split": split,
    "in_place": in_place,
    "write_into": write_into,
    "masked": masked,
    "low_precision": low_precision,
    "dropped_out": dropped_out,
    "complex_product": complex_product,
    "normalise": lambda x, _y: torch.nn.functional.layer_norm(x, (COLUMNS,)),
}  # fmt: skip

ENDS = ("backward", "keep", "retain", "double", "drop", "grad_of_inner")


@dataclass(frozen=True, slots=True)
class Apply:
    """Make a value from two others; `depth` checkpoints lie around the operator."""

    operator: str
    first: int
    second: int
    depth: int = 0


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
    st.sampled_from([0, 0, 0, 1, 2]),
)
STEPS = st.one_of(
    APPLY, APPLY, APPLY, st.builds(Forget, INDICES), st.builds(Move),
    st.builds(End, st.sampled_from(ENDS), st.integers(1, 4)),
)  # fmt: skip
PROGRAMS = st.lists(STEPS, min_size=2, max_size=14)


class Machine:
    """Interprets a program."""

    def __init__(self, evict: Evict, *, reentrant: bool) -> None:
        torch.manual_seed(0)
        self.evict = evict
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
        return [result.detach() for result in self.results]

    def apply(self, step: Apply) -> None:
        function = OPERATORS[step.operator]
        for _ in range(0 if step.operator == "reads_twice" else step.depth):  # torch forbids it
            function = checkpointed(function, reentrant=self.reentrant)
        first, second = (self.values[i % len(self.values)] for i in (step.first, step.second))
        self.values.append(bounded(function(first, second)))

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


def checkpointed(function: Callable[..., torch.Tensor], *, reentrant: bool) -> Any:
    return lambda *values: checkpoint(function, *values, use_reentrant=reentrant)


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
    wanted = int(os.environ.get("SWAPKIT_TEST_EXAMPLES", "2000"))
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
        expected = Machine(lambda: None, reentrant=reentrant).run(program)
        with mode.open() as evict:
            results = Machine(evict, reentrant=reentrant).run(program)
        assert_same_bits(results, expected)

    check()


def test_random_programs_when_unpack_returns_zeros_then_noticed() -> None:
    """They can fail: most of them depend on what was saved."""
    noticed = []

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(PROGRAMS)
    def check(program: list[Any]) -> None:
        expected = Machine(lambda: None, reentrant=False).run(program)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.zeros_like):
            results = Machine(lambda: None, reentrant=False).run(program)
        noticed.append(not all(map(is_same, results, expected)))

    check()
    assert sum(noticed) > len(noticed) / 2
