"""Where an optimizer's states are between steps, and why some stay on the device: as text."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.optimizer.state_mover import NO_ROOM
from swapkit._runtime.optimizer.state_slots import find_slots
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swapkit._runtime.optimizer.state_mover import StateMover
    from swapkit._runtime.optimizer.state_slots import Slot


@dataclass(slots=True, kw_only=True)
class StatePlaces:
    """The bytes of an optimizer's states by place."""

    of: str  # the optimizer's class
    hosted_bytes: int = 0
    left_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason
    has_states: bool = False

    @property
    def is_worth_telling(self) -> bool:
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
