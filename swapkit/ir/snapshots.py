"""Traces from torch's memory snapshots, for an estimate without a recording.

`torch.cuda.memory._record_memory_history()`, one training step, and
`torch.cuda.memory._dump_snapshot(path)` leave a pickle with every allocation and every free, and
when the host asked for them. What was allocated when, and so the peak, is exact. All else is a
guess, since a snapshot does not say who reads what:

- An *operator* is what lies between an allocation, or a run of frees, and the next one. It takes
  as long as the host took, which is close only if the device was the one waited for.
- Until the highest peak it is forward, from then on backward: a snapshot of several steps gives a
  plan for one of them.
- A storage is taken for *saved* if it is large, was allocated before the peak, and is freed after
  it, before the end. It is used by the operator that makes it and the next one; then it is idle
  until the operator before its free. (Gradients, parameters and states are not freed, and stay.)
- Nothing can be recomputed, since what an operator reads is not known.
- What was there all the time, or is not freed any more, stays; what was made before the snapshot
  and is freed within stays until then.

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

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

LARGE_BYTES = 1 << 20
_ROUNDING = 512  # of torch's allocator; an entry has the bytes asked for


def read_snapshot(
    path: str | os.PathLike[str], *, device: int | None = None, large_bytes: int = LARGE_BYTES
) -> Trace:
    """Read a torch memory snapshot as a trace; no code in it is run.

    Args:
        path: of a pickle that `torch.cuda.memory._dump_snapshot` wrote.
        device: whose history to read; None: the only device that has one.
        large_bytes: from this size on a storage is taken for saved.

    Raises:
        InvalidDocument: it is no such snapshot, has no history, or one of several devices.
        OSError: it cannot be read.
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
    """What the entries say so far: intervals between them, storages with births and deaths."""

    frees: tuple[str, ...]  # the actions by which memory is free again
    operators: list[Operator] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    present: dict[int, int] = field(default_factory=dict)  # address -> storage
    was_free: bool = False
    begun: int | None = None  # microseconds, of the interval that is open

    def add(self, entry: SnapshotEntry) -> None:
        """Take one entry into account; those that are no allocation or free do nothing."""
        if entry.action == "alloc":
            self._begin(entry, is_free=False)
            if entry.address in self.present:  # its free is missing
                self._remove(entry.address)
            self.present[entry.address] = len(self.storages)
            self.storages.append(Storage(nbytes=_round(entry.nbytes), birth=self._current))
        elif entry.action in self.frees:
            if not self.operators or not self.was_free:
                self._begin(entry, is_free=True)
            if entry.address not in self.present:  # its allocation was before the history
                self.present[entry.address] = len(self.storages)
                self.storages.append(Storage(nbytes=_round(entry.nbytes), birth=BEFORE))
            self._remove(entry.address)

    def end(self) -> None:
        """End the lives of what is not freed: it stays."""
        for address in list(self.present):
            self._set_death(address, len(self.operators))

    @property
    def _current(self) -> int:
        return len(self.operators) - 1

    def _begin(self, entry: SnapshotEntry, *, is_free: bool) -> None:
        """Begin an interval, and end the one before."""
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
    base = sum(n for address, n in snapshot.blocks.items() if address not in lives.present)
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
    """Tell whether a storage is idle at the peak, as far as a snapshot says."""
    is_large = storage.nbytes >= large_bytes
    return is_large and BEFORE < storage.birth <= peak and peak + 1 < storage.death < count


def _give_uses(
    operators: Sequence[Operator], storages: Sequence[Storage], peak: int
) -> tuple[Operator, ...]:
    """Return the operators with their phases, what they make, and the uses that are guessed."""
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
    """Return the bytes that storages have while each of `count` operators runs."""
    changes = [0] * (count + 1)
    for storage in storages:
        changes[max(storage.birth, 0)] += storage.nbytes
        changes[storage.death] -= storage.nbytes
    return list(itertools.accumulate(changes[:count]))


def _most_reserved(snapshot: Snapshot) -> int:
    """Return the most bytes reserved in the history, which ends with what is reserved now."""
    reserved = most = snapshot.reserved_bytes
    for entry in reversed(snapshot.entries):
        if entry.action in GROWS:
            reserved -= entry.nbytes
        elif entry.action in SHRINKS:
            reserved += entry.nbytes
        most = max(most, reserved)
    return most


def _round(nbytes: int) -> int:
    return -(-nbytes // _ROUNDING) * _ROUNDING
