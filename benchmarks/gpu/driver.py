"""What device memory costs that is asked of the driver: whole, or as virtual memory in granules.

Declarations of our own for the few functions of `libcuda.so.1` that this takes.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.machine import LIBRARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
GIB = 1 << 30
PINNED = 1  # the kind of physical memory that lies on a device
ON_DEVICE = 1
READ_WRITE = 3


class Location(Structure):
    """Where memory is."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(Structure):
    """Of physical memory."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AccessDescription(Structure):
    """Who may do what with a range."""

    _fields_ = (("location", Location), ("flags", c_int))


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_int,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDescription), c_size_t),
}


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The driver, with the first device's primary context current on this thread."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in ARGUMENTS.items():
            getattr(self._library, name).argtypes = arguments
        self.call("cuInit", 0)
        device, context = c_int(0), c_void_p()
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self._device = device.value
        location = Location(ON_DEVICE, self._device)
        self.properties = AllocationProperties(type=PINNED, location=location)
        self.access = AccessDescription(location, READ_WRITE)

    def close(self) -> None:
        """Give the context back."""
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            DriverError: it failed.
        """
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise DriverError(f"{name}: error {status}")


class Whole:
    """Memory by plain allocation, so many bytes at a time."""

    def __init__(self, driver: Driver, chunk_bytes: int, nbytes: int) -> None:
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._count = nbytes // chunk_bytes
        self._addresses: list[int] = []

    def take(self) -> None:
        address = c_uint64()
        for _ in range(self._count):
            self._driver.call("cuMemAlloc_v2", byref(address), self._chunk_bytes)
            self._addresses.append(address.value)

    def give(self) -> None:
        while self._addresses:
            self._driver.call("cuMemFree_v2", self._addresses.pop())

    def close(self) -> None:
        """There is nothing but the memory."""


class Granules:
    """Virtual memory: one range of addresses; physical memory is mapped in granules."""

    def __init__(self, driver: Driver, chunk_bytes: int, nbytes: int) -> None:
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._nbytes = nbytes // chunk_bytes * chunk_bytes
        self._mapped: list[tuple[int, int]] = []
        start = c_uint64()
        driver.call("cuMemAddressReserve", byref(start), self._nbytes, 0, 0, 0)
        self._start = start.value

    def take(self) -> None:
        handle = c_uint64()
        for place in range(self._start, self._start + self._nbytes, self._chunk_bytes):
            size = self._chunk_bytes
            properties = byref(self._driver.properties)
            self._driver.call("cuMemCreate", byref(handle), size, properties, 0)
            self._driver.call("cuMemMap", place, size, 0, handle, 0)
            self._driver.call("cuMemSetAccess", place, size, byref(self._driver.access), 1)
            self._mapped.append((place, handle.value))

    def give(self) -> None:
        while self._mapped:
            place, handle = self._mapped.pop()
            self._driver.call("cuMemUnmap", place, self._chunk_bytes)
            self._driver.call("cuMemRelease", handle)

    def close(self) -> None:
        """Give the addresses back."""
        self._driver.call("cuMemAddressFree", self._start, self._nbytes)


WAYS: dict[str, tuple[type[Whole | Granules], int]] = {
    "alloc_2MiB": (Whole, 2 * MIB),
    "alloc_20MiB": (Whole, 20 * MIB),
    "alloc_256MiB": (Whole, 256 * MIB),
    "alloc_1GiB": (Whole, GIB),
    "map_2MiB": (Granules, 2 * MIB),
    "map_8MiB": (Granules, 8 * MIB),
    "map_20MiB": (Granules, 20 * MIB),
    "map_32MiB": (Granules, 32 * MIB),
}


def measure(rounds: int, nbytes: int = GIB) -> Iterator[tuple[str, float, float]]:
    """Yield for each way, once a round, the microseconds a GiB of taking and of giving.

    Raises:
        OSError: there is no driver.
        DriverError: it refuses.
    """
    driver = Driver()
    try:
        for _ in range(rounds):
            for name, (kind, chunk_bytes) in WAYS.items():
                most = max(nbytes, chunk_bytes)
                memory = kind(driver, chunk_bytes, most)
                scale = 1e6 * GIB / (most // chunk_bytes * chunk_bytes)
                taken = seconds_of(memory.take)
                given = seconds_of(memory.give)
                memory.close()
                yield name, taken * scale, given * scale
    finally:
        driver.close()


def seconds_of(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
