"""Backends that wrap another one: calls that fail, copies that wait, a record of the last calls.

They are in a library of their own, which `tests/c/instruments` has the sources of: `instruments`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cffi import FFI

from build_native import INSTRUMENTS, ROOT, TEST_LIBRARY, preprocess_header
from swapkit._native import lib as core
from swapkit._native.backend import Backend
from swapkit._native.lib import check, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._native._lib import CData

_ffi = FFI()
_ffi.cdef(preprocess_header(f'#include "{ROOT / INSTRUMENTS / "instruments.h"}"\n'))
instruments: Any = _ffi.dlopen(str(Path(core.__file__).with_name(TEST_LIBRARY)))


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
        return cls._over(inner, instruments.sk_backend_fault)

    @classmethod
    def delay(cls, inner: Backend) -> Instrument:
        """Wrap `inner`, whose object it takes over, so that copies wait for `release_copies`."""
        return cls._over(inner, instruments.sk_backend_delay)

    @classmethod
    def trace(cls, inner: Backend, capacity: int) -> Instrument:
        """Wrap `inner`, whose object it takes over, and remember the last `capacity` calls."""
        return cls._over(inner, instruments.sk_backend_trace, capacity)

    @classmethod
    def _over(cls, inner: Backend, wrap: Callable[..., int], *options: int) -> Instrument:
        out = _ffi.new("sk_backend **")
        check(wrap(_ffi.cast("sk_backend *", inner.pointer), *options, out))
        inner._pointer = None  # the wrapper owns the native object now
        wrapper = cls(core.ffi.cast("sk_backend *", out[0]))
        wrapper.settings = f"{inner.settings} {wrapper.name}".strip()
        return wrapper

    @property
    def _instrument(self) -> CData:
        return _ffi.cast("sk_backend *", self.pointer)

    def arm_fault(self, nth: int, *, forever: bool, status: int) -> None:
        """Make the `nth` fallible call from now fail (0: none); only for a `fault` backend."""
        instruments.sk_fault_arm(self._instrument, nth, forever, status)

    def fault_calls(self) -> int:
        """Return the number of fallible calls since `arm_fault`."""
        calls: int = instruments.sk_fault_calls(self._instrument)
        return calls

    def release_copies(self, count: int | None = None) -> None:
        """Release copies of a `delay` backend; None: all, from now on."""
        instruments.sk_delay_release(self._instrument, 2**64 - 1 if count is None else count)

    def read_trace(self, capacity: int = 4096) -> tuple[TraceCall, ...]:
        """Return the calls that a `trace` backend remembers, oldest first."""
        calls = _ffi.new("sk_trace_call[]", capacity)
        count = instruments.sk_trace_read(self._instrument, calls, capacity)
        return tuple(
            TraceCall(
                name=text_of(calls[i].name),
                nbytes=calls[i].nbytes,
                status=text_of(core.lib.sk_status_name(calls[i].status)),
            )
            for i in range(count)
        )


@contextmanager
def disk_fault(calls: int, error: int, *, nth: int = 1, forever: bool = False) -> Iterator[None]:
    """Let the system refuse the disk's calls of these kinds (SK_DISK_CALL_READ, ...)."""
    instruments.sk_disk_fault_arm(calls, nth, forever, error, 0)
    try:
        yield
        assert instruments.sk_disk_fault_calls() >= nth, "the fault was never met"
    finally:
        instruments.sk_disk_fault_arm(0, 0, False, 0, 0)
