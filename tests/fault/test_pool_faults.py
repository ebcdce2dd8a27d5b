"""The nth backend call fails, n = 1, 2, ... until a run has no failure; seen from Python.

Every failure must come as one of swapkit's errors, and leave a pool that is sound, has lost nothing
and serves the next request. tests/c/test_fault.c does the same with more scenarios and without
Python.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import Backend, CopyKind, Stream
from swapkit._native.lib import EXCEPTIONS, lib
from swapkit._native.pool import Pool
from swapkit.errors import OverBudget, SwapkitError
from tests.support.instruments import Instrument

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 << 10
MIB = 1 << 20
BUDGET = 16 * MIB
COPIED = 4 * KIB
MOST_CALLS = 2000

STATUSES = {
    "device memory": lib.SK_OUT_OF_DEVICE_MEMORY,
    "host memory": lib.SK_OUT_OF_HOST_MEMORY,
    "backend": lib.SK_BACKEND_FAILED,
}


class Scene:
    """A pool with streams, and the blocks that its steps hold."""

    def __init__(self, *, whole_segments: bool) -> None:
        self.backend = Instrument.fault(Backend.cpu(capacity_bytes=4 * BUDGET))
        self.pool = Pool(self.backend, budget_bytes=BUDGET, whole_segments=whole_segments)
        self.streams: list[Stream | None] = [None]
        self.held: list[int] = []
        self.spare: list[int] = []
        self.host = ctypes.create_string_buffer(COPIED)
        self.errors: list[SwapkitError] = []
        self.pool.set_rescue(self.rescue)

    def attempt(self, step: Callable[[], None]) -> None:
        """Do one step; it may fail, but only with an error of ours."""
        try:
            step()
        except SwapkitError as error:
            self.errors.append(error)

    def rescue(self, needed_bytes: int) -> int:
        if not self.spare:
            return 0
        try:
            self.pool.give(self.spare[-1])
        except SwapkitError:
            return 0
        self.spare.pop()
        return needed_bytes

    def open_stream(self) -> None:
        self.streams.append(self.backend.stream())

    def take(self, nbytes: int, index: int) -> None:
        stream = self.streams[index % len(self.streams)]
        self.held.append(self.pool.take(nbytes, stream))

    def give(self) -> None:
        if self.held:
            self.pool.give(self.held[0])
            self.held.pop(0)

    def copy(self, index: int) -> None:
        if not self.held:
            return
        stream = self.streams[index % len(self.streams)]
        self.pool.use(self.held[0], stream)
        self.backend.copy(
            to=ctypes.addressof(self.host),
            source=self.held[0],
            nbytes=COPIED,
            kind=CopyKind.DEVICE_TO_HOST,
            stream=stream,
        )

    def play(self) -> None:
        """All the steps, each of which may fail."""
        for _ in range(2):
            self.attempt(self.open_stream)
        for index in range(5):
            self.attempt(partial(self.take, (index + 1) * 500 * KIB, index))
        self.attempt(lambda: self.copy(1))
        self.attempt(self.give)
        self.attempt(lambda: self.take(9 * MIB, 2))
        self.attempt(self.give)
        self.attempt(self.pool.trim)
        self.spare, self.held = self.held, []
        self.attempt(lambda: self.take(14 * MIB, 1))
        self.attempt(self.give)
        self.attempt(lambda: self.pool.set_budget(BUDGET // 2))
        self.attempt(lambda: self.take(6 * MIB, 0))
        self.attempt(lambda: self.pool.set_budget(BUDGET))

    def finish(self) -> None:
        """With the fault gone all is well again."""
        self.pool.set_rescue(None)
        self.pool.check()
        stats = self.pool.stats()
        assert stats["reserved_bytes.all.peak"] <= BUDGET
        assert stats["allocation.all.current"] == len(self.held) + len(self.spare)
        for address in (*self.held, *self.spare):
            self.pool.give(address)
        self.pool.set_budget(BUDGET)
        self.pool.give(self.pool.take(BUDGET))
        self.pool.trim()
        self.pool.check()
        assert self.pool.stats()["reserved_bytes.all.current"] == 0
        self.pool.close()
        info = self.backend.memory_info()
        assert info.free_bytes == info.total_bytes
        self.backend.close()


@pytest.mark.parametrize("whole_segments", [False, True])
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("status", STATUSES)
def test_pool_when_nth_call_fails_then_error_is_ours_and_pool_recovers(
    status: str, *, forever: bool, whole_segments: bool
) -> None:
    seen: set[type[SwapkitError]] = set()
    for nth in range(1, MOST_CALLS):
        scene = Scene(whole_segments=whole_segments)
        scene.backend.arm_fault(nth, forever=forever, status=STATUSES[status])
        scene.play()
        calls = scene.backend.fault_calls()
        scene.backend.arm_fault(0, forever=False, status=lib.SK_OK)
        scene.finish()
        assert all(str(error) for error in scene.errors)
        seen |= {type(error) for error in scene.errors}
        if calls < nth:
            break
    else:
        pytest.fail(f"still failing at call {MOST_CALLS}")
    assert nth > 10  # the scenario does ask the backend for something
    assert seen <= {EXCEPTIONS[STATUSES[status]], OverBudget}
    assert EXCEPTIONS[STATUSES[status]] in seen
