"""Moves arrive whole, keep both ends alive, and are counted; failed ones harm nobody."""

from __future__ import annotations

import errno
import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.lib import lib
from swapkit._native.pool import Ring
from swapkit._native.sched import State
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.shim.types import Placement
from swapkit.errors import BackendError, DiskError, SavedTensorModified
from swapkit.ir.plans import Action, Tier
from tests.support import MIB, run_python
from tests.support.instruments import Instrument, disk_fault, instruments
from tests.support.threads import Worker
from tests.unit._runtime.rig import (
    SWAP,
    evict,
    group_of,
    in_use,
    make_swapper,
    numbers,
    save,
    scope,
    settle,
    state_of,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.shim.types import SavedTensor

pytestmark = pytest.mark.usefixtures("installation")


def test_copy_when_out_and_in_then_the_bytes_are_equal() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    evict(swapper, handle)
    assert swapper.mover.bring_early(group_of(handle))
    swapper.mover.finish_in(group_of(handle))
    assert state_of(handle) == State.CLEAN
    assert torch.equal(unpack(swapper, handle), numbers(4096))
    stats = swapper.scheduler.stats()
    assert stats.copied_out_bytes == stats.copied_in_bytes == 4096


def test_copy_when_a_ring_is_attached_then_both_directions_are_in_it(
    installation: Installation,
) -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    ring = Ring(64)
    installation.pool.attach(ring)
    evict(swapper, handle)
    unpack(swapper, handle)
    installation.pool.detach()
    copies = [event for event in ring.read()[0] if event.kind.name.startswith("COPY")]
    assert [(event.kind.name, event.nbytes) for event in copies] == [
        ("COPY_OUT", 4096),
        ("COPY_IN", 4096),
    ]


def test_copy_when_everyone_else_let_go_then_both_ends_live_until_it_is_done(
    installation: Installation,
) -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    before = in_use(installation)
    handle = save(swapper, 4 * MIB)
    assert swapper.mover.copy_out(group_of(handle))
    assert not swapper.mover.poll_out(group_of(handle))
    del handle
    assert in_use(installation) == before + 4 * MIB
    assert swapper.scheduler.stats().host_bytes > 0
    slow.release_copies()
    swapper.scheduler.drain()
    settle(swapper)
    assert swapper.scheduler.stats().host_bytes == 0
    assert in_use(installation) == before


def test_copy_out_when_the_host_is_full_then_false_and_the_storage_is_not_held() -> None:
    swapper = make_swapper(host_limit_bytes=MIB)
    handle = save(swapper, 2 * MIB)
    group = group_of(handle)
    assert not swapper.mover.copy_out(group)
    assert group.state == State.RESIDENT
    assert group.is_exclusive
    assert swapper.scheduler.stats().copied_out_bytes == 0


def test_copy_out_when_there_is_nothing_to_copy_then_false() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    evict(swapper, handle)
    assert not swapper.mover.copy_out(group_of(handle))
    assert not swapper.mover.finish_out(group_of(save(swapper, 4096)))


def test_copy_when_the_backend_fails_then_nothing_is_left() -> None:
    fault = Instrument.fault(Backend.cpu())
    swapper = make_swapper(fault)
    evict(swapper, save(swapper, 4096, seed=9))  # streams and events are there
    failures = 0
    for nth in range(1, 8):
        handle = save(swapper, 4096, seed=nth)
        group = group_of(handle)
        fault.arm_fault(nth, forever=False, status=lib.SK_BACKEND_FAILED)
        try:
            swapper.mover.copy_out(group)
            swapper.mover.finish_out(group)
        except BackendError:
            failures += 1
        fault.arm_fault(0, forever=False, status=0)
        evict(swapper, handle)
        assert state_of(handle) == State.OUT
        assert torch.equal(unpack(swapper, handle), numbers(4096, nth))
    assert failures > 0


def test_copy_in_when_there_is_no_memory_without_effort_then_tentatively_none(
    installation: Installation,
) -> None:
    swapper = make_swapper()
    handle = save(swapper, 8 * MIB)
    evict(swapper, handle)
    installation.pool.trim()
    installation.pool.set_budget(installation.pool.stats()["reserved_bytes.all.current"] or 1)
    try:
        assert not swapper.mover.bring_early(group_of(handle))
        with pytest.raises(torch.OutOfMemoryError):
            swapper.mover.bring_back(group_of(handle))
        assert state_of(handle) == State.OUT
    finally:
        installation.pool.set_budget(0)
    assert swapper.mover.bring_early(group_of(handle))
    assert torch.equal(unpack(swapper, handle), numbers(8 * MIB))


def test_stall_when_a_copy_is_waited_for_then_it_is_counted_for_the_site() -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    first, second = save(swapper, 4096), save(swapper, 4096, seed=1)
    first_site, second_site = ((g.tag, g.index) for g in map(group_of, (first, second)))
    assert swapper.mover.stalls == {}
    assert swapper.mover.copy_out(group_of(first))
    slow.release_copies()
    assert swapper.mover.finish_out(group_of(first))
    stalls = swapper.mover.stalls
    assert stalls[first_site] > 0
    assert second_site not in stalls
    assert swapper.scheduler.stats().stall_ns > 0


def test_copy_in_when_a_read_fails_then_the_group_is_out_and_comes_back_when_asked_again(
    tmp_path: Path,
) -> None:
    swapper = make_swapper(disk=tmp_path)
    handle = save(swapper, MIB, Placement(Action.SWAP, Tier.DISK))
    settle(swapper)
    assert state_of(handle) == State.OUT
    refused = disk_fault(instruments.SK_DISK_CALL_READ, errno.EIO)
    with refused, pytest.raises(DiskError, match="Input/output error"):
        unpack(swapper, handle)
    assert state_of(handle) == State.OUT
    assert swapper.mover.resident == []
    assert torch.equal(unpack(swapper, handle), numbers(MIB))


def test_mover_when_it_is_given_a_group_of_another_or_none_then_it_refuses() -> None:
    swapper, other = make_swapper(), make_swapper()
    handle = save(swapper, 4096)
    with pytest.raises(TypeError, match="StorageGroup of this mover"):
        other.mover.copy_out(group_of(handle))
    with pytest.raises(TypeError, match="StorageGroup of this mover"):
        swapper.mover.release(handle)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a copy"):
        swapper.mover.release(group_of(handle))
    with pytest.raises(TypeError, match="expected a SavedTensor"):
        swapper.unpack(torch.ones(2))  # type: ignore[arg-type]


def test_mover_when_nobody_has_its_swapper_any_more_then_it_goes_after_its_last_graph() -> None:
    swapper = make_swapper()
    handle = save(swapper, 4096)
    evict(swapper, handle)
    scheduler = weakref.ref(swapper.scheduler)
    mover = weakref.ref(swapper.mover)
    policy = swapper.unpack
    del swapper
    gc.collect()
    assert torch.equal(policy(handle), numbers(4096))
    del handle
    gc.collect()
    assert mover() is None
    assert scheduler() is None


# ---- while others act ---------------------------------------------------------------------------


def while_locked(act: Callable[[], object], then: Callable[[], object]) -> None:
    """Start `act` on a thread, and do something else while it waits for the lock."""
    lock = get_runtime().lock
    with lock:
        worker = Worker(act)
        time.sleep(0.2)
        then()
    worker.finish()


def test_pack_when_the_tensor_gets_another_storage_meanwhile_then_that_one_is_saved() -> None:
    swapper = make_swapper()
    tensor = numbers(20_000)
    pack = swapper.packer(SWAP)
    handles: list[SavedTensor] = []

    def replace() -> None:
        tensor.set_(torch.zeros(5000).untyped_storage(), 0, (5000,), (1,))

    while_locked(lambda: handles.append(pack(tensor)), replace)
    settle(swapper)
    assert torch.equal(unpack(swapper, handles[0]), torch.zeros(5000))


def test_unpack_when_the_graph_lets_go_meanwhile_then_the_tensor_is_whole() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x * 2)
            return x * 1

        @staticmethod
        def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    swapper = make_swapper()
    x = numbers(20_000).requires_grad_()
    with scope(swapper, SWAP):
        y = Twice.apply(x)
    settle(swapper)
    node, found = y.grad_fn, []
    while_locked(lambda: found.append(node.saved_tensors[0]), lambda: y.sum().backward())
    assert torch.equal(found[0], x * 2)


def test_unpack_when_a_release_is_due_at_that_very_operator_then_the_tensor_is_whole() -> None:
    swapper = make_swapper()
    for count in range(8):
        x = numbers(20_000).requires_grad_()
        with scope(swapper, Placement(Action.SWAP, prefetch=1)):
            y = (x * 2).exp()
        swapper.scheduler.drain()
        z = torch.ones(1, requires_grad=True)
        for _ in range(count):
            z = z.neg()
        assert torch.equal(y.grad_fn._saved_result, y)  # type: ignore[union-attr]


def test_lists_when_they_are_read_while_something_dies_then_it_is_in_none() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    handles = [save(swapper, tensor), save(swapper, tensor[1:])]
    group = group_of(handles[0])
    found: list[object] = []
    watched = weakref.ref(handles[0], lambda _: found.extend(group.handles))
    del handles[0]
    assert found == handles
    assert watched() is None
    other = save(swapper, 4096)
    watching = weakref.ref(group_of(other), lambda _: found.extend(swapper.mover.resident))
    found.clear()
    del other
    assert found == [group]
    assert watching() is None


def test_copy_when_the_storage_was_emptied_then_there_is_none() -> None:
    swapper = make_swapper()
    base = numbers(1 << 18)
    handle = save(swapper, base[20_000:21_000], SWAP)  # a part: it waits for neighbours
    base.untyped_storage().resize_(0)  # as FSDP does
    swapper.end_scope()
    assert state_of(handle) == State.RESIDENT
    assert swapper.scheduler.stats().copied_out_bytes == 0


def test_save_when_the_users_tensor_guards_its_attributes_then_versions_are_checked() -> None:
    class Guarded(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(func, "__self__", None) is torch.Tensor._cdata:
                raise KeyError
            return super().__torch_function__(func, types, args, kwargs or {})

    swapper = make_swapper()
    tensor = numbers(4096).as_subclass(Guarded)
    handle = save(swapper, tensor)
    assert torch.equal(unpack(swapper, handle), numbers(4096))
    tensor.add_(1)
    with pytest.raises(SavedTensorModified):
        unpack(swapper, handle)


def test_process_when_it_ends_while_a_thread_waits_for_a_copy_then_it_ends_well() -> None:
    run_python(
        """
        import os, threading, time
        import torch
        from swapkit._native.backend import Backend
        from tests.support.instruments import Instrument
        from swapkit._runtime.shim.types import Placement
        from swapkit.ir.plans import Action
        from tests.unit._runtime.rig import group_of, make_swapper, save

        slow = Instrument.delay(Backend.cpu())
        swapper = make_swapper(slow)
        handle = save(swapper, 4096, Placement(Action.SWAP, prefetch=5))
        wait = lambda: swapper.mover.finish_out(group_of(handle))
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.3)

        class AtTheEnd(list):  # found by the collector when Python ends; the thread is woken then
            release, sleep = slow.release_copies, time.sleep
            def __del__(self):
                self.release()
                self.sleep(0.3)

        end = AtTheEnd()
        end.append(end)
        del end
        """
    )
