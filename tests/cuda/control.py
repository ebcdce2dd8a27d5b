"""What `driver/cusim.h` has for tests: slow copies, busy streams, what is open or went wrong."""

from __future__ import annotations

import ctypes
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Options(ctypes.Structure):
    """`cusim_options`."""

    _fields_ = (
        ("devices", ctypes.c_int),
        ("capacity", ctypes.c_size_t),
        ("granularity", ctypes.c_size_t),
        ("h2d_bytes_per_s", ctypes.c_uint64),
        ("d2h_bytes_per_s", ctypes.c_uint64),
        ("d2d_bytes_per_s", ctypes.c_uint64),
        ("latency_ns", ctypes.c_uint64),
        ("delay_ns", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("wipe", "vmm", "peers", "reuse", "log", "timed")),
    )


@functools.cache
def open_driver(file: str = "libcuda.so.1") -> ctypes.CDLL:
    """Return the simulated driver; the one that is loaded, if there is one."""
    driver = ctypes.CDLL(file)
    driver.cusim_configure.restype = ctypes.c_bool
    driver.cusim_last_problem.restype = ctypes.c_char_p
    driver.cusim_host_slowness.restype = ctypes.c_double
    driver.cusim_host_slowness.argtypes = (ctypes.c_double,)
    driver.cusim_parameter.restype = ctypes.c_double
    driver.cusim_parameter.argtypes = (ctypes.c_char_p, ctypes.c_double, ctypes.c_int)
    driver.cusim_rate_of.restype = ctypes.c_double
    driver.cusim_rate_of.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    driver.cusim_spans_keep.argtypes = (ctypes.c_size_t,)
    driver.cusim_spans_read.restype = ctypes.c_size_t
    driver.cusim_spans_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return driver


def last_problem() -> str:
    """Return what the program did that a GPU would punish, or empty text."""
    problem: bytes = open_driver().cusim_last_problem()
    return problem.decode()


@contextmanager
def slow_copies(milliseconds: float) -> Iterator[None]:
    """Let every copy between host and device take so much longer."""
    driver, options = open_driver(), Options()
    driver.cusim_options_init(ctypes.byref(options))
    usual_ns = options.latency_ns
    options.latency_ns = int(milliseconds * 1e6)
    assert driver.cusim_configure(ctypes.byref(options))
    try:
        yield
    finally:
        options.latency_ns = usual_ns
        assert driver.cusim_configure(ctypes.byref(options))


def keep_busy(stream: torch.cuda.Stream, milliseconds: float) -> None:
    """Let a stream sleep, as if a kernel ran in it."""
    delay_stream(stream.cuda_stream, milliseconds)


def delay_stream(handle: int, milliseconds: float) -> None:
    """Let the stream of a driver's handle sleep."""
    delay = ctypes.c_uint64(int(milliseconds * 1e6))
    assert open_driver().cusim_delay_stream(ctypes.c_void_p(handle), delay) == 0
