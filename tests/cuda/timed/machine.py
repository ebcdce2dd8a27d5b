"""The virtual GPU from inside: its rates, its clock, what its engines did and when.

`install()` comes first. Times are in nanoseconds by the virtual GPU's clock, which
`time.perf_counter` tells from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.cuda.control import open_driver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENGINES = ("in", "out", "within", "compute", "host waits")
# Rates that say what calls cost the host: COST_<name>_NS.
COSTS = (
    "LAUNCH", "COPY", "RECORD", "WAIT", "QUERY", "BLAS", "MAP", "MAP_MIB", "UNMAP", "UNMAP_MIB",
)  # fmt: skip
# Rates of a device that does everything at once: what is left of a step is the host's.
WORK = {
    **dict.fromkeys(("TFLOPS16", "TFLOPS32", "ATTENTION", "ATTENTION_BACKWARD", "GB_PER_S"), 1e9),
    **dict.fromkeys(("LINK_IN", "LINK_OUT", "LINK_SECOND", "LINK_PAGEABLE"), 1e9),
    **dict.fromkeys(("LINK_LATENCY_NS", "KERNEL_NS", "KERNEL_LEAST_NS", "LAUNCH_LATENCY_NS"), 0.0),
}
# Rates of a driver that maps and unmaps memory at no cost.
MAPS = {f"COST_{name}_NS": 0.0 for name in COSTS if "MAP" in name}
HOST_ROUNDS, HOST_PAIRS = 9, 1000
PINNED_BYTES = 1 << 20  # of which on a pinned copy has no values


class _Times(ctypes.Structure):
    """`cusim_times`."""

    _fields_ = (
        ("now_ns", ctypes.c_uint64),
        ("kernels", ctypes.c_uint64),
        ("compute_busy_ns", ctypes.c_uint64),
        ("gap_host_ns", ctypes.c_uint64),
        ("gap_sync_ns", ctypes.c_uint64),
        ("gap_stream_ns", ctypes.c_uint64),
        ("host_wait_ns", ctypes.c_uint64),
        ("host_waits", ctypes.c_uint64),
        ("host_call_ns", ctypes.c_uint64),
        ("copies", ctypes.c_uint64 * 3),
        ("copy_bytes", ctypes.c_uint64 * 3),
        ("copy_busy_ns", ctypes.c_uint64 * 3),
        ("calls", ctypes.c_uint64),
        ("maps", ctypes.c_uint64),
        ("unmaps", ctypes.c_uint64),
    )


class _Span(ctypes.Structure):
    """`cusim_span`."""

    _fields_ = (
        ("issued_ns", ctypes.c_uint64),
        ("start_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("engine", ctypes.c_int),
    )


class Span(NamedTuple):
    """What an engine did; or the host waited."""

    engine: str
    issued_ns: int
    start_ns: int
    end_ns: int
    nbytes: int
    stream: int
    name: str


def install() -> int:
    """Put this process on the virtual GPU; return how many operators have costs. Call it once.

    torch's own operators say what they cost from now on, and Python's clock is the virtual GPU's.
    CUDA is not initialised by this, so that another allocator can still be chosen.
    """
    import torch

    from tests.cuda.operators import folder, sleep

    now = ctypes.PyDLL(
        "libcuda.so.1"
    ).cusim_now_ns  # keeps the interpreter's lock, as Python's does
    now.restype = ctypes.c_uint64
    time.perf_counter_ns = now
    time.perf_counter = lambda: now() / 1e9
    # Its kernels are not in torch, and so cannot be counted.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._sleep = sleep
    pin_nothing(torch.Tensor)
    return int(ctypes.PyDLL(str(folder() / "costs.so")).costs_install())


def pin_nothing(tensors: Any) -> None:
    """Let pinned copies of large tensors have no values, and so take none of this machine's memory.

    The host seems to have more than this machine has, and a copy by the CPU would fill it.
    """
    pin = tensors.pin_memory

    def pin_memory(tensor: Any, *device: Any) -> Any:
        if tensor.nbytes < PINNED_BYTES:
            return pin(tensor, *device)
        return tensor.new_empty(tensor.shape, pin_memory=True)

    tensors.pin_memory = pin_memory


def times() -> dict[str, int]:
    """Return sums since the process began; see `cusim_times` in `driver/timed.h`."""
    read = _Times()
    open_driver().cusim_times_read(ctypes.byref(read))
    found: dict[str, int] = {}
    for name, kind in _Times._fields_:
        value = getattr(read, name)
        if kind is ctypes.c_uint64:
            found[name] = value
        else:
            found |= {f"{name}_{engine}": one for engine, one in zip(ENGINES, value, strict=False)}
    return found


def parameter(name: str, value: float | None = None) -> float:
    """Return a rate of `driver/rates.c`, after changing it if there is a value."""
    found: float = open_driver().cusim_parameter(name.encode(), value or 0.0, value is not None)
    if found < 0:
        raise KeyError(name)
    return found


@contextlib.contextmanager
def parameters(values: Mapping[str, float]) -> Iterator[None]:
    """Change rates for a while: work that is queued meanwhile takes as long as they say."""
    before = {name: parameter(name) for name in values}
    for name, value in values.items():
        parameter(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            parameter(name, value)


def host_slowness(wanted: float = -1.0) -> float:
    """Return how much longer the GPU's host takes than this one at a quiet moment.

    Args:
        wanted: what holds from now on; 0: the host takes no time, negative: only ask.
    """
    before: float = open_driver().cusim_host_slowness(wanted)
    return before


def host_empty_ns() -> float:
    """Return what an allocation of 512 bytes and its release take from Python."""
    import torch

    found = []
    for _ in range(HOST_ROUNDS):
        begin = time.perf_counter_ns()
        for _ in range(HOST_PAIRS):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        found.append((time.perf_counter_ns() - begin) / HOST_PAIRS)
    return statistics.median(found)


def rescale(empty_ns: float | None = None) -> float:
    """Let the host be as fast as the GPU's was; return its slowness.

    It is scaled by one figure: what `host_empty_ns()` measures over torch's own allocator. So call
    this before another one is installed.

    Args:
        empty_ns: what it shall measure. None: what the machine's own host took.
    """
    wanted = parameter("HOST_EMPTY_NS") if empty_ns is None else empty_ns
    host_slowness(host_slowness() * wanted / host_empty_ns())
    return host_slowness()


def keep_spans(capacity: int) -> None:
    """Keep the last `capacity` spans from now on; 0 ends it."""
    open_driver().cusim_spans_keep(capacity)


def spans(most: int = 1_000_000) -> list[Span]:
    """Return the oldest `most` of the spans that are kept, in the order of the calls."""
    array = (_Span * most)()
    count = open_driver().cusim_spans_read(array, most)
    return [
        Span(
            ENGINES[one.engine],
            one.issued_ns,
            one.start_ns,
            one.end_ns,
            one.bytes,
            one.stream,
            (one.name or b"").decode(),
        )
        for one in array[:count]
    ]
