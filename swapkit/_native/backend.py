"""Backends, streams and events: handles of the native ones.

A handle is closed once, by `close()` or a `with` block, and refuses use afterwards. Addresses are
plain ints. All methods may be called from any thread; those that wait release the interpreter.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from swapkit._native.lib import NULL, check, ffi, lib, text_of
from swapkit.errors import InvalidArgument, SwapkitError

if TYPE_CHECKING:
    from typing_extensions import Self

    from swapkit._native._lib import CData


ANY_NODE = -1
NUMA_NODES = 64  # that can be named


class CopyKind(enum.IntEnum):
    """Direction of a copy."""

    DEVICE_TO_HOST = lib.SK_DEVICE_TO_HOST
    HOST_TO_DEVICE = lib.SK_HOST_TO_DEVICE
    DEVICE_TO_DEVICE = lib.SK_DEVICE_TO_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """The memory of a device."""

    free_bytes: int
    total_bytes: int


class Pages(enum.IntEnum):
    """The pages that memory of an Ascend NPU is made of."""

    HUGE_FIRST = lib.SK_ASCEND_HUGE_FIRST  # of 2 MiB, where there are such
    HUGE_ONLY = lib.SK_ASCEND_HUGE_ONLY
    NORMAL = lib.SK_ASCEND_NORMAL  # of 4 KiB
    GIANT = lib.SK_ASCEND_GIANT  # of 1 GiB, which are also the least granule


class Handle:
    """A native object that is closed once, at the latest when the handle is destroyed."""

    _what = "handle"

    def __init__(self, pointer: CData) -> None:
        self._pointer: CData | None = pointer

    @property
    def pointer(self) -> CData:
        """The native object.

        Raises:
            InvalidArgument: the handle is closed.
        """
        if self._pointer is None:
            raise InvalidArgument(f"this {self._what} is closed")
        return self._pointer

    @property
    def address(self) -> int:
        """The address of the native object."""
        return int(ffi.cast("uintptr_t", self.pointer))

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._pointer is None

    def close(self) -> None:
        """Release the native object; a second call does nothing."""
        if self._pointer is not None:
            self._release(self._pointer)
            self._pointer = None

    def _release(self, pointer: CData) -> None:
        raise NotImplementedError

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the process frees everything. This module's names may be gone; a default stays.
        if not is_finalizing():
            with contextlib.suppress(SwapkitError, AttributeError):
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Backend(Handle):
    """Code that serves one kind of device.

    The native object stays until the last pool, stream and event over it is closed too.
    """

    _what = "backend"
    settings = ""  # the options that change how fast it copies
    host_node = ANY_NODE  # the NUMA node, below NUMA_NODES, for host copies of the device

    @classmethod
    def cpu(
        cls,
        *,
        capacity_bytes: int = 0,
        copy_bytes_per_s: int = 0,
        copy_latency_ns: int = 0,
        numa_node: int = ANY_NODE,
        populate: bool = False,
        granule_bytes: int = 0,
    ) -> Backend:
        """Open the CPU as a device.

        Args:
            capacity_bytes: most memory it gives out; 0: all of the machine or its control group.
            copy_bytes_per_s: bandwidth limit of each stream; 0: none.
            copy_latency_ns: added to every copy.
            numa_node: the node whose memory is preferred, below 64; -1: any.
            populate: committed memory has its pages at once, not at the first touch.
            granule_bytes: of virtual memory, a power of two up to 2 MiB; 0: the least possible.

        Raises:
            InvalidArgument: the capacity, the node or the granules are out of range.
        """
        if not ANY_NODE <= numa_node < NUMA_NODES:
            raise InvalidArgument(f"numa_node={numa_node}: expected -1 or a number below 64")
        params = ffi.new("sk_cpu_params *")
        params.capacity_bytes = capacity_bytes
        params.copy_bytes_per_s = copy_bytes_per_s
        params.copy_latency_ns = copy_latency_ns
        params.numa_nodes = 0 if numa_node == ANY_NODE else 1 << numa_node
        params.populate = populate
        params.granule_bytes = granule_bytes
        out = ffi.new("sk_backend **")
        check(lib.sk_backend_cpu(params, out))
        backend = cls(out[0])
        backend.settings = (
            f"bytes_per_s={copy_bytes_per_s} latency_ns={copy_latency_ns} node={numa_node}"
        )
        return backend

    @classmethod
    def cuda(
        cls,
        *,
        device: int = 0,
        granule_bytes: int = 0,
        virtual_memory: bool = True,
        peers: Iterable[int] = (),
    ) -> Backend:
        """Open an NVIDIA device.

        Args:
            device: its number.
            granule_bytes: of virtual memory; 0: the default.
            virtual_memory: whether to use it where the device has it.
            peers: numbers of devices that may use its virtual memory, too.

        Raises:
            Unsupported: there is no driver, or it is too old.
            InvalidArgument: there is no such device, or the granules are not possible.
        """
        params = ffi.new("sk_cuda_params *")
        params.device = device
        params.granule_bytes = granule_bytes
        params.no_virtual_memory = not virtual_memory
        params.peer_devices = sum(1 << peer for peer in set(peers))
        out = ffi.new("sk_backend **")
        check(lib.sk_backend_cuda(params, out))
        return cls(out[0])

    @classmethod
    def ascend(
        cls,
        *,
        device: int = 0,
        granule_bytes: int = 0,
        virtual_memory: bool = True,
        pages: Pages = Pages.HUGE_FIRST,
        peers: Iterable[int] = (),
    ) -> Backend:
        """Open an Ascend NPU.

        Args:
            device: its number.
            granule_bytes: of virtual memory; 0: the default.
            virtual_memory: whether to use it where the device has it.
            pages: of which its memory is made.
            peers: numbers of devices that may use its virtual memory, too.

        Raises:
            Unsupported: there is no CANN runtime, it is too old, or there is no device.
            InvalidArgument: there is no such device, or the granules are not possible.
        """
        params = ffi.new("sk_ascend_params *")
        params.device = device
        params.granule_bytes = granule_bytes
        params.no_virtual_memory = not virtual_memory
        params.pages = pages
        params.peer_devices = sum(1 << peer for peer in set(peers))
        out = ffi.new("sk_backend **")
        check(lib.sk_backend_ascend(params, out))
        return cls(out[0])

    @property
    def name(self) -> str:
        """The backend's own name."""
        return text_of(lib.sk_backend_table(self.pointer).name)

    @property
    def granule_bytes(self) -> int:
        """The unit of virtual memory; 0: there is none."""
        return int(lib.sk_backend_table(self.pointer).granule_bytes)

    def memory_info(self) -> MemoryInfo:
        """Return how much memory the device has."""
        info = ffi.new("sk_memory_info *")
        check(lib.sk_memory_info_get(self.pointer, info))
        return MemoryInfo(free_bytes=info.free_bytes, total_bytes=info.total_bytes)

    def stream(self) -> Stream:
        """Open a stream."""
        out = ffi.new("sk_stream **")
        check(lib.sk_stream_create(self.pointer, out))
        return Stream(out[0], self.pointer)

    def event(self) -> StreamEvent:
        """Make an event."""
        out = ffi.new("sk_event **")
        check(lib.sk_event_create(self.pointer, out))
        return StreamEvent(out[0], self.pointer)

    def copy(
        self, *, to: int, source: int, nbytes: int, kind: CopyKind, stream: Stream | None
    ) -> None:
        """Queue a copy; both ranges must stay valid until the stream has done it."""
        check(
            lib.sk_copy_async(
                self.pointer,
                ffi.cast("void *", to),
                ffi.cast("void *", source),
                nbytes,
                kind,
                NULL if stream is None else stream.pointer,
            )
        )

    def _release(self, pointer: CData) -> None:
        lib.sk_backend_close(pointer)


class Stream(Handle):
    """An ordered queue of device work.

    A pool that has used a stream needs it until the pool is closed, since the stream orders its
    free lists. Closing the stream earlier is refused.
    """

    _what = "stream"

    def __init__(self, pointer: CData, backend: CData) -> None:
        super().__init__(pointer)
        self._backend = backend
        self._pools = 0  # a plain count: the cycle collector may finalise handles in any order

    def synchronize(self) -> None:
        """Wait until everything queued so far is done."""
        check(lib.sk_stream_sync(self._backend, self.pointer))

    def wait(self, event: StreamEvent) -> None:
        """Let all work queued from now on wait for `event`."""
        check(lib.sk_stream_wait(self._backend, self.pointer, event.pointer))

    def hold(self) -> None:
        """Refuse `close` until `let_go`: a pool needs the stream."""
        self._pools += 1

    def let_go(self) -> None:
        """Undo one `hold`."""
        self._pools -= 1

    def _release(self, pointer: CData) -> None:
        if self._pools > 0:
            raise InvalidArgument(
                "this stream cannot be closed while a pool uses it: close the pool first"
            )
        check(lib.sk_stream_destroy(self._backend, pointer))


class StreamEvent(Handle):
    """A mark in a stream that threads and streams can wait for."""

    _what = "event"

    def __init__(self, pointer: CData, backend: CData) -> None:
        super().__init__(pointer)
        self._backend = backend

    def record(self, stream: Stream | None) -> None:
        """Put the mark behind everything queued so far in `stream` (None: the host's order)."""
        target = NULL if stream is None else stream.pointer
        check(lib.sk_event_record(self._backend, self.pointer, target))

    def query(self) -> bool:
        """Return whether the mark has been passed."""
        status = lib.sk_event_query(self._backend, self.pointer)
        if status == lib.SK_NOT_READY:
            return False
        check(status)
        return True

    def synchronize(self) -> None:
        """Wait until the mark has been passed."""
        check(lib.sk_event_sync(self._backend, self.pointer))

    def _release(self, pointer: CData) -> None:
        check(lib.sk_event_destroy(self._backend, pointer))
