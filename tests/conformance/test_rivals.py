"""The table of rivals can be made, ours is right everywhere, and it shows where others are not."""

from __future__ import annotations

import pytest

from tests.conformance.rivals import ABSENT, format_table, judge, list_rivals, make_table
from tests.programs import ILLEGAL, PROGRAMS
from tests.support.place import ON_CPU

pytestmark = pytest.mark.skipif(not ON_CPU, reason="rivals drive the CPU as it were a GPU")


def test_table_when_made_then_swapkit_is_right_and_what_is_not_installed_says_so() -> None:
    rivals = list_rivals()
    assert [rival.name for rival in rivals][:2] == ["swapkit", "save_on_cpu"]
    rows = make_table([*PROGRAMS[:3], *ILLEGAL[:2]], rivals)
    assert {row[1] for row in rows} == {"ok"}
    for row in rows:
        for verdict, rival in zip(row[1:], rivals, strict=True):
            assert (verdict == ABSENT) == (rival.opener is None)
    text = format_table(rows, rivals)
    assert text.splitlines()[0].startswith("| program | swapkit | save_on_cpu | torchtune")
    assert "**5 of 5**" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("saved_tensor_changed", "not refused"),
        ("input_of_a_checkpoint_changed", "not refused"),
        ("saved_tensors_read_twice", "ok"),
    ],
)
def test_save_on_cpu_when_judged_then_known_weaknesses_are_found(name: str, verdict: str) -> None:
    (entry,) = (each for each in [*PROGRAMS, *ILLEGAL] if each.body.__name__ == name)
    opener = next(rival.opener for rival in list_rivals() if rival.name == "save_on_cpu")
    assert judge(entry, opener) == verdict
