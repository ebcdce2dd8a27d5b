"""Copies between device and host, and the host memory they go to.

Host copies live in memory of our own, outside torch's allocators, in a pool whose budget is the
session's `host_limit`. Each direction has a stream. A transfer in flight keeps both ends alive,
whatever becomes of the saved tensors it was made for.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from swapkit._native.backend import Backend, CopyKind, Event, Stream
from swapkit._native.pool import Pool, RingKind
from swapkit.errors import SwapkitError

if TYPE_CHECKING:
    import torch


class HostBuffer:
    """A piece of host memory, given back when the object goes."""

    __slots__ = ("_pool", "address", "nbytes")

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self.address = 0  # first: an interrupted construction has nothing to give back
        self._pool = pool
        self.nbytes = nbytes
        self.address = pool.take(nbytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._pool.give(self.address)


class Transfer:
    """One copy of one storage in one direction, from being queued to being done.

    It keeps the storage alive until then, and not longer.
    """

    __slots__ = ("_event", "_storage", "host")

    def __init__(self, event: Event, storage: torch.UntypedStorage, host: HostBuffer) -> None:
        self._event = event
        self._storage: torch.UntypedStorage | None = storage
        self.host = host

    def is_done(self) -> bool:
        """Return whether the copy is done, without waiting."""
        if self._storage is not None and self._event.query():
            self._storage = None
        return self._storage is None

    def wait(self) -> None:
        """Wait until the copy is done."""
        if self._storage is not None:
            self._event.synchronize()
            self._storage = None


class CopyEngine:
    """The two copy streams of a session, and its host memory. Any thread."""

    def __init__(self, pool: Pool, *, host_limit_bytes: int) -> None:
        """Open the streams.

        Args:
            pool: of the device.
            host_limit_bytes: most host memory for copies; 0: what the machine has.
        """
        self._pool = pool
        self._backend = pool.backend
        self._out = self._backend.stream()
        self._in = self._backend.stream()
        self._host_backend = Backend.cpu()
        self._host_pool = Pool(self._host_backend, budget_bytes=host_limit_bytes)
        self._in_flight: deque[Transfer] = deque()
        self.stall_seconds = 0.0
        self.copied_out_bytes = 0
        self.copied_in_bytes = 0

    @property
    def in_flight(self) -> int:
        """Copies that are queued or running."""
        self.poll()
        return len(self._in_flight)

    @property
    def host_peak_bytes(self) -> int:
        """Most host memory reserved for copies so far."""
        return self._host_pool.stats()["reserved_bytes.all.peak"]

    @property
    def host_in_use_bytes(self) -> int:
        """Host memory that holds copies now."""
        return self._host_pool.in_use_bytes()

    def copy_out(self, storage: torch.UntypedStorage) -> Transfer:
        """Start copying a storage to the host.

        Raises:
            OverBudget: `host_limit` would be passed.
            OutOfDeviceMemory: the host has no more.
        """
        host = HostBuffer(self._host_pool, storage.nbytes())
        transfer = self._start(storage, host, CopyKind.DEVICE_TO_HOST)
        self.copied_out_bytes += host.nbytes
        self._pool.note(RingKind.COPY_OUT, host.nbytes)
        return transfer

    def copy_in(self, host: HostBuffer, storage: torch.UntypedStorage) -> Transfer:
        """Start copying host memory into a storage of the same size."""
        transfer = self._start(storage, host, CopyKind.HOST_TO_DEVICE)
        self.copied_in_bytes += host.nbytes
        self._pool.note(RingKind.COPY_IN, host.nbytes)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer, counting the time as a stall."""
        started = time.perf_counter()
        transfer.wait()
        self.stall_seconds += time.perf_counter() - started

    def poll(self) -> None:
        """Let go of the transfers that are done."""
        while self._in_flight and self._in_flight[0].is_done():
            self._in_flight.popleft()

    def drain(self) -> None:
        """Wait for every copy that is queued or running."""
        while self._in_flight:
            self.wait(self._in_flight[0])
            self._in_flight.popleft()

    def trim_host(self) -> None:
        """Give the host memory that holds no copy back."""
        self.poll()
        self._host_pool.trim()

    def _start(self, storage: torch.UntypedStorage, host: HostBuffer, kind: CopyKind) -> Transfer:
        outward = kind is CopyKind.DEVICE_TO_HOST
        stream: Stream = self._out if outward else self._in
        device = storage.data_ptr()
        to, source = (host.address, device) if outward else (device, host.address)
        event = self._backend.event()
        transfer = Transfer(event, storage, host)
        self.poll()
        # Before the copy: whatever interrupts us afterwards, both ends outlive it.
        self._in_flight.append(transfer)
        try:
            self._backend.copy_recorded(
                to=to, source=source, nbytes=host.nbytes, kind=kind, stream=stream, event=event
            )
        except SwapkitError:
            self._in_flight.pop()  # nothing was queued
            raise
        return transfer
