"""Saved tensors, the storages under them, and who moves these, as Python sees them.

The types are the compiled shim's: `cpp/saved/saved_tensors.hpp` tells what they are, and
`library.py` loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from swapkit._runtime.torch_compat.internals import version_of
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit.errors import SavedTensorModified

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from swapkit._native.sched import Scheduler
    from swapkit._runtime.model.tracker import ModuleTracker
    from swapkit._runtime.shim.placement import Placement


class Lock(Protocol):
    """The runtime's lock: as `threading.RLock`, and quick to take for every saved tensor."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it; return False if that would mean waiting, and it is not to be `blocking`."""

    def release(self) -> None:
        """Undo one `acquire`.

        Raises:
            RuntimeError: this thread has not taken it.
        """

    def is_owned(self) -> bool:
        """Return whether this thread has taken it."""

    def __enter__(self) -> bool:
        """As `acquire`."""

    def __exit__(self, *_: object) -> None:
        """As `release`."""


NO_LIMIT = 2**64 - 1  # of what a mover counts in bytes


class MoverPolicy(Protocol):
    """What a mover asks of its owner, with the lock held."""

    def other_mover(self, device_type: int, index: int, /) -> Mover | None:
        """Return who moves the tensors of another device that a scope here saves, if anybody."""

    def is_weight(self, tensor: torch.Tensor, /) -> bool:
        """Return whether a tensor views a parameter, or what autocast keeps of one."""

    def note_automatic(self, group: StorageGroup, /) -> None:
        """Note that a group was saved under the budget; asked if the mover `hears_saves`."""

    def in_use_bytes(self) -> int:
        """Return the bytes in use on the device; not asked of a pool."""

    def note_planned(self, group: StorageGroup, /) -> None:
        """Note that a group was saved that is moved at operators; asked as `note_move`."""

    def note_move(self, kind: str, group: StorageGroup, operator: int, /) -> None:
        """Note that a group was moved at an operator; asked if the runtime keeps a trace."""

    def backward_begins(self, tag: int, /) -> None:
        """Note that a backward pass uses the first saved tensor on this thread, whose label was."""

    def has_room(self, nbytes: int, /) -> bool:
        """Return whether so many bytes may come back ahead of their use; not asked of a pool."""

    def name(self, group: StorageGroup, /) -> str:
        """Return the name of the module that saved a group, or empty text."""


class SavedTensor(Protocol):
    """What autograd keeps instead of a saved tensor. Without a group it only checks the version."""

    alias: torch.Tensor
    group: StorageGroup | None
    version: int
    is_stripped: bool


class StorageGroup(Protocol):
    """One storage at one version, with all saved tensors that view it."""

    mover: Mover
    choice: Placement
    nbytes: int  # of what is moved
    part_bytes: int  # where in the storage that begins
    serial: int  # in the order in which groups were saved
    operator: int  # the last one that saved it; where its moves happen at operators
    tag: int  # the site: module,
    index: int  # and number within its call
    state: int  # one of `State`
    handles: list[SavedTensor]
    storage: torch.UntypedStorage | None
    is_partial: bool  # the saved views cover too little for all of the storage to move
    is_exclusive: bool  # dropping the storage frees its memory
    is_spare: bool  # it can be dropped without a copy, and computed again
    made_bytes: int  # at its begin that its operator wrote; 0: none, or with gaps
    is_on_device: bool
    is_kept_by_others: bool  # the storage was given up, but somebody else held it


class Observer(Protocol):
    """Who is told of every call of a pair of hooks, on any thread; no mode sees what it does."""

    def saved(self, tensor: torch.Tensor, packed: object, /) -> None:
        """Note what autograd keeps of a tensor: a `SavedTensor`, or what a recipe gave."""

    def used(self, packed: object, tensor: torch.Tensor, /) -> None:
        """Note what autograd gets back for what it kept."""


class Packer(Protocol):
    """One pair of hooks."""

    observer: Observer | None
    follows: bool  # its calls are the events of the mover's follower
    has_saved_late: bool  # something was saved in a backward pass, as far as it was there
    rests: bool  # nothing is saved in backward passes: they go without it (`saved/hooks.py`)
    is_inert: bool  # its session has ended: whatever is saved is kept, and nobody is told

    def stand_by(self, is_on: bool, /) -> None:  # noqa: FBT001 - in C++
        """Capture every operator that is seen and can be repeated, though no plan names it.

        What autograd saves of their results stays where it is, and can be dropped (`Mover.drop`).
        What was captured before and not saved is forgotten.
        """

    def pack(self, tensor: torch.Tensor, /) -> SavedTensor:
        """Return what autograd is to keep."""

    def unpack(self, packed: Any, /) -> torch.Tensor:  # noqa: ANN401 - or what a recipe gave
        """Return what that stands for, as `Shim.unpack` does, and tell the observer."""


class RegionHooks(Packer, Protocol):
    """One run of a user's region that is captured (`cpp/recompute/regions.hpp`), and its hooks."""

    is_open: bool
    holds: bool  # nothing is given up before its end

    def begin(self) -> None:
        """Capture what this thread runs from now on."""

    def end(self, drops: bool, /) -> tuple[int, int, int]:  # noqa: FBT001 - in C++
        """Capture no more, on the same thread; what it holds is given up if it `drops`, or kept.

        Return the bytes that it keeps though nobody has chosen that, and that it computes again;
        and how much of what it held a rescue has moved: saved storages.
        """


class MakeRegion(Protocol):
    """Makes the hooks of a region."""

    def __call__(
        self,
        rest: Packer,
        around: Callable[[torch.Tensor], Any] | None,
        others: Callable[[torch.Tensor], Any] | None,
        chosen: tuple[int, ...],
        inputs: list[torch.Tensor],
        holds: bool,  # noqa: FBT001 - in C++
        /,
    ) -> RegionHooks:
        """Return them.

        Args:
            rest: hooks for what is kept.
            around: the pack hook around, for what it is handed.
            others: a pack hook for what it is not handed; None: that stays where it is.
            chosen: numbers of the operators whose results are kept.
            inputs: what it is handed.
            holds: nothing is given up before its end.
        """


class Mover(Protocol):
    """Finds groups, and moves them. The lock is held, but for the hooks."""

    policy: MoverPolicy
    host_is_full: bool  # set when a copy out finds no room
    # Copying ahead (`cpp/moves/write_behind.hpp`): from so many bytes in use on, at most so many at
    # once, and so many bytes more in this step.
    watermark_bytes: int
    most_copying: int
    ahead_bytes: int
    holds_copies: bool  # nothing is copied ahead
    sets_aside: bool  # but set aside
    hears_saves: bool  # whether the policy is told what is saved under the budget
    dirty_count: int  # groups that are still to be copied ahead
    pool_address: int  # whose ring copies are noted in, and which knows its room; 0: none
    timed: list[tuple[int, int, int]]  # for tests: by thread, saves, releases to come and orders
    resident: list[StorageGroup]  # in the order in which they were saved
    resident_count: int
    out: list[StorageGroup]  # likewise: those that come back as early as memory allows
    indexed_count: int
    waited_seconds: float  # for copies, since it was made
    stalls: dict[tuple[int, int], float]  # the same by site: module, and number within its call
    repeated: int  # operators that plans computed again
    follower: Follower | None

    def packer(self, choice: Placement, /) -> Packer:
        """Return the hooks of a choice."""

    def copy_out(self, group: StorageGroup, /) -> bool:
        """Start copying a resident group out; return False if there is no room for the copy."""

    def set_aside(self, group: StorageGroup, /) -> bool:
        """As `copy_out`; and leave the storage to who wants its memory once the copy is done."""

    def poll_out(self, group: StorageGroup, /) -> bool:
        """Return whether no copy out is under way any more, without waiting for it."""

    def finish_out(self, group: StorageGroup, /) -> bool:
        """Wait for a copy out; return False if it failed for want of room."""

    def release(self, group: StorageGroup, /) -> None:
        """Give up the memory of a clean group."""

    def copy_ahead(self) -> None:
        """Copy out some of the oldest groups if memory fills up."""

    def settle_ahead(self) -> None:
        """Note which of these copies are done."""

    def resume_copies(self) -> None:
        """Let every group on the device that nobody has chosen for wait to be copied ahead."""

    def sweep_captured(self) -> None:
        """Forget what was captured and not saved, and is gone: operands of that may go with it."""

    def end_captures(self) -> None:
        """Forget all that was captured and not saved: a step has ended. Takes the lock itself."""

    def forget_retained(self) -> None:
        """Give up what a pass that retains its graph has computed again of a user's region.

        Takes the lock itself.
        """

    def drop(self, group: StorageGroup, digest: object, /) -> bool:
        """Give up the memory of a group that can be computed again; return whether it could be.

        What is computed has to have the digest (`compare_digest` in `callbacks.py`).
        """

    def release_done(self, is_end: bool, /) -> None:  # noqa: FBT001 - in C++
        """Release planned swaps whose copies are done; at the `is_end`, all that wait for more."""

    def release_next(self) -> bool:
        """Give up the memory of what was sent out first, waiting for its copy; False: of none."""

    def send(self, group: StorageGroup, /) -> None:
        """Copy a group out, and release it when that is done, as a scope that swaps does."""

    def bring_early(self, group: StorageGroup, /) -> bool:
        """Start bringing a group that is out back if there is room; return whether there was."""

    def bring_back(self, group: StorageGroup, /) -> None:
        """Bring a group back, waiting if need be, and start those needed next.

        Raises:
            torch.OutOfMemoryError: there is no room on the device.
            DiskError: the copy could not be read.
        """

    def finish_in(self, group: StorageGroup, /) -> None:
        """Wait for a copy back, if one is under way.

        Raises:
            DiskError: the copy could not be read.
        """


class Owner(Protocol):
    """Whose plan a follower carries out."""

    def deviated(self, found: tuple[int, bool, int, int, int, bool], /) -> None:
        """Note that an event was not as expected. The lock is held, and following has ended.

        On the thread of that event. `found`: its number in the step; whether it is a save; the tag
        and the bytes of what is moved, and its number in the plan, each -1 if there is none;
        whether a recipe stands for it.
        """


class Follower(Protocol):
    """Carries a plan out, event by event (`cpp/moves/plan_cursor.hpp`). The lock is held."""

    is_on: bool  # nothing unexpected was seen in this step
    position: int  # events so far
    late: int  # storages that were waited for where they were used,
    refused: int  # and times that one found no room when it was due
    moved_bytes: int  # sent out so far

    def rest(self, is_resting: bool, /) -> None:  # noqa: FBT001 - positional only
        """Note whether nobody hears of modules on this thread: what it saves is as planned."""

    def site(self) -> tuple[int, int] | None:
        """Return what the event that comes now saves first: tag and index; None: nothing."""

    def capture(self, rows: bytes, /) -> None:
        """Compute these runs of operators again, from the next step on; see `captures.py`."""

    def captured(self) -> list[int]:
        """Return how often each of these runs was captured."""

    def reset(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """Follow nothing until a step begins; what is out comes back as memory allows."""


class MakeFollower(Protocol):
    """The constructor of `Follower`."""

    def __call__(
        self, mover: Mover, owner: Owner, events: bytes, storages: bytes, continuing: bytes, /
    ) -> Follower:
        """Make a follower that is not on yet. The tables: see `execution/plan_compiler.py`."""


class MakeSavedTensor(Protocol):
    """The constructor of `SavedTensor`."""

    def __call__(self, tensor: torch.Tensor, *, itself: bool = False) -> SavedTensor:
        """Keep a tensor where it is; `itself`: not an alias of it."""


class MakeMover(Protocol):
    """The constructor of `Mover`."""

    def __call__(
        self,
        *,
        policy: MoverPolicy,
        scheduler: Scheduler,
        lock: Lock,
        tracker: ModuleTracker,
        device_type: int,
        device_index: int,
    ) -> Mover:
        """Make a mover of nothing yet."""


@untraced
def refuse_modified(handle: SavedTensor) -> NoReturn:
    """Refuse a tensor that was changed in place after it was saved, as autograd does.

    Raises:
        SavedTensorModified: it was.
    """
    alias, group = handle.alias, handle.group
    name = "" if group is None else group.mover.policy.name(group)
    raise modified_error(alias, handle.version, name)


def modified_error(tensor: torch.Tensor, expected: int, name: str = "") -> SavedTensorModified:
    """Return the error for a saved tensor that has another version than it had; `name`: where."""
    where = f", saved in {name}," if name else ""
    return SavedTensorModified(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {tensor.dtype} {list(tensor.size())}{where} is at version "
        f"{version_of(tensor)}; expected version {expected} instead."
    )
