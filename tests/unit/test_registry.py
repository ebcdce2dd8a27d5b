"""Which of several choices for one part holds."""

from __future__ import annotations

import copy
import threading

import pytest

from swapkit.registry import (
    Choice,
    Exclude,
    Judgement,
    Keep,
    Recompute,
    Source,
    Swap,
    What,
    judge,
)

FULL, SELECTIVE = Recompute(), Recompute(save=("mm",))
NEAR, FAR = Swap(prefetch=1), Swap(prefetch=9)


def rows(*whats: What, source: Source = Source.PATTERN) -> list[Choice]:
    return [Choice(source=source, what=what) for what in whats]


def outcome(judgement: Judgement) -> tuple[Recompute | None, Swap | None, bool]:
    return judgement.recompute, judgement.swap, judgement.keep


@pytest.mark.promise("B13")
@pytest.mark.parametrize(
    ("whats", "expected", "reasons"),
    [
        ((), (None, None, False), ()),
        ((NEAR,), (None, NEAR, False), ("",)),
        ((FULL, NEAR), (FULL, None, False), ("", "it is recomputed")),
        ((NEAR, FULL), (FULL, None, False), ("it is recomputed", "")),
        ((NEAR, FAR), (None, FAR, False), ("a later choice of the same kind", "")),
        ((NEAR, NEAR), (None, NEAR, False), ("a later choice of the same kind", "")),
        ((FULL, SELECTIVE), (FULL, None, False), ("", "it is recomputed in full")),
        ((SELECTIVE, FULL), (FULL, None, False), ("it is recomputed in full", "")),
        ((FULL, Exclude()), (None, None, False), ("excluded from recomputation", "")),
        (
            (FULL, NEAR, Exclude()),
            (None, NEAR, False),
            ("excluded from recomputation", "", ""),
        ),
        ((NEAR, Keep()), (None, None, True), ("it is kept", "")),
        ((FULL, Keep()), (FULL, None, True), ("", "")),
    ],
)
def test_rows_when_judged_then_by_precedence(
    whats: tuple[What, ...],
    expected: tuple[Recompute | None, Swap | None, bool],
    reasons: tuple[str, ...],
) -> None:
    judgement = judge(rows(*whats))
    assert outcome(judgement) == expected
    assert tuple(verdict.reason for verdict in judgement.verdicts) == reasons
    assert [verdict.holds for verdict in judgement.verdicts] == [not why for why in reasons]


@pytest.mark.parametrize("order", [1, -1])
def test_planner_when_a_user_chose_otherwise_then_the_user_wins(order: int) -> None:
    both = (rows(NEAR) + rows(FAR, source=Source.PLANNER))[::order]
    judgement = judge(both)
    assert judgement.swap == NEAR
    assert judgement.swap_source is Source.PATTERN
    assert {v.choice.source: v.reason for v in judgement.verdicts} == {
        Source.PATTERN: "",
        Source.PLANNER: "a user chose otherwise",
    }


def test_exclusions_when_another_row_recomputes_in_full_then_they_still_hold() -> None:
    excluded = (("layers.0.mlp", "mul"),)
    judgement = judge(rows(Recompute(excluded=excluded), FULL))
    assert judgement.recompute == Recompute(excluded=excluded)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (Keep(), "keep"),
        (Swap(), "swap to host"),
        (Swap(to="disk", prefetch=3), "swap to disk, prefetch 3"),
        (FULL, "recompute"),
        (
            Recompute(save=("mm", "bmm"), offload=("silu",)),
            "recompute (save mm, bmm; offload silu)",
        ),
        (Recompute(policy=print), "recompute (by policy)"),
        (Exclude(), "do not recompute"),
    ],
)
def test_choice_when_printed_then_in_words(what: What, text: str) -> None:
    assert str(what) == text


def test_row_when_copied_with_its_part_then_itself() -> None:
    group = threading.Lock()  # as a group of ranks it cannot be copied
    row = Choice(source=Source.PATTERN, what=Recompute(slice_group=group))
    assert copy.deepcopy([row])[0] is row


def test_judge_when_a_user_has_spoken_then_no_row_of_the_planners_holds() -> None:
    user = Choice(source=Source.DECORATOR, what=Swap())
    planned = Choice(source=Source.PLANNER, what=Recompute(), occurrences=(1,))
    found = judge((planned, user))
    assert found.recompute is None
    assert found.swap == user.what
    assert [(each.holds, each.reason) for each in found.verdicts] == [
        (False, "a user chose otherwise"),
        (True, ""),
    ]
    assert judge((planned,)).recompute == planned.what
