"""Decides whether, when and how each saved tensor is moved.

A saved tensor that can be moved joins its storage's group. Groups of a swapping scope are copied
out and released when the copy is done, or where the scope says. Groups of a budget stay on the
device while memory lasts (`eviction.py`). In backward, groups are prefetched as far as there is
room, and come back at the latest when they are unpacked (`shim/cpp/moves/agenda.hpp`). The code
that runs for every saved tensor is in `shim/cpp/saved/pack_hooks.cpp`; this file has its policies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from swapkit._native.pool import set_tag
from swapkit._native.sched import Scheduler
from swapkit._runtime.saved import taken_apart
from swapkit._runtime.saved.device import Counters, Curve, Device, PlannedMove
from swapkit._runtime.saved.eviction import NO_BUDGET, EvictionTerms, Evictor
from swapkit._runtime.saved.existing_graphs import adopt_graphs
from swapkit._runtime.saved.weights import Weights
from swapkit._runtime.shim.types import Mover, Packer, Placement, SavedTensor, StorageGroup
from swapkit._runtime.torch_compat.internals import NO_TASK, base_of, engine, graph_task, storage_id
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.wrappers import graph_of, is_wrapper, tensors_inside
from swapkit.ir.plans import Action

# The data types that autocast casts weights to.
CAST_TO = (torch.bfloat16, torch.float16)


class Swapper:
    """Moves saved tensors with one scheduler. Any thread."""

    def __init__(
        self, device: Device, scheduler: Scheduler, terms: EvictionTerms = NO_BUDGET
    ) -> None:
        """Start empty."""
        self.shared = shared = device.shared
        self.device = device
        self.scheduler = scheduler
        self._tracker = shared.tracker
        # Guards the groups of every swapper. Bringing a storage back allocates with this lock held,
        # and the allocation may ask any session for a rescue, on the same thread even this one. So
        # the mover keeps a reference to the storage meanwhile.
        self._lock = shared.lock
        self.mover = shared.shim.mover(
            policy=self,
            scheduler=scheduler,
            lock=shared.lock,
            tracker=shared.tracker,
            device_type=device.type,
            device_index=device.index,
        )
        if device.pool is not None:
            self.mover.pool_address = device.pool.address
        self.unpack = shared.shim.unpack
        self.regions_run = 0  # recomputed regions
        self.events: Packer | None = None  # the session's hooks; each call of them is an event
        self._curve: Curve | None = None
        self._trained: list[weakref.ref[torch.nn.Module | torch.optim.Optimizer]] = []
        self.curve = None
        self.evictor = Evictor(
            self.mover,
            scheduler,
            device,
            terms,
            adopt=self._adopt,
            stand_by=self._stand_by,
        )
        self.weights = Weights(self.mover, device, terms.min_bytes)

    @property
    def curve(self) -> Curve | None:
        """The curve that decides about saved groups after a deviation from the plan, if any."""
        return self._curve

    @curve.setter
    def curve(self, curve: Curve | None) -> None:
        self._curve = curve
        self.mover.hears_saves = curve is not None or self.device.makes_reclaimable

    def counters(self) -> Counters:
        """Return what was counted so far."""
        moved = self.scheduler.stats()
        return Counters(
            rescues=self.evictor.count,
            recomputed=self.regions_run + int(self.mover.repeated),
            copied_out_bytes=moved.copied_out_bytes,
            copied_in_bytes=moved.copied_in_bytes,
            stall_seconds=moved.stall_ns / 1e9,
        )

    def train(self, *what: torch.nn.Module | torch.optim.Optimizer | None) -> None:
        """Note the model and the optimizers that the session trains."""
        self._trained = [weakref.ref(each) for each in what if each is not None]

    def trained(self) -> list[torch.nn.Module | torch.optim.Optimizer]:
        """Return those of the trained model and optimizers that still exist."""
        return [each for reference in self._trained if (each := reference()) is not None]

    def packer(self, placement: Placement) -> Callable[[torch.Tensor], SavedTensor]:
        """Return a pack hook that has no observer."""
        return self.mover.packer(placement).pack

    def end_scope(self) -> None:
        """Send out the groups that waited for more saves: a scope has ended."""
        with self._lock:
            self.mover.release_done(True)  # noqa: FBT003 - positional only

    def _adopt(self, min_bytes: int) -> int:
        """Adopt graphs recorded without our hooks; return the number of adopted saved tensors."""
        placement = Placement(Action.AUTO, min_bytes=min_bytes)
        return adopt_graphs(self.packer(placement), self.unpack, self.shared.shim)

    def _stand_by(self, is_on: bool) -> None:  # noqa: FBT001 - as in `Packer`
        """Start or stop capturing every operator in the session's hooks."""
        if self.events is not None:
            self.events.stand_by(is_on)

    def adopt_weights(self, needed_bytes: int) -> int:
        """Let more weights leave, if there are any, to free `needed_bytes`; return the bytes freed.

        From then on they are not as other tensors: when nothing else helps.
        """
        with self._lock, hidden():
            is_more = self.weights.adopt_more()
            return self.mover.free_held(needed_bytes, False) if is_more else 0  # noqa: FBT003

    # ---- for the mover --------------------------------------------------------------------------

    @untraced
    def weights_ended(self) -> None:
        """Take the mark from weights that do not leave any more."""
        self.weights.unmark()

    @untraced
    def other_mover(self, device_type: int, index: int) -> Mover | None:
        """Return the mover of another device whose tensors are saved here, if it has one."""
        return self.shared.other_mover(device_type, index)

    @untraced
    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor views a parameter, or the cast copy that autocast caches."""
        base = base_of(tensor)
        if base is not None and isinstance(base, torch.nn.Parameter):  # such as weight.t()
            return not is_wrapper(base) or _has_memory_of(tensor, base)
        is_of_function = base is not None and not base.requires_grad  # `to_local` is one
        return _is_cast_weight(tensor) or (is_of_function and _is_local_weight(tensor))

    @untraced
    def take_apart(self, tensor: torch.Tensor, packer: Packer) -> taken_apart.TakenApart | None:
        """Return the stand-in for a saved tensor that wraps others; None: it stays whole."""
        return taken_apart.take_apart(tensor, packer, self.shared.shim)

    @untraced
    def pack_awaited(self, packer: Packer) -> None:
        """Pack what has waited for collectives that the program has now waited for."""
        taken_apart.pack_awaited(packer)

    @untraced
    def note_automatic(self, group: StorageGroup) -> None:
        """Note that a group was saved under the budget (`Mover.hears_saves`). Lock held."""
        self.device.expect(group.nbytes)
        if self._curve is not None:
            self._curve.saved(group)

    @untraced
    def in_use_bytes(self) -> int:
        """Return the bytes in use on the device, as the pool counts them."""
        return self.device.in_use_bytes()

    @untraced
    def note_planned(self, group: StorageGroup) -> None:
        """Note that a group was saved whose moves happen at operators."""

    @untraced
    def note_move(self, kind: str, group: StorageGroup, operator: int) -> None:
        """Note that a group was released or prefetched at an operator."""
        trace = self.shared.trace
        if trace is not None:
            trace.append(
                PlannedMove(kind, self.site(group), group.operator, operator, group.nbytes)
            )

    @untraced
    def backward_begins(self, tag: int) -> None:
        """Restore this thread's module label when the running backward pass ends.

        The module hooks set labels in forward only. Called once per pass, on the pass's thread.
        """
        if graph_task() == NO_TASK:  # no backward: user code reads a graph's saved tensors
            set_tag(tag)
        else:
            engine.queue_callback(partial(_relabel, tag))

    @untraced
    def has_room(self, nbytes: int) -> bool:
        """Return whether the pool has room to prefetch `nbytes`."""
        return self.device.has_room(nbytes)

    def name(self, group: StorageGroup) -> str:
        """Return the name of the module that saved a group, or an empty string."""
        return self._tracker.name(group.tag)

    # ---- for the session ------------------------------------------------------------------------

    def rescue_bytes(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` of the device if possible; return the bytes freed."""
        with self._lock, hidden():
            return self.evictor.free(needed_bytes)

    def longest_stalls(self, count: int = 3) -> tuple[tuple[str, float], ...]:
        """Return the places with the longest waits for copies, and the seconds waited."""
        with self._lock:
            stalls = sorted(self.mover.stalls.items(), key=lambda each: -each[1])[:count]
        return tuple(
            (f"{self._tracker.name(tag) or 'no module'}, saved tensor {index}", seconds)
            for (tag, index), seconds in stalls
        )

    def end_step(self) -> None:
        """Update the policies from the step that ended."""
        with self._lock:
            self.mover.host_is_full = False
            self.evictor.end_step()
            self.weights.end_step()
            self._tracker.end_step()
        self.shared.shim.kernels_sweep()

    def resident_sizes(self) -> list[int]:
        """Return the bytes of each saved storage that is on the device."""
        with self._lock:
            self.mover.sweep_captured()
            return [group.nbytes for group in self.mover.resident]

    def site(self, group: StorageGroup) -> str:
        """Return the name of the place where a group was saved."""
        shape: Any = next((list(h.alias.shape) for h in group.handles), [])
        return f"{self.name(group)}#{group.index} {shape}"


@untraced
def _relabel(tag: int) -> None:
    set_tag(tag)


def _has_memory_of(tensor: torch.Tensor, wrapper: torch.Tensor) -> bool:
    """Return whether a tensor views what is inside a wrapper; it may be computed from it."""
    own = {storage_id(each) for each in tensors_inside(tensor)}
    return any(storage_id(each) in own for each in tensors_inside(wrapper))


def _is_local_weight(tensor: torch.Tensor) -> bool:
    """Return whether a view is the local part of a sharded weight (`to_local`), or views it.

    Its base has no graph, so each node up to the weight is of a view, or of a function in Python.
    """
    node = graph_of(tensor)
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)


def _is_cast_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is, or views, a cast copy of a weight that autocast caches."""
    # Autocast is disabled below its own dispatch key, so its cache cannot be queried here.
    if tensor.dtype not in CAST_TO:
        return False
    base = base_of(tensor)
    node = (tensor if base is None else base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    inputs = node.next_functions
    return bool(inputs) and inputs[0][0] is not None and "AccumulateGrad" in inputs[0][0].name()
