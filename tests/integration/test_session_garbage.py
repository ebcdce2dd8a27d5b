"""What the cyclic collector has to look at in a stable session: little, and no garbage."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from tests.support.sessions import make_training, settle, train_plainly

if TYPE_CHECKING:
    from tests.support.sessions import Training

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")

# For each operator that is computed again: what is known of it, of its operands and results.
MOST_A_RECIPE = 30
MOST_A_ROW = 1.5  # of the trace: operators, storages and events


class Census:
    """Counts the collector's objects when forward ends, beside those before the step."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._end = 0
        training.model.register_forward_hook(self._see)

    def _see(self, *_: object) -> None:
        self._end = len(gc.get_objects())

    def run(self) -> int:
        gc.collect()
        before = len(gc.get_objects())
        self._training.step()
        return self._end - before


@pytest.mark.usefixtures("no_collector")
def test_stable_step_when_operators_are_recomputed_then_few_objects_wait_for_backward() -> None:
    plain = Census(make_training()).run()
    budget = train_plainly(make_training, 2).budget(0.4)
    training = make_training()
    census = Census(training)
    with swapkit.budget(budget, training.model, training.optimizer, policy="recompute") as session:
        settle(session, training, 12)
        census.run()
        before = session.stats.recomputed_regions
        found = census.run()
        recipes = session.stats.recomputed_regions - before
        assert recipes > 20
        assert found - plain < MOST_A_RECIPE * recipes
        assert gc.collect() < recipes // 2, "references in a circle"


def test_stable_session_when_it_was_planned_then_it_holds_the_trace_and_little_more() -> None:
    budget = train_plainly(make_training, 2).budget(0.4)
    before = _count_ours()
    training = make_training()
    with swapkit.budget(budget, training.model, training.optimizer) as session:
        settle(session, training, 12)
        training.step()
        trace = session.trace
        assert trace is not None
        rows = len(trace.operators) + len(trace.storages) + len(trace.events)
        held = _count_ours() - before
        assert sum(held.values()) < MOST_A_ROW * rows, held.most_common(5)
    del training, session, trace
    torch.ones(1)
    assert sum((_count_ours() - before).values()) < rows // 4


def _count_ours() -> Counter[str]:
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("swapkit.")
    )
