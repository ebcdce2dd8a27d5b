"""The place of a rank in a pipeline."""

from __future__ import annotations

from swapkit.ir.traces import WAIT, Operator, Phase, StagePlace, Trace, join_places

RANKS = (4, 6)


def test_places_when_a_rank_has_several_stages_then_one_place_with_all_of_them() -> None:
    several = [StagePlace((3,), 4, RANKS), StagePlace((0,), 4, RANKS)]
    assert join_places(several) == StagePlace((0, 3), 4, RANKS)
    assert join_places(several[:1]) == several[0]


def test_places_when_they_are_of_several_pipelines_then_none() -> None:
    first = StagePlace((0,), 2, RANKS)
    assert join_places([first, StagePlace((0,), 2, (5, 7))]) is None
    assert join_places([first, StagePlace((0,), 3, RANKS)]) is None
    assert join_places([]) is None


def test_waits_when_a_step_has_some_then_their_time_is_known() -> None:
    operators = tuple(
        Operator(name=name, seconds=seconds, phase=Phase.FORWARD)
        for name, seconds in (("mm", 1.0), (WAIT, 2.0), (WAIT, 4.0))
    )
    assert Trace(operators=operators, storages=()).wait_seconds == 6.0
