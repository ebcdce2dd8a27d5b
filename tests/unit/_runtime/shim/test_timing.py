"""Planned swaps are released and come back at the operators that their distance names."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.shim.types import Placement
from swapkit.ir.plans import Action
from tests.support.instruments import Instrument
from tests.support.threads import Worker, on_thread, on_threads
from tests.unit._runtime.rig import in_use, make_swapper, scope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.device import PlannedMove
    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")

SIDE = 64
LAYERS = 40
THREADS_KEPT, SHAPES_KEPT = 64, 16  # of `shim/cpp/moves/prefetch.cpp`


@pytest.fixture
def trace() -> Iterator[list[PlannedMove]]:
    runtime = get_runtime()
    runtime.trace = []
    yield runtime.trace
    runtime.trace = None


@pytest.fixture
def swapper() -> Swapper:
    return make_swapper()


def planned(distance: int) -> Placement:
    return Placement(Action.SWAP, prefetch=distance)


def forward(
    swapper: Swapper, distance: int, *, layers: int = LAYERS, dead: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return leaf and loss of a chain; `dead`: with an operator between that gets no gradient."""
    leaf = torch.linspace(-1, 1, SIDE * SIDE, requires_grad=True)
    small = torch.ones(2, requires_grad=True)
    hidden = leaf * 1.0
    with scope(swapper, planned(distance)):
        for _ in range(layers):
            hidden = torch.sin(hidden)
            if dead:
                torch.exp(small)
    return leaf, hidden.sum()


def gradient_of_chain(layers: int = LAYERS) -> torch.Tensor:
    leaf = torch.linspace(-1, 1, SIDE * SIDE, requires_grad=True)
    hidden = leaf * 1.0
    for _ in range(layers):
        hidden = torch.sin(hidden)
    (grad,) = torch.autograd.grad(hidden.sum(), leaf)
    return grad


def distances(trace: list[PlannedMove], kind: str) -> list[int]:
    """Return how many operators lie between each move and the operator that saved what moves."""
    return [move.operator - move.saved_by for move in trace if move.kind == kind]


@pytest.mark.promise("B8")
@pytest.mark.parametrize("distance", [1, 4, 10])
def test_release_when_the_forward_is_long_enough_then_exactly_three_distances_later(
    swapper: Swapper, trace: list[PlannedMove], distance: int
) -> None:
    _leaf, _loss = forward(swapper, distance)
    released = distances(trace, "release")
    # What was saved in the last 3n operators waits for the backward pass; `sum` is one more.
    assert released == [3 * distance] * (LAYERS + 1 - 3 * distance)
    assert [move.nbytes for move in trace] == [4 * SIDE * SIDE] * len(trace)


@pytest.mark.promise("B8")
@pytest.mark.parametrize("distance", [1, 4, 10])
def test_copy_back_when_backward_runs_then_begins_exactly_the_distance_before_the_use(
    swapper: Swapper, trace: list[PlannedMove], distance: int
) -> None:
    for _ in range(3):
        trace.clear()
        leaf, loss = forward(swapper, distance)
        loss.backward()
        ahead = distances(trace, "prefetch")
        assert ahead == [distance] * len(ahead)
        assert len(ahead) == len(distances(trace, "release")) > LAYERS - 3 * distance
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient_of_chain())


@pytest.mark.promise("B8")
def test_backward_when_it_begins_then_what_is_needed_soon_stays_and_the_rest_goes(
    swapper: Swapper, trace: list[PlannedMove]
) -> None:
    _leaf, loss = forward(swapper, 4)
    before = len(trace)
    loss.backward()
    start = [move for move in trace[before:] if move.kind == "release"]
    assert len({move.operator for move in start}) == 1
    assert sorted(move.operator - move.saved_by for move in start) == list(range(5, 12))


@pytest.mark.promise("B8")
def test_distance_when_larger_then_later_releases_and_earlier_copies_back(
    swapper: Swapper, trace: list[PlannedMove], installation: Installation
) -> None:
    peaks = []
    for distance in (1, 4, 10):
        trace.clear()
        before = in_use(installation)
        held = []
        for layers in (20, 30, LAYERS):
            graph = forward(swapper, distance, layers=layers)
            held.append(installation.pool.in_use_bytes() - before)
            del graph
        peaks.append(held[-1])
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3


@pytest.mark.promise("B10")
def test_distances_when_they_differ_by_part_then_each_part_has_its_own(
    swapper: Swapper, trace: list[PlannedMove]
) -> None:
    hidden = torch.linspace(-1, 1, SIDE * SIDE, requires_grad=True) * 1.0
    begin = torch._C._autograd._get_sequence_nr()
    with scope(swapper, planned(2)):
        for _ in range(20):
            hidden = torch.sin(hidden)
    middle = torch._C._autograd._get_sequence_nr()
    with scope(swapper, planned(5)):
        for _ in range(20):
            hidden = torch.sin(hidden)
    hidden.sum().backward()
    assert begin < middle
    # At the start of backward whatever is not needed soon goes, however long it has been there.
    late = [move for move in trace if move.kind == "release" and move.saved_by > middle + 5]
    for move in trace:
        distance = 2 if move.saved_by < middle else 5
        if move.kind == "prefetch":
            assert move.operator - move.saved_by == distance
        elif move not in late:
            assert move.operator - move.saved_by == 3 * distance
    assert len([move for move in trace if move.kind == "prefetch"]) > 30


@pytest.mark.promise("B16")
def test_scope_when_around_one_operator_then_only_that_moves(
    swapper: Swapper, trace: list[PlannedMove]
) -> None:
    hidden = torch.linspace(-1, 1, SIDE * SIDE, requires_grad=True) * 1.0
    for layer in range(20):
        if layer == 3:
            number = torch._C._autograd._get_sequence_nr()
            with scope(swapper, planned(1)):
                hidden = torch.sin(hidden)
        else:
            hidden = torch.sin(hidden)
    hidden.sum().backward()
    assert [(move.kind, move.saved_by, move.operator) for move in trace] == [
        ("release", number, number + 3),
        ("prefetch", number, number + 1),
    ]


def test_copy_back_when_operators_get_no_gradient_then_the_order_of_the_pass_before_counts(
    swapper: Swapper, trace: list[PlannedMove]
) -> None:
    ahead = []
    for _ in range(3):
        trace.clear()
        leaf, loss = forward(swapper, 3, dead=True)
        loss.backward()
        ahead.append(set(distances(trace, "prefetch")))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient_of_chain())
    # Every second operator does not run back: three that run are six by their numbers.
    assert ahead[0] == {2}  # counted: the first that runs at or below the number
    assert 6 in ahead[1]
    assert ahead[1] == ahead[2]
    assert max(ahead[1]) == 6


def test_order_when_a_pass_was_only_a_part_then_the_next_whole_pass_is_learned(
    swapper: Swapper, trace: list[PlannedMove]
) -> None:
    leaf, loss = forward(swapper, 2)
    middle = loss.grad_fn
    for _ in range(10):
        assert middle is not None
        middle = middle.next_functions[0][0]
    torch.autograd.grad(loss, leaf, retain_graph=True)
    del middle, loss
    counts = []
    for _ in range(3):
        trace.clear()
        _leaf, loss = forward(swapper, 2)
        loss.backward()
        counts.append(len(distances(trace, "prefetch")))
    assert counts[1] == counts[2] == LAYERS - 2


@pytest.mark.promise("B12")
def test_release_when_the_link_is_slow_then_it_waits_and_the_stall_is_counted_for_the_site(
    trace: list[PlannedMove],
) -> None:
    latency_ns = 10_000_000
    swapper = make_swapper(Backend.cpu(copy_latency_ns=latency_ns))
    leaf, loss = forward(swapper, 1, layers=12)
    assert distances(trace, "release") == [3] * 10
    stalls = swapper.mover.stalls
    assert sum(stalls.values()) > latency_ns / 1e9
    assert len(stalls) == 10  # each where it was waited for
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient_of_chain(12))


@pytest.mark.promise("B12")
def test_release_when_a_copy_does_not_end_then_the_operator_waits_and_nothing_is_reused(
    trace: list[PlannedMove], installation: Installation
) -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    before = in_use(installation)
    worker = Worker(lambda: forward(swapper, 1, layers=8))
    thread = worker.thread
    while swapper.scheduler.stats().copied_out_bytes == 0 or (thread.is_alive() and not trace):
        thread.join(timeout=0.05)
        if installation.pool.in_use_bytes() >= before + 4 * 4 * SIDE * SIDE:
            break
    assert thread.is_alive()
    assert trace == []  # the copy is not done: nothing was given up
    slow.release_copies()
    leaf, loss = worker.finish()
    assert distances(trace, "release") == [3] * 6
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient_of_chain(8))


def test_threads_when_several_run_then_each_counts_its_own_operators(
    swapper: Swapper, trace: list[PlannedMove]
) -> None:
    wrong: list[int] = []

    def work() -> None:
        for _ in range(3):
            leaf, loss = forward(swapper, 2, layers=20)
            loss.backward()
            if leaf.grad is None or not torch.equal(leaf.grad, gradient_of_chain(20)):
                wrong.append(1)

    on_threads(*[work] * 3)
    assert wrong == []
    assert set(distances(trace, "prefetch")) <= {1, 2}
    assert 2 in distances(trace, "prefetch")


# ---- what is remembered -------------------------------------------------------------------------


def remembered(swapper: Swapper) -> list[tuple[int, int, int]]:
    """Return of each thread how many saves, releases to come and orders of passes are kept."""
    gc.collect()
    return swapper.mover.timed


def test_memory_when_graphs_are_dropped_then_what_is_kept_does_not_grow(swapper: Swapper) -> None:
    for _ in range(60):
        forward(swapper, 1, layers=20)
    ((saves, releases, _),) = remembered(swapper)
    assert saves <= LAYERS
    assert releases <= LAYERS


def test_memory_when_every_pass_differs_then_the_orders_kept_are_the_latest(
    swapper: Swapper,
) -> None:
    for layers in range(2, SHAPES_KEPT + 8):
        forward(swapper, 1, layers=layers)[1].backward()
    ((_, _, orders),) = remembered(swapper)
    assert orders == SHAPES_KEPT


def test_memory_when_threads_come_and_go_then_those_kept_are_few(swapper: Swapper) -> None:
    for _ in range(THREADS_KEPT + 8):
        on_thread(lambda: forward(swapper, 1, layers=2))
    assert 1 <= len(remembered(swapper)) <= THREADS_KEPT
