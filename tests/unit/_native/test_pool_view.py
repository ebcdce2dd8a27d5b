"""A pool and its history, read at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import Backend
from swapkit._native.pool import Pool, Ring, RingKind
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Backend.cpu() as backend, Pool(backend) as opened:
        yield opened


def test_view_when_a_history_is_recorded_then_blocks_and_events_of_one_moment(pool: Pool) -> None:
    with Ring(64) as ring, Ring(64) as other:
        pool.set_history(ring)
        with pytest.raises(InvalidArgument, match="recorded already"):
            pool.set_history(other)
        pool.attach(other)
        first, second = pool.take(2 * MIB - 1), pool.take(2 * MIB)
        pool.give(first)
        view = pool.view()
        assert view.blocks == pool.blocks()
        assert view.segments == pool.segments()
        taken = [each for each in view.events if each.kind is RingKind.TAKE]
        assert [each.address for each in taken] == [first, second]
        assert [each.requested_bytes for each in taken] == [2 * MIB - 1, 2 * MIB]
        freed = [each for each in view.events if each.kind is RingKind.FREE]
        assert [each.address for each in freed] == [first]
        mapped = sum(each.nbytes for each in view.events if each.kind is RingKind.MAP)
        assert mapped == pool.reserved_bytes()
        assert list(pool.view().events) == list(view.events)  # looking takes nothing out
        assert view.events[-1] == view.events[len(view.events) - 1] == view.events[-1:][0]
        # The ring of another reader has the same takes and gives, and nothing else.
        kinds = [each.kind for each in other.read()[0]]
        assert kinds == [RingKind.TAKE, RingKind.TAKE, RingKind.GIVE]
        pool.detach()
        pool.give(second)
        assert len(pool.view().events) == len(view.events) + 2
        pool.set_history(None)
        assert list(pool.view().events) == []


def test_view_when_the_history_is_long_then_all_that_is_kept(pool: Pool) -> None:
    with Ring(1000) as ring:
        pool.set_history(ring)
        for number in range(1500):
            pool.note(RingKind.MARK, number)
        view = pool.view()
        assert [each.nbytes for each in view.events] == list(range(500, 1500))
        assert view.lost_events == 500
        pool.set_history(None)
