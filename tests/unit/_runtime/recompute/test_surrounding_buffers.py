"""Parts that reach arrays, maps and buffers."""

from __future__ import annotations

import ctypes
import mmap
import os
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from swapkit._runtime.recompute.surroundings import Surroundings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("installation")


@pytest.mark.parametrize("kind", ["array", "file", "subclass", "every other"])
def test_outside_when_a_large_array_is_read_then_it_is_not_copied(
    kind: str, tmp_path: Path
) -> None:
    shape = (64, 1 << 16)  # 32 MiB
    held: Any = np.zeros(shape)
    if kind == "file":
        held = np.memmap(tmp_path / "table", np.float64, "w+", shape=shape)
    elif kind == "subclass":
        held = held.view(np.recarray)
    elif kind == "every other":
        held = held.reshape(-1)[::2]
    tracemalloc.start()
    assert not Surroundings((held,)).have_changed()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20 << 20


@pytest.mark.parametrize("offset", [0, mmap.ALLOCATIONGRANULARITY])
@pytest.mark.parametrize(
    "kind", ["map", "view", "array", "part", "memmap", "view of array", "C", "record", "strides"]
)
def test_outside_when_the_file_of_a_map_is_truncated_then_it_is_not_read_and_may_have_changed(
    kind: str, offset: int, tmp_path: Path
) -> None:
    path, nbytes = tmp_path / "table", mmap.ALLOCATIONGRANULARITY
    path.write_bytes(bytes(offset + nbytes))
    with path.open("r+b") as file:
        held: Any = mmap.mmap(file.fileno(), nbytes, offset=offset)
    if kind == "view":
        held = memoryview(held)
    elif kind in ("array", "part"):
        held = np.frombuffer(held, np.uint8)[3 if kind == "part" else 0 :]
    elif kind == "memmap":
        held = np.memmap(path, np.uint8, "r+", offset, nbytes)
    elif kind == "view of array":
        array: Any = np.frombuffer(held, np.uint8)
        held = memoryview(array)
    elif kind == "C":
        held = (ctypes.c_uint8 * nbytes).from_buffer(held)
    elif kind == "record":
        held = np.frombuffer(held, [("whole", np.uint8, nbytes)])[0]
    elif kind == "strides":
        held = np.lib.stride_tricks.sliding_window_view(np.frombuffer(held, np.uint8), 2)
    assert not Surroundings((held,)).have_changed()
    os.truncate(path, offset)  # to read the map would end the process
    assert Surroundings((held,)).have_changed()


def test_outside_when_what_has_a_buffer_owns_itself_then_nothing_has_changed() -> None:
    held = ctypes.pythonapi.Py_GetVersion, np.dtype(np.float32), ctypes.pointer(ctypes.c_int(1))
    assert not Surroundings(held).have_changed()


def test_outside_when_an_array_of_objects_gets_an_equal_number_then_nothing_has_changed() -> None:
    held = np.array([1000, 2.5, "text"], dtype=object)
    around = Surroundings((held,))
    held[0] = int("1000")  # another object
    assert not around.have_changed()
    around = Surroundings((held,))
    held[0] = 1001
    assert around.have_changed()


def test_outside_when_a_text_in_a_large_list_becomes_its_bytes_then_it_has_changed() -> None:
    held: list[object] = ["text"] * 6000
    around = Surroundings((held,))
    held[5] = b"text"  # of the same hash
    assert around.have_changed()


def test_outside_when_an_array_of_the_users_is_fixed_then_it_is_not_asked() -> None:
    class Own(np.ndarray):
        @property
        def flags(self) -> Any:
            raise AssertionError("asked")

    held = Own((4,))
    np.ndarray.fill(held, 0)
    np.ndarray.setflags(held, write=False)
    assert not Surroundings((held,)).have_changed()
