"""Which session a scope belongs to, and who takes part in a rescue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime.affinity.devices import DevicePlaces
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import CPU
from tests.support import MIB, installed
from tests.support.threads import on_thread
from tests.unit._runtime.rig import SWAP, evict, make_swapper, save

if TYPE_CHECKING:
    import torch

ROOMY = 1 << 40

pytestmark = pytest.mark.usefixtures("installation")


def test_runtime_when_asked_for_then_there_is_one() -> None:
    assert get_runtime() is get_runtime()
    assert on_thread(get_runtime) is get_runtime()


def test_current_when_no_session_is_active_then_the_process_has_one() -> None:
    runtime = get_runtime()
    assert runtime.current_swapper() is runtime.default_swapper(runtime.cpu)
    assert on_thread(runtime.current_swapper) is runtime.default_swapper(runtime.cpu)


def test_current_when_sessions_nest_then_the_innermost_of_the_thread() -> None:
    runtime = get_runtime()
    with swapkit.budget(ROOMY) as outer:
        assert outer._active is not None
        assert runtime.current_swapper() is outer._active.swapper
        with swapkit.budget(ROOMY) as inner:
            assert inner._active is not None
            assert runtime.current_swapper() is inner._active.swapper
        assert runtime.current_swapper() is outer._active.swapper
        # A thread of the program that has no session of its own belongs to the one there is.
        assert on_thread(runtime.current_swapper) is outer._active.swapper
    assert runtime.current_swapper() is runtime.default_swapper(runtime.cpu)


def test_default_when_made_then_its_node_is_looked_up_before_the_lock_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Places(DevicePlaces):
        def host_node(self, name: torch.device) -> int | None:
            assert name == CPU
            held.append(runtime.lock.is_owned())
            return None

    held: list[bool] = []
    runtime = get_runtime()
    monkeypatch.setattr(runtime, "places", Places())
    monkeypatch.setattr(runtime, "_defaults", {})
    made = runtime.default_swapper(runtime.cpu)
    assert not held[0]
    looked_up = len(held)
    assert runtime.default_swapper(runtime.cpu) is made
    assert len(held) == looked_up


def test_room_when_there_is_a_budget_then_some_is_left_for_operators() -> None:
    runtime = get_runtime()
    with installed() as installation:
        assert runtime.cpu.has_room(1 << 50)
        in_use = runtime.cpu.in_use_bytes()
        with swapkit.budget(max(64 * MIB, 64 * in_use)) as session:
            assert runtime.cpu.has_room(MIB)
            assert not runtime.cpu.has_room(session.limit_bytes - runtime.cpu.in_use_bytes())
        assert installation.pool.budget_bytes == 0


def test_trace_when_nobody_asked_for_it_then_nothing_is_noted() -> None:
    runtime = get_runtime()
    swapper = make_swapper()
    handle = save(swapper, 4096, SWAP)
    evict(swapper, handle)
    assert handle.group is not None
    assert runtime.trace is None
    swapper.note_move("release", handle.group, 7)
    runtime.trace = []
    try:
        swapper.note_move("release", handle.group, 7)
        (move,) = runtime.trace
    finally:
        runtime.trace = None
    assert (move.kind, move.operator, move.nbytes) == ("release", 7, 4096)
    assert move.site.endswith("[1024]")
