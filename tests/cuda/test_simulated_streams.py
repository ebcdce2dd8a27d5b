"""Programs with several streams give the bits of plain training however saved tensors move.

They run inside of `python -m tests.cuda.simulated -m pytest tests/cuda/test_simulated_streams.py`,
with SWAPKIT_TEST_ALLOCATOR=torch over torch's own allocator; `test_simulation.py` starts that.
Copies are slow there, streams are kept busy, and memory that is given up is overwritten at once: a
missing wait shows as a wrong number.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from tests.cuda.control import last_problem, slow_copies
from tests.cuda.simulated import INSIDE
from tests.cuda.stream_programs import PROGRAMS, SIDE, join, side_streams
from tests.programs.compare import assert_same_bits
from tests.support.place import ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.programs import Evict, Program

pytestmark = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in tests.cuda.simulated")

MATRIX = SIDE * SIDE * 4
EVERYTHING = 1 << 40


@pytest.fixture(autouse=True, scope="module")
def _pool() -> None:
    swapkit.install(device="cuda", allocator=ALLOCATOR)


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    assert last_problem() == ""


# ---- ways to move saved tensors -----------------------------------------------------------------


def overwrite() -> None:
    """Take what memory was given up on this stream, and spoil it."""
    for nbytes in (MATRIX, 4 * MATRIX):
        spoilt = [torch.full((nbytes // 4,), float("nan"), device="cuda") for _ in range(12)]
        del spoilt


@contextlib.contextmanager
def swapped() -> Iterator[Evict]:
    with swapkit.offload(min_bytes=1024):
        yield overwrite


@contextlib.contextmanager
def swapped_by_operators() -> Iterator[Evict]:
    with swapkit.offload(min_bytes=1024, prefetch=1):
        yield overwrite


@contextlib.contextmanager
def rescued() -> Iterator[Evict]:
    with swapkit.budget("768MiB", device="cuda", min_swap_bytes=1024) as session:

        def evict() -> None:
            session.rescue(EVERYTHING)
            overwrite()

        yield evict


@contextlib.contextmanager
def swapped_in_a_budget() -> Iterator[Evict]:
    with (
        swapkit.budget("800MiB", device="cuda"),
        rescued() as evict,
        swapkit.offload(min_bytes=1024),
    ):
        yield evict


WAYS = (swapped, swapped_by_operators, rescued, swapped_in_a_budget)


def run(program: Program, evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    results = [result.detach().clone() for result in program(evict)]
    torch.cuda.synchronize()
    return results


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("latency_ms", [0, 4], ids=["fast", "slow"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_with_streams_when_saved_tensors_move_then_same_bits(
    program: Program, way: Any, latency_ms: int
) -> None:
    expected = run(program, lambda: None)
    with slow_copies(latency_ms):
        with way() as evict:
            results = run(program, evict)
        overwrite()
        assert_same_bits(results, expected)


# ---- errors and optimizers -------------------------------------------------------

LARGE = 1 << 20  # elements: 4 MiB


def large_leaf() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(LARGE, device="cuda", requires_grad=True)


def chain(x: torch.Tensor, length: int = 24) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()
    return x


def limit_above_reserved(nbytes: int) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() + nbytes


def test_step_when_memory_was_out_in_forward_and_in_backward_then_the_next_is_right() -> None:
    x = large_leaf()
    (expected,) = torch.autograd.grad(chain(x).sum(), x)
    before = torch.cuda.memory_allocated()

    def too_much(_grad: object = None) -> None:
        torch.empty(64 * LARGE, device="cuda")

    with swapkit.budget(limit_above_reserved(88 << 20), device="cuda"), slow_copies(1):
        for _ in range(2):
            y = chain(x, 8)
            with pytest.raises(torch.OutOfMemoryError):
                too_much()
            y.register_hook(too_much)
            with pytest.raises(torch.OutOfMemoryError):
                y.exp().sum().backward()
            del y
            assert torch.equal(torch.autograd.grad(chain(x).sum(), x)[0], expected)
    torch.cuda.synchronize()
    deadline = time.monotonic() + 5
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(0.01)
        with swapkit.offload(min_bytes=1024):  # lets go of what was still being copied
            (x * 1).sin()
    assert torch.cuda.memory_allocated() <= before


def train(*, offloads: bool, latency_ms: float = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if offloads:
        swapkit.offload(optimizer)
    seen: list[torch.Tensor] = []
    (stream,) = side_streams(1)

    def note_states() -> None:
        states = optimizer.state_dict()["state"].values()
        seen.extend(each.cpu().clone() for state in states for each in state.values())

    with slow_copies(latency_ms):
        for step in range(10):
            model(torch.randn(64, 256, device="cuda")).square().mean().backward()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream()):
                optimizer.step()
            join([stream])
            optimizer.zero_grad()
            if step == 4:
                note_states()
                optimizer.load_state_dict(optimizer.state_dict())
        note_states()
    return [*seen, *[each.detach().cpu() for each in model.parameters()]]


def test_optimizer_states_when_offloaded_then_same_bits() -> None:
    expected = train(offloads=False)
    assert_same_bits(train(offloads=True), expected)
    assert_same_bits(train(offloads=True, latency_ms=2), expected)
