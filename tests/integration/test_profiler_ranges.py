"""Copies in torch's profiler: the ranges `swap_out`, `swap_in` and `swap_in_wait`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._native.pool import Pool, Ring
from swapkit._runtime.allocators.installation import require_installation
from swapkit._runtime.process.runtime import get_runtime
from swapkit.testing import planning_at_once, slow_link
from tests.support.sessions import Plain, Training, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.runs import SessionStats

STEPS = 6
RANGES = ("swap_out", "swap_in", "swap_in_wait")
EVENTS = 1 << 16
LATENCY = 0.05  # seconds of each copy

pytestmark = [
    pytest.mark.usefixtures("installation", "steady_machine"),
    # Of torch's own profiler.
    pytest.mark.filterwarnings("ignore:.*Profiler.*"),
]


@pytest.fixture(scope="module")
def plain() -> Plain:
    swapkit.install()
    return train_plainly(make_training, STEPS)


def profiled(run: Callable[[], object]) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
    return profiler


def count_ranges(profiler: Any) -> Counter[str]:
    events = profiler.events()
    assert events is not None
    return Counter(event.name for event in events if event.name in RANGES)


def train(training: Training, share: float, plain: Plain) -> tuple[Counter[str], SessionStats]:
    """Train in a session; return its copies by the names of their ranges, and its statistics."""
    pool = require_installation().pool
    assert isinstance(pool, Pool)
    ring = Ring(EVENTS)
    pool.attach(ring)
    with (
        planning_at_once(),
        swapkit.budget(
            plain.budget(share), training.model, training.optimizer, policy="swap"
        ) as session,
    ):
        for _ in range(STEPS):
            training.step()
    pool.detach()
    events, lost = ring.read()
    assert lost == 0
    kinds = Counter(event.kind.name for event in events)
    return Counter(swap_out=kinds["COPY_OUT"], swap_in=kinds["COPY_IN"]), session.stats


def test_session_when_it_swaps_then_the_profiler_has_a_range_for_each_copy(plain: Plain) -> None:
    training = make_training()
    found: list[Any] = []
    profiler = profiled(lambda: found.append(train(training, 0.6, plain)))
    copies, stats = found[0]
    ranges = count_ranges(profiler)
    assert training.outcome() == plain.outcome
    assert copies["swap_out"] > 0
    assert copies["swap_in"] > 0
    assert (ranges["swap_out"], ranges["swap_in"]) == (copies["swap_out"], copies["swap_in"])
    assert stats.swapped_out_bytes > 0
    assert ranges["swap_in_wait"] <= ranges["swap_in"]


def test_session_when_nothing_moves_then_the_profiler_has_no_range(plain: Plain) -> None:
    training = make_training()
    found: list[Any] = []
    profiler = profiled(lambda: found.append(train(training, 4.0, plain)))
    assert found[0][0].total() == 0
    assert count_ranges(profiler).total() == 0


def test_wait_when_a_copy_back_takes_longer_than_the_program_then_a_range() -> None:
    def run() -> None:
        hidden = torch.randn(1 << 18, requires_grad=True)
        with slow_link(latency_s=LATENCY), swapkit.offload():
            for _ in range(4):
                hidden = hidden.exp().sin()
                get_runtime().current_swapper().scheduler.drain()
            hidden.sum().backward()

    ranges = count_ranges(profiled(run))
    assert ranges["swap_out"] >= ranges["swap_in"] >= ranges["swap_in_wait"] > 0


def test_optimizer_states_when_they_move_then_ranges_of_the_profiler() -> None:
    model = nn.Linear(128, 128)
    optimizer = torch.optim.Adam(model.parameters())
    swapkit.offload(optimizer)

    def step() -> None:
        model(torch.ones(4, 128)).sum().backward()
        optimizer.step()

    step()
    ranges = count_ranges(profiled(step))
    assert ranges["swap_out"] == ranges["swap_in"] > 0
    assert ranges["swap_in_wait"] == ranges["swap_in"]


def test_ranges_when_operators_are_listed_then_not_among_them(plain: Plain) -> None:
    class Listing(TorchDispatchMode):
        names: set[str]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.add(str(func))
            return func(*args, **(kwargs or {}))

    def run() -> None:
        with Listing() as listing:
            listing.names = set()
            first = torch.randn(1 << 20, requires_grad=True)
            with swapkit.offload():
                loss = (first * 2).exp().sum()
            loss.backward()
        names.append(listing.names)

    names: list[set[str]] = []
    events = profiled(run).events()
    assert events is not None
    ours = [event for event in events if event.name in RANGES]
    assert ours
    assert all(event.is_user_annotation for event in ours)
    assert not any("swap" in name or "record_function" in name for name in names[0])
    training = make_training()
    with planning_at_once(), swapkit.budget(plain.budget(0.6), training.model) as session:
        for _ in range(3):
            profiled(training.step)
        assert session.trace is not None
        assert not any("swap" in each.name for each in session.trace.operators)
