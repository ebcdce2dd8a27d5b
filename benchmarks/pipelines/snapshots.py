"""Traces from torch's memory snapshots, for an estimate without a recording.

`torch.cuda.memory._record_memory_history()`, one training step, and
`torch.cuda.memory._dump_snapshot(path)` produce a pickle with every allocation and free, and the
host time of each request. Allocation order, and so the peak, is exact. Everything else is a guess,
because a snapshot does not record which operator reads which storage:

- An *operator* is the interval from an allocation, or a run of frees, to the next one. Its duration
  is host time, which is close only if the host waited for the device.
- Operators up to the highest peak are forward, the rest are backward. A snapshot of several steps
  therefore gives a plan for one of them.
- A storage counts as *saved* if it is large, was allocated before the peak, and is freed after the
  peak but before the end. The operator that makes it and the next one use it; then it is idle until
  the operator before its free. (Gradients, parameters and states are not freed, so they stay.)
- Nothing can be recomputed, because the reads of an operator are unknown.
- Memory that is never freed stays. Memory that was allocated before the snapshot and is freed in it
  stays until its free.

Source:
    torch/cuda/memory.py, `_snapshot`; torch/cuda/_memory_viz.py, `trace`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swapkit.errors import InvalidDocument
from swapkit.ir.checks import check_trace
from swapkit.ir.snapshot_files import (
    FREES,
    GROWS,
    REQUESTS,
    SHRINKS,
    Snapshot,
    SnapshotEntry,
    load_snapshot,
)
from swapkit.ir.traces import BEFORE, Operator, Phase, Storage, Trace
from swapkit.units import round_up

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

LARGE_BYTES = 1 << 20
_ROUNDING = 512  # of torch's allocator; an entry has the requested bytes, not rounded


def read_snapshot(
    path: str | os.PathLike[str], *, device: int | None = None, large_bytes: int = LARGE_BYTES
) -> Trace:
    """Read a torch memory snapshot as a trace, without running code from the pickle.

    Args:
        path: a pickle written by `torch.cuda.memory._dump_snapshot`.
        device: the device whose history to read; None: the only device that has one.
        large_bytes: smallest storage that can count as saved.

    Raises:
        InvalidDocument: the file is not such a snapshot, has no history, or has the history of
            several devices and `device` is None.
        OSError: the file cannot be read.
    """
    snapshot = load_snapshot(path, device=device)
    actions = {entry.action for entry in snapshot.entries}
    lives = _Lives(frees=FREES if actions.intersection(FREES) else REQUESTS)
    for entry in snapshot.entries:
        lives.add(entry)
    lives.end()
    if not lives.operators:
        raise InvalidDocument(f"{path}: the history has no allocation")
    return _make_trace(snapshot, lives, large_bytes)


@dataclass(slots=True, kw_only=True)
class _Lives:
    """Operators and storages built from the entries so far, with births and deaths."""

    frees: tuple[str, ...]  # the actions that free memory
    operators: list[Operator] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    present: dict[int, int] = field(default_factory=dict)  # address -> storage
    was_free: bool = False
    begun: int | None = None  # microseconds: start of the open interval

    def add(self, entry: SnapshotEntry) -> None:
        """Add one entry; ignore entries that are neither an allocation nor a free."""
        if entry.action == "alloc":
            self._begin(entry, is_free=False)
            if entry.address in self.present:  # its free is missing
                self._remove(entry.address)
            self.present[entry.address] = len(self.storages)
            self.storages.append(
                Storage(nbytes=round_up(entry.nbytes, _ROUNDING), birth=self._current)
            )
        elif entry.action in self.frees:
            if not self.operators or not self.was_free:
                self._begin(entry, is_free=True)
            if entry.address not in self.present:  # its allocation was before the history
                self.present[entry.address] = len(self.storages)
                self.storages.append(
                    Storage(nbytes=round_up(entry.nbytes, _ROUNDING), birth=BEFORE)
                )
            self._remove(entry.address)

    def end(self) -> None:
        """Set the death of every storage that was not freed to the end of the step."""
        for address in list(self.present):
            self._set_death(address, len(self.operators))

    @property
    def _current(self) -> int:
        return len(self.operators) - 1

    def _begin(self, entry: SnapshotEntry, *, is_free: bool) -> None:
        """Begin an interval, and end the previous one."""
        if self.begun is not None and entry.time_us is not None and self.operators:
            seconds = max(0, entry.time_us - self.begun) * 1e-6
            self.operators[-1] = replace(self.operators[-1], seconds=seconds)
        self.begun = entry.time_us
        self.was_free = is_free
        name = "free" if is_free else entry.caller or "alloc"
        self.operators.append(Operator(name=name, seconds=0.0, phase=Phase.FORWARD))

    def _remove(self, address: int) -> None:
        self._set_death(address, self._current)
        del self.present[address]

    def _set_death(self, address: int, death: int) -> None:
        number = self.present[address]
        self.storages[number] = replace(self.storages[number], death=death)


def _make_trace(snapshot: Snapshot, lives: _Lives, large_bytes: int) -> Trace:
    base = sum(
        block.nbytes for address, block in snapshot.blocks.items() if address not in lives.present
    )
    in_use = _count_bytes(lives.storages, len(lives.operators))
    peak = max(range(len(in_use)), key=in_use.__getitem__)
    storages = [
        replace(storage, is_saved=_is_saved(storage, peak, len(in_use), large_bytes))
        for storage in lives.storages
    ]
    trace = Trace(
        operators=_give_uses(lives.operators, storages, peak),
        storages=tuple(storages),
        base_bytes=base,
        device="cuda",
        reserved_ratio=min(max(1.0, _most_reserved(snapshot) / max(1, base + in_use[peak])), 1e3),
    )
    check_trace(trace)
    return trace


def _is_saved(storage: Storage, peak: int, count: int, large_bytes: int) -> bool:
    """Return whether a storage is idle at the peak, as far as a snapshot can show."""
    is_large = storage.nbytes >= large_bytes
    return is_large and BEFORE < storage.birth <= peak and peak + 1 < storage.death < count


def _give_uses(
    operators: Sequence[Operator], storages: Sequence[Storage], peak: int
) -> tuple[Operator, ...]:
    """Return the operators with their phases, the storages that they make, and guessed uses."""
    reads: list[list[int]] = [[] for _ in operators]
    writes: list[list[int]] = [[] for _ in operators]
    for number, storage in enumerate(storages):
        if storage.birth < storage.death and storage.birth != BEFORE:
            writes[storage.birth].append(number)
        if storage.is_saved:
            if storage.birth < peak:
                reads[storage.birth + 1].append(number)
            reads[storage.death - 1].append(number)
    return tuple(
        replace(
            operator,
            phase=Phase.FORWARD if number <= peak else Phase.BACKWARD,
            reads=tuple(reads[number]),
            writes=tuple(writes[number]),
        )
        for number, operator in enumerate(operators)
    )


def _count_bytes(storages: Sequence[Storage], count: int) -> list[int]:
    """Return the bytes that storages occupy while each of `count` operators runs."""
    changes = [0] * (count + 1)
    for storage in storages:
        changes[max(storage.birth, 0)] += storage.nbytes
        changes[storage.death] -= storage.nbytes
    return list(itertools.accumulate(changes[:count]))


def _most_reserved(snapshot: Snapshot) -> int:
    """Return the most bytes reserved, walking the history back from its known end state."""
    reserved = most = snapshot.reserved_bytes
    for entry in reversed(snapshot.entries):
        if entry.action in GROWS:
            reserved -= entry.nbytes
        elif entry.action in SHRINKS:
            reserved += entry.nbytes
        most = max(most, reserved)
    return most
