"""Types of the compiled shim: saved tensors, storages, movers, choices of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from swapkit._native.sched import Scheduler
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.torch_compat.internals import version_of
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.errors import SavedTensorModified
from swapkit.ir.plans import Action, Tier
from swapkit.registry import Source, Swap

if TYPE_CHECKING:
    import torch

# ---- choice types --------------------------------------------------------------------------------
#
# Types of the compiled shim for choices about a module's operators, as protocols.
#
# `cpp/recompute/operator_choices.hpp` describes them, and `library.py` loads them.


class HeldUse(NamedTuple):
    """What a plan lets happen at a use of a weight; storages by `internals.storage_address`."""

    address: int
    leaves: int  # behind so many operators in a row that use it; 0: it stays
    comes: list[int]
    gone: list[int]  # must be, by then
    follows: list[int]  # come behind the first of the operators


class OperatorChoices(Protocol):
    """The user's choices for the operators of one module."""

    def seen(self) -> list[tuple[int, int]]:
        """Return for each kind how many operators ran, and how many whose choice is not void."""


class MakeChoices(Protocol):
    """The constructor of `OperatorChoices`."""

    def __call__(
        self, kinds: tuple[tuple[bool, Placement | None], ...], places: bytes, /
    ) -> OperatorChoices:
        """Make choices.

        Args:
            kinds: per kind: whether the operators are recomputed; how their results move, or None.
            places: rows of 64-bit numbers: an operator's number, and its kind.
        """


class Choosing(Protocol):
    """A context manager in which choices hold on the thread that enters it."""

    def runs(self) -> bool:
        """Return whether the module's own operators run here, and not those of a submodule."""

    def __enter__(self) -> Choosing:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End. If called on another thread, the thread that began ends it at its next check."""


class MakeChoosing(Protocol):
    """The constructor of `Choosing`, for a module that begins."""

    def __call__(
        self,
        choices: OperatorChoices | None,
        tracker: ModuleTracker,
        may_recompute: bool,  # noqa: FBT001 - in C++
        /,
    ) -> Choosing:
        """Make the context.

        Args:
            choices: for the module's operators; None: only make chosen results inside found.
            tracker: knows which module runs.
            may_recompute: whether no foreign mode changes the operators' results.
        """


# ---- placement -----------------------------------------------------------------------------------
#
# The placement of the tensors that are saved in a scope.

TIERS = {"host": Tier.HOST, "disk": Tier.DISK}
# Where a copy may live: the disk takes what the host has no room for.
COPY_TIERS = {Tier.HOST: Tier.ANY, Tier.DISK: Tier.DISK}


class Placement(NamedTuple):
    """One scope's placement. `prefetch`: a distance in operators; None: as early as memory allows.

    `spares_regions`: inputs of recomputed regions inside do not move.
    """

    action: Action
    tier: Tier = Tier.ANY
    prefetch: int | None = None
    min_bytes: int = MIN_SWAP_BYTES
    spares_regions: bool = False


def placement_of(swap: Swap, source: Source | None) -> Placement:
    """Return the placement that a swap choice of the registry asks for."""
    return Placement(
        Action.SWAP,
        COPY_TIERS[TIERS[swap.to]],
        swap.prefetch,
        swap.min_bytes,
        spares_regions=source is Source.CONFIGURATION,
    )


# ---- types ---------------------------------------------------------------------------------------
#
# Types of the shim for saved tensors, storages and movers (`cpp/saved/saved_tensors.hpp`).


class Lock(Protocol):
    """The runtime's lock: like `threading.RLock`, and fast enough for every saved tensor."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock. Return False if it is in use and `blocking` is False."""

    def release(self) -> None:
        """Undo one `acquire`.

        Raises:
            RuntimeError: this thread has not taken the lock.
        """

    def is_owned(self) -> bool:
        """Return whether this thread has taken the lock."""

    def __enter__(self) -> bool:
        """Take the lock, as `acquire` does."""

    def __exit__(self, *_: object) -> None:
        """Release the lock, as `release` does."""


NO_LIMIT = 2**64 - 1  # for byte limits of a mover


class MoverPolicy(Protocol):
    """The functions of its owner that a mover calls, with the lock held."""

    def weights_ended(self) -> None:
        """Take the mark from weights that do not leave any more. Without the lock."""

    def other_mover(self, device_type: int, index: int, /) -> Mover | None:
        """Return the mover of another device whose tensors are saved here, if it has one."""

    def is_weight(self, tensor: torch.Tensor, /) -> bool:
        """Return whether a tensor views a parameter, or the cast copy that autocast caches."""

    def take_apart(self, tensor: torch.Tensor, packer: Packer, /) -> object | None:
        """Return the stand-in for a saved wrapper; None: it stays whole. Without the lock."""

    def pack_awaited(self, packer: Packer, /) -> None:
        """Pack what has waited for collectives (`Packer.awaited`). Without the lock."""

    def note_automatic(self, group: StorageGroup, /) -> None:
        """Note that a group was saved under the budget. Only called if the mover `hears_saves`."""

    def in_use_bytes(self) -> int:
        """Return the bytes in use on the device. Only called without a pool."""

    def note_planned(self, group: StorageGroup, /) -> None:
        """Note that a group was saved whose moves happen at operators. Called as `note_move`."""

    def note_move(self, kind: str, group: StorageGroup, operator: int, /) -> None:
        """Note that a group moved at an operator. Only called if the runtime keeps a trace."""

    def backward_begins(self, tag: int, /) -> None:
        """Note the first use of a saved tensor in a backward pass. `tag`: the thread's label."""

    def has_room(self, nbytes: int, /) -> bool:
        """Return whether there is room to prefetch `nbytes`. Only called without a pool."""

    def name(self, group: StorageGroup, /) -> str:
        """Return the name of the module that saved a group, or an empty string."""


class SavedTensor(Protocol):
    """Autograd's stand-in for a saved tensor. Without a group it only checks the version."""

    alias: torch.Tensor
    leaf: torch.Tensor | None  # the saved tensor, if it is a leaf that other code still holds
    group: StorageGroup | None
    version: int
    is_stripped: bool
    # The version of the wrapper around it (`saved/taken_apart.py`), now and at the save.
    watched: tuple[int, int] | None


class StorageGroup(Protocol):
    """One storage at one version, with all saved tensors that view it."""

    mover: Mover
    placement: Placement
    nbytes: int  # of the part that moves
    part_bytes: int  # the offset of that part in the storage
    serial: int  # rises in the order in which groups were saved
    operator: int  # the last operator that saved it, if its moves happen at operators
    tag: int  # the site: the module's tag,
    index: int  # and the index of the save in the module's call
    state: int  # one of `State`
    handles: list[SavedTensor]
    storage: torch.UntypedStorage | None
    is_partial: bool  # the saved views cover so little that only a part of the storage moves
    is_exclusive: bool  # dropping the storage frees its memory
    is_spare: bool  # it can be dropped without a copy, and computed again
    made_bytes: int  # that its operator wrote at the start of the storage; 0: none, or with gaps
    is_on_device: bool
    is_kept_by_others: bool  # its storage was given up, but other references keep it alive


class Observer(Protocol):
    """An observer of all calls of a pair of hooks, on any thread, hidden from dispatch modes."""

    def saved(self, tensor: torch.Tensor, packed: object, /) -> None:
        """Note that a tensor was packed: to a `SavedTensor`, or to an object of a recipe."""

    def used(self, packed: object, tensor: torch.Tensor, /) -> None:
        """Note that a packed object was unpacked to a tensor."""


class Packer(Protocol):
    """One pair of hooks."""

    observer: Observer | None
    follows: bool  # its calls are the events of the mover's follower
    awaited: list[Any]  # what waits for collectives (`saved/taken_apart.py`)
    has_saved_late: bool  # a tensor was packed in a backward pass while it `follows`
    skips_backward: bool  # off the stack in backward passes (`saved/hooks.py`)
    is_inert: bool  # its session has ended: saved tensors stay, and the observer is not called

    def stand_by(self, is_on: bool, /) -> None:  # noqa: FBT001 - in C++
        """Capture every operator that is seen and can be repeated, even if no plan names it.

        Results that autograd saves stay on the device, and can be dropped (`Mover.drop`). Off:
        captured results that were not saved are forgotten.
        """

    def pack(self, tensor: torch.Tensor, /) -> SavedTensor:
        """Return the object that autograd keeps for a tensor."""

    def pack_inside(self, part: SavedTensor, /) -> SavedTensor:
        """Save a tensor inside a wrapper, which `Shim.keep_inside` has kept."""

    def unpack(self, packed: Any, /) -> torch.Tensor:  # noqa: ANN401 - or an object of a recipe
        """Return the tensor, as `Shim.unpack` does, and call the observer."""


class RegionHooks(Packer, Protocol):
    """One captured run of a user's region (`cpp/recompute/regions.hpp`), and its hooks."""

    is_open: bool
    holds: bool  # nothing is given up before the region's end

    def begin(self, holds: bool, /) -> None:  # noqa: FBT001 - in C++
        """Capture the operators that this thread runs from now on.

        If it `holds`, nothing is given up before the region's end.
        """

    def end(self, drops: bool, /) -> tuple[int, int, int]:  # noqa: FBT001 - in C++
        """Stop capturing, on the same thread; if it `drops`, give up the storages that it holds.

        Return the bytes that are kept without a user's choice, the bytes that are recomputed, and
        the number of held storages that a rescue has moved.
        """


class MakeRegion(Protocol):
    """The constructor of `RegionHooks`."""

    def __call__(
        self,
        kept: Packer,
        around: Callable[[torch.Tensor], Any] | None,
        others: Callable[[torch.Tensor], Any] | None,
        chosen: tuple[int, ...],
        inputs: list[torch.Tensor],
        /,
    ) -> RegionHooks:
        """Make the hooks.

        Args:
            kept: hooks for tensors that are kept.
            around: the enclosing pack hook, for the region's inputs.
            others: a pack hook for tensors from outside that are not inputs; None: they stay.
            chosen: numbers of the operators whose results are kept.
            inputs: the region's inputs.
        """


class Mover(Protocol):
    """Finds groups, and moves them. The lock is held, except in the hooks."""

    policy: MoverPolicy
    host_is_full: bool  # set when a copy out finds no room
    # Write-behind (`cpp/moves/write_behind.hpp`): the bytes in use from which it begins, the most
    # copies in flight, and the bytes that this step may still copy.
    watermark_bytes: int
    most_copying: int
    ahead_bytes: int
    holds_copies: bool  # write-behind is off
    makes_reclaimable: bool  # copied groups become so (`Mover.make_reclaimable`)
    hears_saves: bool  # whether saves under the budget call `MoverPolicy.note_automatic`
    held_tag: int  # of the memory in which held storages come
    # Bytes held, here, that cannot leave, and that compiled regions use now; uses that waited.
    held: tuple[int, int, int, int, int]
    dirty_count: int  # groups that still have to be copied ahead
    pool_address: int  # of the pool that records copies and knows the free room; 0: none
    timed: list[tuple[int, int, int]]  # for tests, by thread: saves, releases and orders to come
    resident: list[StorageGroup]  # in the order in which they were saved
    resident_count: int
    out: list[StorageGroup]  # in that order: groups that come back as early as memory allows
    indexed_count: int
    stalls: dict[tuple[int, int], float]  # the same by site: tag, and index in the module's call
    repeated: int  # operators that were run again for plans
    follower: Follower | None

    def packer(self, placement: Placement, /) -> Packer:
        """Return the hooks of a placement."""

    def copy_out(self, group: StorageGroup, /) -> bool:
        """Start copying a resident group out; return False if there is no room for the copy."""

    def make_reclaimable(self, group: StorageGroup, /) -> bool:
        """Copy out, and let allocators take the storage without Python once the copy is done."""

    def poll_out(self, group: StorageGroup, /) -> bool:
        """Return whether no copy out is in flight, without waiting."""

    def finish_out(self, group: StorageGroup, /) -> bool:
        """Wait for a copy out; return False if there is none, or it failed for lack of room."""

    def release(self, group: StorageGroup, /) -> None:
        """Give up the memory of a clean group."""

    def copy_ahead(self) -> None:
        """Copy out some of the oldest groups if memory fills up."""

    def settle_ahead(self) -> None:
        """Note which of the copies made ahead are done."""

    def resume_copies(self) -> None:
        """Queue every group on the device that has no user's choice for write-behind."""

    def sweep_captured(self) -> bool:
        """Forget captured results that were freed without being saved, and their operands.

        Returns:
            Whether there was one.
        """

    def end_captures(self) -> None:
        """Forget all captured results that were not saved, at a step's end. Takes the lock."""

    def forget_retained(self) -> None:
        """Give up the results of a region that a pass with `retain_graph` has recomputed.

        Takes the lock.
        """

    def drop(self, group: StorageGroup, digest: object, /) -> bool:
        """Give up the memory of a group that can be recomputed; return False if it cannot be.

        The recomputed bytes must match the digest (`compare_digest` in `callbacks.py`).
        """

    def watch(self, tensor: torch.Tensor, min_bytes: int, /) -> bool:
        """Prepare a tensor of at least so many bytes for `hold`.

        Return False if it is not plain memory of the pool, or another session holds it.

        Raises:
            RuntimeError: other libraries use the dispatch keys that this needs.
        """

    def expose(self, tensor: torch.Tensor, /) -> None:
        """Note that code may know the address of a tensor's bytes: `hold` refuses it."""

    def file_of(self, tensor: torch.Tensor, /) -> tuple[str, int] | None:
        """Return the path of the file that is mapped at a tensor's bytes, and where in it."""

    def note_file(self, tensor: torch.Tensor, path: str, offset: int, /) -> None:
        """Note that a tensor has the bytes of a part of a file, which its copy may then be."""

    def hold(self, tensor: torch.Tensor, placement: Placement, /) -> bool:
        """Let the storage of a watched tensor leave between two uses, from `begin_held` on.

        Return False if an operator runs with it, its address is known, or another session holds it.
        """

    def begin_held(self) -> None:
        """Begin to let held storages leave: those that nothing else holds. Forget the others."""

    def run_with(self, read: int, written: int, call: Callable[[], Any], /) -> Any:  # noqa: ANN401
        """Call a function while the bytes of two storages are on the device; 0: no storage.

        The function changes those of the second one.
        """

    def unhold(self, tensor: torch.Tensor, /) -> None:
        """Take the mark from a tensor whose storage is not held any more, by any mover."""

    def free_held(self, needed_bytes: int, spares: bool, /) -> int:  # noqa: FBT001 - in C++
        """Let held storages leave, farthest next use first; return the bytes freed.

        `spares`: not those that are used soon.
        """

    def exclude_held(self, is_excluded: bool, /) -> bool:  # noqa: FBT001 - in C++
        """Let operators on this thread not bring held storages, or again; return what was so."""

    def end_held_step(self) -> None:
        """Note that a step has ended: the next one is expected to use them in the same order."""

    def plan_held(
        self,
        uses: list[HeldUse],
        events: list[tuple[int, int]],
        /,
    ) -> None:
        """Let a plan decide when held storages move; an empty list: no plan does.

        Args:
            uses: those of a step, in order.
            events: those at which storages come, in order, and the storages.

        Raises:
            KeyError: a storage is not held.
        """

    def held_memory(self) -> tuple[int, list[int]]:
        """Return the bytes of held storages that are away, and where the others' memory is."""

    def end_held(self) -> None:
        """Bring held storages back, and hold them no more. Operators bring what finds no room."""

    def release_done(self, is_end: bool, /) -> None:  # noqa: FBT001 - in C++
        """Release groups whose copies are done. `is_end`: also send groups that wait for saves."""

    def release_next(self) -> bool:
        """Release the group that was sent out first, after its copy; False: there is none."""

    def send(self, group: StorageGroup, /) -> None:
        """Copy a group out, and release it when the copy is done, as a swapping scope does."""

    def bring_early(self, group: StorageGroup, /) -> bool:
        """Start to prefetch a group that is out; return False if there is no room."""

    def bring_back(self, group: StorageGroup, /) -> None:
        """Bring a group back, waiting if necessary, and start those needed next.

        Raises:
            torch.OutOfMemoryError: there is no room on the device.
            DiskError: the copy could not be read.
        """

    def finish_in(self, group: StorageGroup, /) -> None:
        """Wait for a copy back, if one is in flight.

        Raises:
            DiskError: the copy could not be read.
        """


class Owner(Protocol):
    """The owner of a plan that a follower carries out."""

    def deviated(self, found: tuple[int, bool, int, int, int, bool], /) -> None:
        """Handle an event that was not as expected. The lock is held, and following has ended.

        Called on the event's thread. `found`: the event's number in the step; whether it is a save;
        the tag, the bytes and the number in the plan of the group that moves, each -1 if there is
        none; whether a recipe replaces the tensor.
        """


class Follower(Protocol):
    """Carries a plan out, event by event (`cpp/moves/plan_cursor.hpp`). The lock is held."""

    is_on: bool  # nothing unexpected was seen in this step
    position: int  # events so far
    late: int  # storages whose copy was waited for at their use
    refused: int  # prefetches and early recomputations that found no room when they were due
    moved_bytes: int  # sent out so far

    def set_untracked(self, is_untracked: bool, /) -> None:  # noqa: FBT001 - positional only
        """Set whether module events are off on this thread, so that sites come from the plan."""

    def site(self) -> tuple[int, int] | None:
        """Return the tag and index of the next event if it is a storage's first save, or None."""

    def recompute(self, storage: int, /) -> None:
        """Recompute a storage of the plan now, ahead of its use, if there is room."""

    def capture(self, rows: bytes, /) -> None:
        """Repeat these runs of operators, from the next step on; see `captures.py`."""

    def captured(self) -> list[int]:
        """Return how often each of these runs was captured."""

    def reset(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """Stop following until a step begins. Groups that are out come back as memory allows."""


class MakeFollower(Protocol):
    """The constructor of `Follower`."""

    def __call__(
        self, mover: Mover, owner: Owner, events: bytes, storages: bytes, continuing: bytes, /
    ) -> Follower:
        """Make a follower that is off. The tables: see `execution/plan_compiler.py`."""


class MakeSavedTensor(Protocol):
    """The constructor of `SavedTensor`."""

    def __call__(self, tensor: torch.Tensor, *, itself: bool = False) -> SavedTensor:
        """Keep a tensor on its device. `itself`: keep the tensor itself, not an alias."""


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
        """Make a mover without groups."""


@untraced
def refuse_modified(handle: SavedTensor) -> NoReturn:
    """Refuse a tensor that was changed in place after it was saved, as autograd does.

    Raises:
        SavedTensorModified: always.
    """
    alias, group = handle.alias, handle.group
    name = "" if group is None else group.mover.policy.name(group)
    found, expected = handle.watched or (version_of(alias), handle.version)
    if found == expected:  # the wrapper was not changed, but the tensor inside
        found, expected = version_of(alias), handle.version
    raise modified_error(alias, expected, name, found)


def modified_error(
    tensor: torch.Tensor, expected: int, name: str = "", found: int | None = None
) -> SavedTensorModified:
    """Return the error for a saved tensor whose version changed. `name`: of its module."""
    found = version_of(tensor) if found is None else found
    where = f", saved in {name}," if name else ""
    return SavedTensorModified(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {tensor.dtype} {list(tensor.size())}{where} is at version "
        f"{found}; expected version {expected} instead."
    )
