"""Who holds the memory: names for blocks in use, and for tensors outside the pool."""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._native.pool import BlockState
from swapkit._runtime.tracking import BACKWARD
from swapkit.reporting.text import Holder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swapkit._runtime.device import Device
    from swapkit._runtime.tracking import ModuleTracker


class _Live(NamedTuple):
    """What the garbage collector knows of, from one walk over all objects."""

    tensors: list[torch.Tensor]
    optimizers: list[torch.optim.Optimizer]


def find_holders(device: Device, tracker: ModuleTracker) -> list[Holder]:
    """Return who holds the blocks of a device's pool that are in use, the largest first."""
    assert device.pool is not None
    names = _name_tensors(_find_live(), tracker, device)
    blocks = [block for block in device.pool.blocks() if block.state is BlockState.IN_USE]
    return _sum_up(
        (names.get(block.address) or _name_tag(block.tag, tracker), block.nbytes)
        for block in blocks
    )


def find_outside(device: Device, tracker: ModuleTracker) -> list[Holder]:
    """Return a device's tensors whose memory is not its pool's, by name, the largest first.

    They were made before the pool was installed, or share memory with something that is not
    torch's: numpy, a file, another process. The budget does not cover them.
    """
    assert device.pool is not None
    live = _find_live()
    names = _name_tensors(live, tracker, device)
    sizes: dict[int, int] = {}
    for tensor in live.tensors:
        storage = _storage_of(tensor, device)
        if storage is not None and not device.pool.owns(storage.data_ptr()):
            sizes[storage.data_ptr()] = storage.nbytes()
    return _sum_up((names.get(address, "other tensors"), n) for address, n in sizes.items())


def _sum_up(parts: Iterable[tuple[str, int]]) -> list[Holder]:
    """Add up what has a name in common; the largest first."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, nbytes in parts:
        totals[name][0] += nbytes
        totals[name][1] += 1
    holders = [Holder(name, n, count) for name, (n, count) in totals.items()]
    return sorted(holders, key=lambda holder: (-holder.nbytes, holder.name))


def _find_live() -> _Live:
    live = _Live([], [])
    for item in gc.get_objects():
        kind = type(item)  # not isinstance(): asking a lazy proxy for its class would run its code
        if kind is torch.Tensor or issubclass(kind, torch.nn.Parameter):
            live.tensors.append(item)
        elif issubclass(kind, torch.optim.Optimizer):
            live.optimizers.append(item)
    return live


def _name_tag(tag: int, tracker: ModuleTracker) -> str:
    name = tracker.name(tag)
    if not name:
        return "made outside of any module"
    return f"made in backward of {name}" if tag & BACKWARD else f"made in {name}"


def _name_tensors(live: _Live, tracker: ModuleTracker, device: Device) -> dict[int, str]:
    """Return names by address of parameters, their gradients, buffers and optimizer states."""
    names: dict[int, str] = {}

    def add(tensor: torch.Tensor, name: str) -> None:
        storage = _storage_of(tensor, device)
        if storage is not None:
            names[storage.data_ptr()] = name

    for state in _optimizer_states(live.optimizers):
        add(state, "optimizer states")
    for tensor in live.tensors:
        if issubclass(type(tensor), torch.nn.Parameter):
            add(tensor, "parameters")
            if tensor.grad is not None:
                add(tensor.grad, "gradients of parameters")
    for module in tracker.modules():
        for buffer in module.buffers(recurse=False):
            add(buffer, "buffers")
    return names


def _optimizer_states(optimizers: list[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for states in list(optimizer.state.values()):
            values = states.values() if isinstance(states, dict) else ()
            yield from (value for value in values if isinstance(value, torch.Tensor))


def _storage_of(tensor: torch.Tensor, device: Device) -> torch.UntypedStorage | None:
    """Return the storage of a tensor if it has one with bytes on a device.

    The tensors come from the garbage collector: some have no storage (lazy parameters, wrappers of
    function transforms), and none may stop a session.
    """
    try:
        if tensor.device != device.name or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() > 0 and storage.data_ptr() else None
    except (RuntimeError, ValueError):  # NotImplementedError is a RuntimeError
        return None
