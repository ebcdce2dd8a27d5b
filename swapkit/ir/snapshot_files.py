"""A reader for torch's memory snapshots that runs no code from the pickle."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeVar

from swapkit.errors import InvalidDocument
from swapkit.ir.fields import refuse
from swapkit.ir.pickle_scan import scan_pickle
from swapkit.units import MOST_BYTES, show

if TYPE_CHECKING:
    from collections.abc import Iterator

Value = TypeVar("Value")
MOST_ADDRESS = 1 << 64
# The "file" of a frame that swapkit writes: the frame's name is a module's path.
MODULE_FILE = "module"
FREES = ("free_completed", "free")
REQUESTS = ("free_requested",)
GROWS = ("segment_alloc", "segment_map")
SHRINKS = ("segment_free", "segment_unmap")
_SIZED = {"alloc", *FREES, *REQUESTS, *GROWS, *SHRINKS}
_ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
_MOST_FRAMES = 200  # looked at: a stack has some 60 frames of C++ below the innermost of Python
_HOW = "torch.cuda.memory._record_memory_history() before the step to record"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEntry:
    """One action of the allocator."""

    action: str
    address: int
    nbytes: int
    time_us: int | None = None
    caller: str = ""  # the innermost Python function: "forward (model.py:12)"
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """A block in use at the end of the history."""

    nbytes: int
    requested_bytes: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The history of one device, and its memory at the end."""

    entries: tuple[SnapshotEntry, ...]
    blocks: dict[int, SnapshotBlock]  # in use at the end, by address
    reserved_bytes: int


class _Unpickler(pickle.Unpickler):
    """An unpickler for containers, numbers and text; it refuses every class and function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise InvalidDocument(
            f"the pickle refers to {show(module)}.{show(name)}; a memory snapshot has only lists, "
            "dictionaries, numbers and text"
        )


def load_snapshot(path: str | os.PathLike[str], *, device: int | None = None) -> Snapshot:
    """Read the pickle of a snapshot; raises InvalidDocument, OSError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            content = unpickle_plain(file)
        return decode_snapshot(content, device=device)
    except InvalidDocument as error:
        raise InvalidDocument(f"{os.fspath(path)}: {error}") from None


def decode_snapshot(content: object, *, device: int | None = None) -> Snapshot:
    """Decode the result of `torch.cuda.memory._snapshot()`; raises InvalidDocument."""
    fields = _check(content, dict, "snapshot")
    traces = _check(fields.get("device_traces"), list, "device_traces")
    chosen = _choose_device(traces, device)
    where = f"device_traces[{chosen}]"
    entries = tuple(_read_entries(_check(traces[chosen], list, where), where))
    blocks, reserved_bytes = _read_segments(fields, chosen)
    return Snapshot(entries=entries, blocks=blocks, reserved_bytes=reserved_bytes)


def unpickle_plain(file: BinaryIO) -> object:
    """Return the plain values of a pickle; raises InvalidDocument for all other content.

    No code is run, and the values take memory in proportion to the file.
    """
    content = file.read()
    try:
        scan_pickle(content)
        return _Unpickler(io.BytesIO(content)).load()
    except InvalidDocument:
        raise
    except (
        pickle.UnpicklingError, EOFError, MemoryError, RecursionError, struct.error,
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise InvalidDocument(f"not a pickle of a memory snapshot: {error}") from error


def _choose_device(traces: list[object], device: int | None) -> int:
    recorded = [number for number, trace in enumerate(traces) if trace]
    if not recorded:
        raise InvalidDocument(f"device_traces: no device has a history; call {_HOW}")
    if device is None and len(recorded) > 1:
        raise InvalidDocument(f"device_traces: devices {recorded} have a history; pass device=")
    if device is not None and device not in recorded:
        refuse("device", f"a device with a history, one of {recorded}", device)
    return recorded[0] if device is None else device


def _read_entries(trace: list[object], where: str) -> Iterator[SnapshotEntry]:
    for number, item in enumerate(trace):
        at = f"{where}[{number}]"
        entry = _check(item, dict, at)
        action = _check(entry.get("action"), str, f"{at}.action")
        if action not in _SIZED:  # such as "oom", "snapshot" and additions of later versions
            continue
        yield SnapshotEntry(
            action=action,
            address=_read_whole(entry.get("addr"), MOST_ADDRESS, f"{at}.addr"),
            nbytes=_read_whole(entry.get("size"), MOST_BYTES, f"{at}.size"),
            time_us=_read_time(entry.get("time_us"), f"{at}.time_us"),
            caller=_find_caller(entry.get("frames")) if action == "alloc" else "",
            stream=_read_whole(entry.get("stream", 0), MOST_ADDRESS, f"{at}.stream"),
        )


def _read_segments(
    content: dict[object, object], device: int
) -> tuple[dict[int, SnapshotBlock], int]:
    """Return the blocks in use, by address, and the bytes of all segments."""
    blocks: dict[int, SnapshotBlock] = {}
    reserved_bytes = 0
    for number, item in enumerate(_check(content.get("segments", []), list, "segments")):
        where = f"segments[{number}]"
        segment = _check(item, dict, where)
        if segment.get("device", device) != device:
            continue
        reserved_bytes += _read_whole(segment.get("total_size"), MOST_BYTES, f"{where}.total_size")
        address = _read_whole(segment.get("address"), MOST_ADDRESS, f"{where}.address")
        stream = _read_whole(segment.get("stream", 0), MOST_ADDRESS, f"{where}.stream")
        for index, block in enumerate(_check(segment.get("blocks"), list, f"{where}.blocks")):
            at = f"{where}.blocks[{index}]"
            fields = _check(block, dict, at)
            nbytes = _read_whole(fields.get("size"), MOST_BYTES, f"{at}.size")
            if fields.get("state") in _ACTIVE:
                blocks[address] = SnapshotBlock(
                    nbytes=nbytes,
                    requested_bytes=_read_requested(fields, nbytes, at),
                    stream=stream,
                )
            address += nbytes
    return blocks, reserved_bytes


def _read_requested(block: dict[object, object], nbytes: int, where: str) -> int:
    """Return the bytes that were requested for a block, which older snapshots do not have."""
    asked = _read_whole(block.get("requested_size", 0), MOST_BYTES, f"{where}.requested_size")
    return asked or nbytes


def _find_caller(frames: object) -> str:
    """Return the innermost readable Python function or module of a stack; empty: there is none."""
    stack = frames if isinstance(frames, list) else []
    for frame in itertools.islice(stack, _MOST_FRAMES):
        if not isinstance(frame, dict):
            continue
        file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
        if file == MODULE_FILE and isinstance(name, str):
            return name.encode("utf-8", "replace").decode("utf-8")
        if isinstance(file, str) and isinstance(name, str) and file.endswith(".py"):
            text = f"{name} ({file.rsplit('/', 1)[-1]}:{show(line)})"
            return text.encode("utf-8", "replace").decode("utf-8")
    return ""


def _read_whole(value: object, most: int, where: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        refuse(where, f"a whole number from 0 to {most}", value)
    return value


def _read_time(value: object, where: str) -> int | None:
    return None if value is None else _read_whole(value, MOST_ADDRESS, where)


def _check(value: object, kind: type[Value], where: str) -> Value:
    if type(value) is not kind:
        refuse(where, f"a {kind.__name__}", value)
    return value
