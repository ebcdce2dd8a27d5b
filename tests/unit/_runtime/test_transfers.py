"""Copies arrive whole, keep both ends alive, and are counted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.lib import lib
from swapkit._native.pool import Pool, Ring, RingKind
from swapkit._runtime.transfers import CopyEngine
from swapkit.errors import BackendError, OverBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB = 1024


class Rig(NamedTuple):
    backend: Backend
    pool: Pool
    engine: CopyEngine


def make_rig(wrap: Callable[[Backend], Backend], *, host_limit_bytes: int = 0) -> Rig:
    backend = wrap(Backend.cpu(capacity_bytes=64 * KIB * KIB))
    pool = Pool(backend)
    return Rig(backend, pool, CopyEngine(pool, host_limit_bytes=host_limit_bytes))


@pytest.fixture
def rig() -> Rig:
    return make_rig(lambda backend: backend)


@pytest.fixture
def slow() -> Iterator[Rig]:
    """Copies wait until they are released."""
    rig = make_rig(Backend.delay)
    yield rig
    rig.backend.release_copies()


def make_storage(nbytes: int = 4096) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def holders(storage: torch.UntypedStorage) -> int:
    """Count the objects of Python that hold a storage: all share one reference of torch's."""
    return sys.getrefcount(storage)


def test_copy_when_out_and_in_then_the_bytes_are_equal(rig: Rig) -> None:
    storage = make_storage()
    out = rig.engine.copy_out(storage)
    rig.engine.wait(out)
    back = torch.zeros(4096, dtype=torch.uint8).untyped_storage()
    rig.engine.wait(rig.engine.copy_in(out.host, back))
    assert back.tolist() == storage.tolist()
    assert rig.engine.copied_out_bytes == rig.engine.copied_in_bytes == 4096


def test_copy_when_in_flight_then_not_done_and_counted(slow: Rig) -> None:
    transfer = slow.engine.copy_out(make_storage())
    second = slow.engine.copy_out(make_storage())
    assert not transfer.is_done()
    assert slow.engine.in_flight == 2
    slow.backend.release_copies(1)
    slow.engine.wait(transfer)
    assert transfer.is_done()
    assert slow.engine.in_flight == 1
    assert not second.is_done()
    slow.backend.release_copies()
    slow.engine.wait(second)
    assert slow.engine.in_flight == 0


def test_copy_when_everyone_else_let_go_then_both_ends_live_until_it_is_done(slow: Rig) -> None:
    storage = make_storage()
    before = holders(storage)
    transfer = slow.engine.copy_out(storage)
    event = transfer._event
    del transfer
    assert holders(storage) > before
    assert slow.engine.host_in_use_bytes > 0
    slow.backend.release_copies()
    event.synchronize()
    slow.engine.poll()
    assert holders(storage) == before
    assert slow.engine.host_in_use_bytes == 0


def test_buffer_when_its_owner_goes_then_the_host_memory_is_given_back(rig: Rig) -> None:
    transfer = rig.engine.copy_out(make_storage())
    rig.engine.wait(transfer)
    rig.engine.poll()
    host = transfer.host
    del transfer
    assert rig.engine.host_in_use_bytes >= 4096
    del host
    assert rig.engine.host_in_use_bytes == 0
    assert rig.engine.host_peak_bytes >= 4096


def test_copy_when_the_host_limit_would_be_passed_then_refused_and_nothing_counted() -> None:
    rig = make_rig(lambda backend: backend, host_limit_bytes=128 * KIB)
    with pytest.raises(OverBudget):
        rig.engine.copy_out(make_storage(256 * KIB))
    assert rig.engine.copied_out_bytes == 0
    assert rig.engine.in_flight == 0
    rig.engine.wait(rig.engine.copy_out(make_storage(64 * KIB)))
    assert rig.engine.host_peak_bytes <= 128 * KIB


def test_copy_when_its_event_cannot_be_recorded_then_nothing_is_left() -> None:
    rig = make_rig(Backend.fault)
    storage = make_storage()
    before = holders(storage)
    for nth in (1, 2, 3):  # making the event, queueing the copy, recording the event
        rig.backend.arm_fault(nth, forever=False, status=lib.SK_BACKEND_FAILED)
        with pytest.raises(BackendError):
            rig.engine.copy_out(storage)
        assert holders(storage) == before
        assert rig.engine.in_flight == 0
        assert rig.engine.host_in_use_bytes == 0
        assert rig.engine.copied_out_bytes == 0
    rig.backend.arm_fault(0, forever=False, status=0)
    rig.engine.wait(rig.engine.copy_out(storage))
    assert rig.engine.copied_out_bytes == 4096


def test_wait_when_it_took_time_then_the_stall_grows(rig: Rig) -> None:
    assert rig.engine.stall_seconds == 0.0
    rig.engine.wait(rig.engine.copy_out(make_storage(KIB * KIB)))
    assert rig.engine.stall_seconds > 0.0


def test_copy_when_a_ring_is_attached_then_both_directions_are_in_it(rig: Rig) -> None:
    ring = Ring(16)
    rig.pool.attach(ring)
    out = rig.engine.copy_out(make_storage())
    rig.engine.wait(out)
    rig.engine.wait(rig.engine.copy_in(out.host, make_storage()))
    rig.pool.detach()
    events, lost = ring.read()
    assert [(event.kind, event.nbytes) for event in events] == [
        (RingKind.COPY_OUT, 4096),
        (RingKind.COPY_IN, 4096),
    ]
    assert lost == 0
