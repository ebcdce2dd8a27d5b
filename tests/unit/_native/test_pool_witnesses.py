"""Who is told that a pool makes memory."""

from __future__ import annotations

import threading

import pytest

from swapkit._native.backend import Backend
from swapkit._native.pool import Pool
from tests.support.threads import on_thread

KIB, MIB = 1 << 10, 1 << 20


class Witness:
    """Notes what it is told, and on which thread."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def stop(self) -> None:
        self.told.append(f"stop on {threading.current_thread().name}")

    def go_on(self) -> None:
        self.told.append(f"go on on {threading.current_thread().name}")


@pytest.mark.parametrize("whole_segments", [False, True])
def test_witnesses_when_the_pool_grows_then_told_on_the_thread_that_allocates(
    whole_segments: bool,
) -> None:
    witnesses = Witness(), Witness()
    with Backend.cpu() as backend, Pool(backend, whole_segments=whole_segments) as pool:
        for each in witnesses:
            pool.watch(each)
        on_thread(lambda: pool.give(pool.take(KIB)), name="taker")
        assert [each.told for each in witnesses] == [["stop on taker", "go on on taker"]] * 2
        pool.give(pool.take(KIB))
        for _ in range(2):  # the second does nothing
            pool.unwatch(witnesses[0])
        pool.give(pool.take(4 * MIB))
        assert [len(each.told) for each in witnesses] == [2, 4]
        pool.unwatch()
        pool.give(pool.take(64 * MIB))
        assert [len(each.told) for each in witnesses] == [2, 4]
