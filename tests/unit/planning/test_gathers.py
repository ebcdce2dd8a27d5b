"""Gathers of sharded weights in a recorded step, and the step with other ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.ir.checks import check_trace
from swapkit.ir.traces import Phase, Trace, is_wait
from swapkit.planning.gathers import find_gathered, list_gathers, rewrite_gathers
from tests.support.gathered_steps import GATHER_SECONDS, WAIT_SECONDS, WORK_SECONDS, make_step

ALL = frozenset("012")
ONCE = 4 * GATHER_SECONDS + WAIT_SECONDS


def names(trace: Trace) -> list[str]:
    """Return the operators that do work, in order."""
    return [each.name for each in trace.operators if not is_wait(each.name)]


@pytest.mark.parametrize("kept", [(), (0, 1, 2), (1,)])
def test_modules_when_some_keep_their_weights_then_each_is_found_with_its_setting(
    kept: tuple[int, ...],
) -> None:
    found = find_gathered(make_step(kept))
    assert [(each.path, each.is_kept, each.nbytes) for each in found] == [
        (str(layer), layer in kept, 1000) for layer in range(3)
    ]
    for each in found:
        assert each.seconds == pytest.approx(ONCE)


def test_modules_when_one_is_used_early_then_its_weights_would_occupy_memory_longest() -> None:
    for kept in (), (0, 1, 2):
        first, second, third = find_gathered(make_step(kept))
        assert first.byte_seconds > second.byte_seconds > third.byte_seconds
    assert first.byte_seconds == pytest.approx(1000 * (4 * WORK_SECONDS + 2 * ONCE))


def test_seconds_when_another_rank_is_late_then_that_wait_does_not_count() -> None:
    for each in find_gathered(make_step((), late=1)):
        assert each.seconds == pytest.approx(ONCE)


def test_modules_when_an_evaluation_follows_then_its_gathers_do_not_count() -> None:
    trace = make_step((), evaluates=True)
    assert len(list(list_gathers(trace))) == 9
    found = find_gathered(trace)
    assert [(each.path, each.is_kept, len(each.gathers)) for each in found] == [
        ("0", False, 1), ("1", False, 1), ("2", False, 1)
    ]  # fmt: skip


def test_modules_when_one_gathers_twice_in_forward_then_it_is_left_out() -> None:
    trace = make_step(())
    ((first, *_),) = [[each for each in find_gathered(trace) if each.path == "0"]]
    second = first.gathers[0][1]
    assert second is not None
    operators = list(trace.operators)
    operators[second.copy_out] = replace(operators[second.copy_out], phase=Phase.FORWARD)
    found = find_gathered(replace(trace, operators=tuple(operators)))
    assert [each.path for each in found] == ["1", "2"]


def test_modules_when_one_gathers_twice_in_backward_then_it_is_left_out() -> None:
    trace = make_step((), evaluates=True)
    third = [each for each in list_gathers(trace) if each.shards == (0,)][-1]
    operators = list(trace.operators)
    operators[third.copy_out] = replace(operators[third.copy_out], phase=Phase.BACKWARD)
    found = find_gathered(replace(trace, operators=tuple(operators)))
    assert [each.path for each in found] == ["1", "2"]


def test_modules_when_one_gathers_again_what_backward_has_used_and_freed_then_it_is_left_out() -> (
    None
):
    trace = make_step(())
    first = next(list_gathers(trace))
    weights = first.weights[0]
    used = next(
        number
        for number, each in enumerate(trace.operators)
        if each.name.startswith("aten.mm") and each.phase is Phase.BACKWARD
    )
    operators, storages = list(trace.operators), list(trace.storages)
    reads = (*operators[used].reads, weights)
    operators[used] = replace(operators[used], reads=reads)
    storages[weights] = replace(storages[weights], death=used + 1)
    found = find_gathered(replace(trace, operators=tuple(operators), storages=tuple(storages)))
    assert [each.path for each in found] == ["1", "2"]


@pytest.mark.parametrize(
    ("kept", "options"),
    [
        (ALL, {}),
        (frozenset("1"), {}),
        (frozenset("02"), {}),
        (frozenset("1"), {"is_half": True}),
        (ALL, {"is_half": True, "is_ahead": True}),
    ],
)
def test_step_when_modules_keep_their_weights_then_it_is_the_one_that_would_be_recorded(
    kept: frozenset[str], options: dict[str, bool]
) -> None:
    expected = make_step([int(each) for each in kept], **options)
    found = rewrite_gathers(make_step((), **options), kept)
    check_trace(found)
    assert names(found) == names(expected)
    assert found.seconds == pytest.approx(expected.seconds)
    working = [not is_wait(each.name) for each in found.operators]
    wanted = [not is_wait(each.name) for each in expected.operators]
    memory = [nbytes for nbytes, works in zip(found.memory(), working, strict=True) if works]
    real = [nbytes for nbytes, works in zip(expected.memory(), wanted, strict=True) if works]
    assert memory == real
    assert [(each.kind, each.storage is None) for each in found.events] == [
        (each.kind, each.storage is None) for each in expected.events
    ]


def test_step_when_a_rank_was_late_then_the_rest_of_the_wait_stays_without_the_gather() -> None:
    late, others = (rewrite_gathers(make_step((), late=each), ALL) for each in (1, None))
    assert late.seconds == pytest.approx(others.seconds + 9 * WAIT_SECONDS)


@pytest.mark.parametrize("kept", [frozenset[str](), frozenset("2"), frozenset("0")])
@pytest.mark.parametrize("is_half", [False, True])
def test_step_when_modules_free_their_weights_then_they_gather_them_one_module_ahead(
    kept: frozenset[str], *, is_half: bool
) -> None:
    recorded = make_step((0, 1, 2), is_half=is_half)
    found = rewrite_gathers(recorded, kept)
    check_trace(found)
    expected = make_step([int(each) for each in kept], is_ahead=True, is_half=is_half)
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.peak_bytes == expected.peak_bytes
    assert [each.name for each in found.operators if "mm" in each.name or "split" in each.name] == [
        each.name for each in expected.operators if "mm" in each.name or "split" in each.name
    ]
    forward = [each.phase is Phase.FORWARD for each in expected.operators]
    assert found.memory()[: sum(forward)] == expected.memory()[: sum(forward)]


def test_step_when_nothing_changes_then_it_is_the_same() -> None:
    trace = make_step((1,))
    assert rewrite_gathers(trace, {"1"}) is trace
