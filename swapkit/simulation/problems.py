"""A trace as arrays: slots of time, items to decide about, steps that recompute them.

*Slots* are the operators in order, those between which nothing happens to any item taken together.
*Items* are the storages that may be swapped or recomputed; what is too small to matter is not among
them. Item j is born in slot `births[j]` (0 if it was there before), its bytes are final at the end
of slot `readies[j]` (-1: from the start), forward needs it last in slot `releases[j]` (-1: not at
all), backward first in slot `uses[j]` and last in slot `deaths[j]`:

    births <= readies <= releases < uses <= deaths

In slot k there are on the device `slot_bytes[k]`, whatever is decided, and of the items:

    kept        from slot births[j] to deaths[j]
    recomputed  from births[j] to releases[j], and from `need` to deaths[j]
    swapped     from births[j] until its copy out is done, no earlier than the end of releases[j];
                and from when its copy back starts to deaths[j]

`need` is the slot before which an item has to be there: `uses[j]`, or the earlier `need` of a
recomputed item that is made from it. The memory of what is recomputed before slot k is taken when
slot k begins, and its `chain_bytes` beside it for the duration of slot k.

*Steps* are operators that recomputing runs: `chain_steps` of an item are those that make it from
its `inputs` (other items) and from what stays on the device, in order, through storages that nobody
saved. The last one is its own operator. Recomputed items whose own operator is the same are made
together, at the earliest of their needs. A step that several items need in the same slot runs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Bytes: TypeAlias = NDArray[np.int64]
    Indexes: TypeAlias = NDArray[np.int32]
    Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What a planner decides about. K slots, N items, S steps."""

    slot_seconds: Floats  # K
    slot_bytes: Bytes  # K: the most of the operators taken together
    slot_operators: Indexes  # K + 1: the first operator of each slot; then the number of operators
    item_bytes: Bytes  # N, and so are all that follow
    item_storages: Indexes  # of the trace
    births: Indexes
    readies: Indexes
    releases: Indexes
    uses: Indexes
    deaths: Indexes
    can_swap: Flags
    can_recompute: Flags
    chain_bytes: Bytes
    classes: Indexes  # items with the same part in alike layers and microbatches have the same
    own_steps: Indexes  # the step of its own operator; -1: it cannot be recomputed
    step_seconds: Floats  # S
    # Compressed rows: those of item j are values[starts[j] : starts[j + 1]].
    chain_starts: Indexes  # N + 1
    chain_steps: Indexes
    input_starts: Indexes  # N + 1
    inputs: Indexes
