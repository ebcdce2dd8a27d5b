"""Objects by storage, of which some go while others are looked for or added."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from swapkit._runtime.recompute.by_storage import ByStorage

if TYPE_CHECKING:
    import pytest

STORAGE = 7


class Thing:
    """What can be referred to weakly."""


class Leaky(dict[int, Any]):
    """A table during whose reading things go, as when the collector runs."""

    def __init__(self, *leaving: Thing) -> None:
        super().__init__()
        self.leaving = list(leaving)

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        if found:
            self.leaving.clear()
        return found


def test_objects_when_looked_for_while_one_goes_then_the_others_are_found() -> None:
    known: ByStorage[Thing] = ByStorage()
    first, gone, last = Thing(), Thing(), Thing()
    found: list[list[Thing]] = []

    def look(_reference: object) -> None:
        found.append(known.find([STORAGE, STORAGE + 1]))

    watches = [weakref.ref(gone, look)]
    for each in (first, gone, last):
        known.add(each, [STORAGE, STORAGE + 1])
    watches.append(weakref.ref(gone, look))  # whichever is told first: one, before the table is
    del each, gone
    assert found == [[first, last]] * len(watches)


def test_table_when_an_object_goes_while_another_is_added_then_only_the_other_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: ByStorage[Thing] = ByStorage()
    table = Leaky(Thing())
    monkeypatch.setattr(known, "_found", table)
    known.add(table.leaving[0], [STORAGE])
    other = Thing()
    known.add(other, [STORAGE])
    assert [each() for each in table[STORAGE]] == [other]
    assert not table.leaving
