"""Backends that wrap another one: calls that fail, copies that wait, a record of the last calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swapkit._native.backend import Backend
from swapkit._native.lib import check, ffi, lib, text_of

if TYPE_CHECKING:
    from swapkit._native._lib import CData


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """One call that a tracing backend saw."""

    name: str
    nbytes: int
    status: str


class Instrument(Backend):
    """A backend, also over another one, for tests."""

    if TYPE_CHECKING:

        @classmethod
        def cpu(cls, **options: Any) -> Instrument: ...

    @classmethod
    def fault(cls, inner: Backend) -> Instrument:
        """Wrap `inner`, whose object it takes over, so that calls can be made to fail."""
        out = ffi.new("sk_backend **")
        check(lib.sk_backend_fault(inner.pointer, out))
        return cls._over(inner, out[0])

    @classmethod
    def delay(cls, inner: Backend) -> Instrument:
        """Wrap `inner`, whose object it takes over, so that copies wait for `release_copies`."""
        out = ffi.new("sk_backend **")
        check(lib.sk_backend_delay(inner.pointer, out))
        return cls._over(inner, out[0])

    @classmethod
    def trace(cls, inner: Backend, capacity: int) -> Instrument:
        """Wrap `inner`, whose object it takes over, and remember the last `capacity` calls."""
        out = ffi.new("sk_backend **")
        check(lib.sk_backend_trace(inner.pointer, capacity, out))
        return cls._over(inner, out[0])

    @classmethod
    def _over(cls, inner: Backend, pointer: CData) -> Instrument:
        inner._pointer = None  # the wrapper owns the native object now
        wrapper = cls(pointer)
        wrapper.settings = f"{inner.settings} {wrapper.name}".strip()
        return wrapper

    def arm_fault(self, nth: int, *, forever: bool, status: int) -> None:
        """Make the `nth` fallible call from now fail (0: none); only for a `fault` backend."""
        lib.sk_fault_arm(self.pointer, nth, forever, status)

    def fault_calls(self) -> int:
        """Return the number of fallible calls since `arm_fault`."""
        return lib.sk_fault_calls(self.pointer)

    def release_copies(self, count: int | None = None) -> None:
        """Release copies of a `delay` backend; None: all, from now on."""
        lib.sk_delay_release(self.pointer, 2**64 - 1 if count is None else count)

    def read_trace(self, capacity: int = 4096) -> tuple[TraceCall, ...]:
        """Return the calls that a `trace` backend remembers, oldest first."""
        calls = ffi.new("sk_trace_call[]", capacity)
        count = lib.sk_trace_read(self.pointer, calls, capacity)
        return tuple(
            TraceCall(
                name=text_of(calls[i].name),
                nbytes=calls[i].nbytes,
                status=text_of(lib.sk_status_name(calls[i].status)),
            )
            for i in range(count)
        )
