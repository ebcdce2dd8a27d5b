"""Times of operators without what disturbed single ones."""

from __future__ import annotations

from swapkit.ir.traces import WAIT, Operator, Phase, Storage, Trace
from swapkit.planning.smoothing import find_doubt, smooth_times

SMALL, LARGE = 0, 1


def operator(seconds: float, read: int = SMALL, name: str = "aten.mm.default") -> Operator:
    return Operator(name=name, seconds=seconds, phase=Phase.FORWARD, reads=(read,))


def trace_of(*operators: Operator) -> Trace:
    storages = (Storage(nbytes=100, death=9), Storage(nbytes=1000, death=9))
    return Trace(operators=operators, storages=storages)


def smooth(*operators: Operator, doubtful: tuple[int, ...] = ()) -> list[float]:
    return [each.seconds for each in smooth_times(trace_of(*operators), doubtful).operators]


def test_times_when_one_of_a_kind_was_disturbed_then_all_take_the_median() -> None:
    assert smooth(operator(1.0), operator(9.0), operator(1.2)) == [1.2] * 3


def test_times_when_operators_differ_in_bytes_or_name_then_each_kind_keeps_its_own() -> None:
    found = smooth(operator(1.0), operator(5.0, LARGE), operator(3.0, name="aten.add.Tensor"))
    assert found == [1.0, 5.0, 3.0]


def test_times_when_some_of_a_kind_are_doubtful_then_the_others_count() -> None:
    found = smooth(operator(9.0), operator(1.0), operator(8.0), doubtful=(0, 2))
    assert found == [1.0] * 3


def test_times_when_all_of_a_kind_are_doubtful_then_the_least_of_them_counts() -> None:
    assert smooth(operator(9.0), operator(7.0), operator(8.0), doubtful=(0, 1, 2)) == [7.0] * 3


def test_times_when_operators_wait_for_other_ranks_then_each_keeps_its_own() -> None:
    waits = operator(1.0, name=WAIT), operator(9.0, name=WAIT), operator(1.0, name=WAIT)
    assert smooth(*waits) == [1.0, 9.0, 1.0]


def test_doubt_when_a_kind_has_a_certain_time_then_its_doubtful_ones_do_not_count() -> None:
    operators = operator(9.0), operator(1.0), operator(5.0, LARGE), operator(5.0, LARGE)
    assert find_doubt(trace_of(*operators), (0, 2, 3)) == 0.5
    assert find_doubt(trace_of(*operators), (0,)) == 0.0
    assert find_doubt(trace_of(operator(0.0)), (0,)) == 0.0


def test_trace_when_it_is_smoothed_then_nothing_else_changes() -> None:
    storages = (Storage(nbytes=100, death=2),)
    trace = Trace(operators=(operator(1.0), operator(1.0)), storages=storages, signature="8x16")
    assert smooth_times(trace) == trace
