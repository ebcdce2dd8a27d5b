"""A trace as arrays: slots of time, items to decide about, and steps that recompute them.

*Slots* are the operators in order; consecutive operators share a slot if nothing happens to an item
between them. *Items* are the storages that may be swapped or recomputed, except small ones that do
not matter. Item j is born in slot `births[j]` (0 if it existed before the step). Its bytes are
final at the end of slot `readies[j]` (-1: from the start). Forward needs it last in slot
`releases[j]` (-1: not at all), backward first in slot `uses[j]` and last in slot `deaths[j]`:

    births <= readies <= releases < uses <= deaths

A *weight* has one item for each stretch in which no operator uses it. It is *clean* while there is
a copy of its bytes: all the time if it is frozen (`formers[j]` is j; that copy does not count), or
if it was swapped in the stretch before, `formers[j]`, or clean then, and not written since. An item
with a tail (`tails[j]` is not -1) goes on in the next step, which begins as this one does: from its
last use in a step to its first one in the next. Its tail begins after that last use, when it is
copied out if it is not clean.

In slot k the device holds `slot_bytes[k]`, independent of all decisions, and each item:

    kept        from slot births[j] to deaths[j]
    recomputed  from births[j] to releases[j], and from `need` to deaths[j]
    swapped     from births[j] until its copy out is done, no earlier than the end of releases[j];
                and from the start of its copy back to deaths[j]; a clean one until the end of
                releases[j], since it is not copied out
    with a tail: if kept, also from slot tails[j] to the last one; if swapped, from there until its
                copy out is done, and not at the step's start

A slot that waits for a transfer between ranks ends as long after slot `since[k]` as if nothing were
moved, or later, when the recomputation before it is done: what delays slots in between takes no
extra time as long as the wait lasts. For all others, `since[k]` is k.

`need` is the slot before which an item must be present: `uses[j]`, or the earlier `need` of a
recomputed item that is made from it. An item that is recomputed before slot k takes its memory when
slot k begins, and its `chain_bytes` in addition for the duration of slot k.

*Steps* are operators that recomputing runs. The `chain_steps` of an item make it, in order, from
its `inputs` (other items) and from storages that stay on the device, through storages that autograd
did not save. The last step is the item's own operator. Recomputed items with the same own operator
are made together, at the earliest of their needs. A step that several items need in the same slot
runs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.int64]
Indexes: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The input of a planner. K slots, N items, S steps."""

    slot_seconds: Floats  # K
    slot_bytes: Bytes  # K: the most of any operator in the slot
    since: Indexes  # K
    waits: Indexes  # the slots that wait where a session can recompute in the meantime
    slot_operators: Indexes  # K + 1: the first operator of each slot; then the number of operators
    item_bytes: Bytes  # N, as for all fields down to own_steps
    item_storages: Indexes  # of the trace
    births: Indexes
    readies: Indexes
    releases: Indexes
    uses: Indexes
    deaths: Indexes
    tails: Indexes  # K: the step ends with the item's last use
    formers: Indexes
    is_weight: Flags
    can_swap: Flags
    can_recompute: Flags
    chain_bytes: Bytes
    classes: Indexes  # equal for items with the same role in alike layers and microbatches
    own_steps: Indexes  # the step of the item's own operator; -1: it cannot be recomputed
    step_seconds: Floats  # S
    # Compressed rows: the values of item j are values[starts[j] : starts[j + 1]].
    chain_starts: Indexes  # N + 1
    chain_steps: Indexes
    input_starts: Indexes  # N + 1
    inputs: Indexes

    @property
    def is_copied(self) -> Flags:
        """Return whether items may have to be copied out: not if they may be clean."""
        flags: Flags = self.formers < 0
        return flags

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of weights that no operator writes, which have copies all the time."""
        is_frozen = self.formers == np.arange(len(self.formers))
        return int(self.item_bytes[is_frozen & (self.tails >= 0)].sum())

    @property
    def copies(self) -> tuple[Indexes, Indexes]:
        """Return the first and the last slots in which copies may take room, of copied items."""
        goes_on = self.tails >= 0
        firsts: Indexes = np.where(goes_on, 0, np.maximum(self.readies, 0))
        lasts: Indexes = np.where(goes_on, len(self.slot_seconds) - 1, self.deaths)
        return firsts, lasts

    @property
    def outs(self) -> Indexes:
        """Return the slots at whose end copies out may begin."""
        slots: Indexes = np.where(self.tails >= 0, self.tails - 1, self.readies)
        return slots

    def steps_of(self, item: int) -> list[int]:
        """Return the steps that recompute an item, in order."""
        steps: list[int] = self.chain_steps[
            self.chain_starts[item] : self.chain_starts[item + 1]
        ].tolist()
        return steps

    def wait_seconds(self) -> float:
        """Return the time of the slots that wait for other ranks, if nothing is moved."""
        computes = self.since == np.arange(len(self.since))
        return float(np.sum(self.slot_seconds[~computes]))
