"""Who is told that a pool makes memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from swapkit._native.backend import Backend
from swapkit._native.lib import lib
from swapkit._native.pool import Pool
from tests.support.threads import Worker, on_thread

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Meddler(Witness):
    """Does something else when a thread begins to make memory."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self._meddle = meddle

    def stop(self) -> None:
        super().stop()
        self._meddle()


def test_witnesses_when_changed_while_a_thread_makes_memory_then_told_both_or_neither() -> None:
    early, late = Witness(), Witness()
    with Backend.cpu() as backend, Pool(backend) as pool:

        def change() -> None:
            pool.unwatch(early)
            pool.watch(late)

        pool.watch(Meddler(change))
        pool.watch(early)
        on_thread(lambda: pool.give(pool.take(4 * MIB)), name="taker")
        assert early.told == ["stop on taker", "go on on taker"]
        assert late.told == []
        pool.give(pool.take(64 * MIB))
        assert [len(each.told) for each in (early, late)] == [2, 2]
        pool.unwatch()


class Interrupted:
    """The native functions; somebody else comes in between while the first witness is undone."""

    def __init__(self, lib: Any, come_in: Callable[[], None]) -> None:
        self._lib = lib
        self._come_in: Callable[[], None] | None = come_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def sk_pool_set_making(self, pool: Any, making: Any, context: Any) -> None:
        come_in, self._come_in = self._come_in, None
        if come_in is not None:
            come_in()
        self._lib.sk_pool_set_making(pool, making, context)


def test_watch_when_another_thread_unwatches_meanwhile_then_it_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Witness(), Witness()
    with Backend.cpu() as backend, Pool(backend) as pool:
        pool.watch(first)
        others: list[Worker[None]] = []

        def come_in() -> None:
            others.append(Worker(lambda: pool.watch(second)))
            others[0].thread.join(0.2)  # it has to wait for the one that has begun

        monkeypatch.setattr("swapkit._native.pool.lib", Interrupted(lib, come_in))
        pool.unwatch(first)
        others[0].finish()
        pool.give(pool.take(4 * MIB))
        assert (len(first.told), len(second.told)) == (0, 2)
        pool.unwatch()
