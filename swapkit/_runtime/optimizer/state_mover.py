"""Moves of optimizer states between device and host, and where they are between steps."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from swapkit._runtime.model.ranks import count_node_ranks
from swapkit._runtime.optimizer.state_slots import HostBuffer, Slot, find_slots
from swapkit._runtime.torch_compat.internals import (
    is_cow,
    is_zero_tensor,
    storage_address,
    storage_use_count,
)
from swapkit._runtime.torch_compat.isolation import hidden, outside_inference, unseen
from swapkit.errors import OutOfHostMemory
from swapkit.reporting.text import format_per_rank
from swapkit.texts import get_logger
from swapkit.units import format_bytes

# ---- state mover ---------------------------------------------------------------------------------
#
# Moves of optimizer states between device and host, tensor by tensor.
#
# A state on the host is an ordinary CPU tensor that views a host buffer and keeps it alive. So
# reading it, `state_dict()`, `torch.save` and `deepcopy` need no help from swapkit. (The states of
# a copied optimizer stay on the host: torch copies no hooks.) A reference to such a tensor stays up
# to date: when the state returns to the host, the same tensor object gets the new bytes.
#
# Only plain dense tensors that are the sole owner of their storage are moved, and the local shards
# of DTensors if they are such tensors. A tensor that is referenced or viewed elsewhere, or does not
# fit on the host, stays on the device: the optimizer works as usual, and only the savings are lost
# (`StateMover.why_here` says why).

_log = get_logger("optimizer")

NO_ROOM = "finds no room on the host"
MOST_WAIT_SECONDS = 1.0  # for a thread that drops a reference


class StateCopy(Protocol):
    """One copy of one storage; keeps both ends alive until the copy is done."""

    @property
    def host(self) -> HostBuffer:
        """The host buffer of the copy."""

    def wait(self) -> None:
        """Wait until the copy is done."""


class Executor(Protocol):
    """Copies storages to the host and back."""

    def copy_out(self, storage: torch.UntypedStorage) -> StateCopy:
        """Start copying a storage to the host."""

    def copy_in(self, host: HostBuffer, storage: torch.UntypedStorage) -> StateCopy:
        """Start copying host memory into a storage of the same size."""


class _Hosted(NamedTuple):
    """The host buffer of a state, and the device that the state belongs on."""

    buffer: HostBuffer
    device: torch.device


class Arrival(NamedTuple):
    """A state being copied to the device."""

    slot: Slot
    host: torch.Tensor
    tensor: torch.Tensor
    copy: StateCopy


class _Departure(NamedTuple):
    """A state being copied to the host; until then the slot holds the device's tensor."""

    slot: Slot
    tensor: torch.Tensor
    copy: StateCopy
    nbytes: int


# The tensor, and the Python object through which we inspect its storage.
_OWN_HOLDERS = 2


class StateMover:
    """Moves the states of one optimizer. Use from one thread at a time."""

    def __init__(self, executor: Executor, *, min_bytes: int, device: torch.device) -> None:
        self._executor = executor
        self._min_bytes = min_bytes
        self.device = device
        # Key: the tensor on the host.
        self._hosted: MutableMapping[torch.Tensor, _Hosted] = WeakIdKeyDictionary()
        # Key: the tensor on the device. Value: the host tensor that it came from, if still alive.
        self._former: MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]] = (
            WeakIdKeyDictionary()
        )
        self._departures: deque[_Departure] = deque()
        self._departing_bytes = 0
        self._has_warned = False

    def serves(self, device: torch.device) -> bool:
        """Return whether states of parameters on `device` are moved."""
        return device == self.device

    def is_hosted(self, slot: Slot) -> bool:
        """Return whether the state is in one of our host buffers."""
        hosted = self._hosted.get(slot.tensor)
        # The user may have replaced the tensor's `.data`.
        return (
            hosted is not None and slot.tensor.untyped_storage().data_ptr() == hosted.buffer.address
        )

    def is_movable(self, slot: Slot, device: torch.device) -> bool:
        """Return whether a state is on `device`, where it belongs, and can be moved."""
        tensor = slot.tensor
        if not _is_plain(tensor) or tensor.device != device or not self.serves(device):
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self._min_bytes or _is_special(tensor) or not _owns_storage(tensor, nbytes):
            return False
        return not self.is_hosted(slot)

    def why_here(self, slot: Slot, device: torch.device) -> str:
        """Return why a state stays on the device after a step; empty: it does not, or is small."""
        with hidden(), outside_inference():
            is_held = slot.is_referenced()  # first: `tensor` is a reference, too
            tensor = slot.tensor
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes < self._min_bytes or tensor.device != self.device:
                return ""
            if tensor.device != device:
                return f"belongs to parameters on {device}"
            if not _is_plain(tensor):
                return f"is a {type(tensor).__name__}, {tensor.layout}"
            if self.is_hosted(slot):
                return ""
            if _is_special(tensor):
                return "has no plain memory of its own"
            if not _owns_storage(tensor, nbytes):
                return "shares its memory with other tensors"
            if self._has_warned:
                return NO_ROOM
            return "is referenced elsewhere" if is_held else ""

    def find_held(self, slots: Iterable[Slot], device: torch.device) -> set[int]:
        """Return the ids of movable states that code besides the optimizer references."""
        with hidden(), outside_inference():
            return {
                id(slot.tensor)
                for slot in slots
                if slot.is_referenced() and self.is_movable(slot, device)
            }

    def count_bytes(self, slots: Iterable[Slot], device: torch.device) -> int:
        """Return the bytes that the hosted and movable states take on the device in a step."""
        with hidden(), outside_inference():
            return sum(
                slot.tensor.untyped_storage().nbytes()
                for slot in slots
                if self.is_hosted(slot) or self.is_movable(slot, device)
            )

    # ---- to the device --------------------------------------------------------------------------

    def fetch(self, slots: Iterable[Slot]) -> list[Arrival]:
        """Start copying back those of the states that are on the host.

        Raises:
            torch.OutOfMemoryError: too little memory is free; all states are unchanged.
        """
        with hidden(), outside_inference():
            return [self._fetch(slot) for slot in slots if self.is_hosted(slot)]

    def _fetch(self, slot: Slot) -> Arrival:
        host = slot.tensor
        hosted: _Hosted = self._hosted[host]
        flat = torch.empty(hosted.buffer.nbytes, dtype=torch.uint8, device=hosted.device)
        storage = flat.untyped_storage()
        tensor = torch.empty(0, dtype=host.dtype, device=hosted.device)
        tensor.set_(storage, host.storage_offset(), host.size(), host.stride())
        return Arrival(slot, host, tensor, self._executor.copy_in(hosted.buffer, storage))

    def land(self, arrivals: list[Arrival]) -> None:
        """Wait for states and put them in their slots; this frees the host memory."""
        with hidden(), outside_inference():
            while arrivals:
                slot, host, tensor, copy = arrivals.pop()
                copy.wait()
                _wait_until_own(tensor)
                self._former[tensor] = weakref.ref(host)
                if slot.holds(host):
                    slot.put(tensor)

    # ---- to the host ----------------------------------------------------------------------------

    def send(self, slots: Iterable[Slot], device: torch.device, held: set[int]) -> None:
        """Start copying out the movable states that are not `held`."""
        with hidden(), outside_inference():
            for slot in slots:
                if id(slot.tensor) in held or not self.is_movable(slot, device):
                    continue
                if not self._send(slot):
                    return

    def _send(self, slot: Slot) -> bool:
        """Start copying one state out; return False if the host is out of memory."""
        tensor = slot.tensor
        storage = tensor.untyped_storage()
        try:
            copy = self._executor.copy_out(storage)
        except OutOfHostMemory as error:
            self._warn(error)
            return False
        self._departures.append(_Departure(slot, tensor, copy, storage.nbytes()))
        self._departing_bytes += storage.nbytes()
        return True

    def _warn(self, error: MemoryError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the host has no room for all optimizer states (%s): %s are on the host, and the "
                "rest stays on the device. Raise host_limit.",
                error,
                format_per_rank(self.hosted_bytes(), count_node_ranks(waits=False)),
            )

    def settle(self, limit_bytes: int = 0, *, strip: bool = False) -> None:
        """Wait until at most `limit_bytes` are being copied out; free the others' device memory.

        Args:
            limit_bytes: bytes that may stay in transfer; the oldest transfers are finished first.
            strip: empty the device tensors in place, since local variables of the step hold them.
        """
        with hidden(), outside_inference():
            while self._departures and self._departing_bytes > limit_bytes:
                departure = self._departures.popleft()
                self._departing_bytes -= departure.nbytes
                # An interruption from here on leaves the state on the device.
                departure.copy.wait()
                self._arrive(departure, strip=strip)
        if not self._departures:
            self._departing_bytes = 0  # corrects an interruption between the two lines above

    def _arrive(self, departure: _Departure, *, strip: bool) -> None:
        """Put a state that has been copied out in its slot."""
        slot, tensor, copy, _ = departure
        if not slot.holds(tensor):
            return  # replaced meanwhile
        former = self._former.get(tensor)
        host = former() if former is not None else None
        view = _view(copy.host, tensor)
        if host is None or host.dtype != view.dtype:
            host = view
        else:
            host.data = view
        self._hosted[host] = _Hosted(copy.host, tensor.device)
        slot.put(host)
        if strip:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def hosted_bytes(self) -> int:
        """Return the bytes of host memory that currently hold states."""
        return sum(hosted.buffer.nbytes for hosted in list(self._hosted.values()))


def _view(buffer: HostBuffer, like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the layout of `like` that views a buffer and keeps it alive."""
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.owner = buffer  # type: ignore[attr-defined]
    flat = torch.frombuffer(memory, dtype=like.dtype)
    tensor = torch.empty(0, dtype=like.dtype, device="cpu")
    return tensor.set_(flat.untyped_storage(), 0, like.size(), like.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    )


def _wait_until_own(tensor: torch.Tensor) -> None:
    """Wait until the copying thread has let go of the storage of a tensor that just arrived.

    The copy is done before that thread drops its reference. If it is held up in between, as on a
    busy machine, the storage would seem to be shared, and stay on the device after the step.
    Nothing else knows the storage yet, so the wait is for that thread only.
    """
    storage = tensor.untyped_storage()
    address = storage_address(storage)
    until = time.monotonic() + MOST_WAIT_SECONDS
    while storage_use_count(address) > _OWN_HOLDERS and time.monotonic() < until:
        time.sleep(0)  # lets other threads run


def _owns_storage(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a tensor is all of its storage, and nothing else refers to that."""
    storage = tensor.untyped_storage()
    holders = storage_use_count(storage_address(storage))
    return tensor.storage_offset() == 0 and storage.nbytes() == nbytes and holders == _OWN_HOLDERS


def _is_special(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no plain memory of its own, or is shared with processes."""
    return (
        tensor.is_nested
        or tensor.is_quantized
        or tensor.is_inference()
        or tensor.is_conj()
        or tensor.is_neg()
        or (tensor.device.type == "cpu" and tensor.untyped_storage().is_shared())
        or is_zero_tensor(tensor)
        or bool(is_cow(tensor))
    )


# ---- state places --------------------------------------------------------------------------------
#
# Where an optimizer's states are between steps, and why some stay on the device: as text.


@dataclass(slots=True, kw_only=True)
class StatePlaces:
    """The bytes of an optimizer's states by place."""

    of: str  # the optimizer's class
    hosted_bytes: int = 0
    left_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason
    has_states: bool = False

    @property
    def is_worth_logging(self) -> bool:
        """Whether the user expects less on the device than there is, and was not told yet."""
        return not self.has_states or not self.left_bytes.keys() <= {NO_ROOM}

    def __str__(self) -> str:
        if not self.has_states:
            return f"{self.of} has no states to keep on the host"
        text = f"states of {self.of}: {format_bytes(self.hosted_bytes)} on the host"
        if not self.left_bytes:
            return text
        left = sorted(self.left_bytes.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{format_bytes(nbytes)} ({reason})" for reason, nbytes in left)
        return f"{text}; on the device stay {reasons}"


def find_states(
    optimizer: torch.optim.Optimizer, others: torch.device | None
) -> list[tuple[torch.device, list[Slot]]]:
    """Return the states of each parameter, with the parameter's device.

    `others`: the device of states that are kept by another key than a parameter; None: leave these.
    """
    states: list[tuple[object, object]] = list(optimizer.state.items())
    found = []
    for key, state in states:
        device = key.device if isinstance(key, torch.Tensor) else others
        if device is not None:
            found.append((device, find_slots(state)))
    return found


@unseen
def find_places(optimizer: torch.optim.Optimizer, mover: StateMover) -> StatePlaces:
    """Return where an optimizer's states are between two steps."""
    places = StatePlaces(of=type(optimizer).__name__)
    for device, slots in find_states(optimizer, mover.device):
        _add(places, mover, device, slots)
    return places


def _add(
    places: StatePlaces, mover: StateMover, device: torch.device, slots: Iterable[Slot]
) -> None:
    for slot in slots:
        places.has_states = True
        nbytes = slot.tensor.numel() * slot.tensor.element_size()
        reason = mover.why_here(slot, device)
        if reason:
            places.left_bytes[reason] += nbytes
        elif mover.is_hosted(slot):
            places.hosted_bytes += nbytes
