"""Memory holders by name, and hints for out-of-memory errors."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.utils.checkpoint

from swapkit._native.layout import TAG_OPTIMIZER
from swapkit._native.pool import BlockState
from swapkit._runtime.model.tracker import BACKWARD, ModuleTracker
from swapkit._runtime.saved.device import Device
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat import wrappers
from swapkit._runtime.torch_compat.internals import storage_address
from swapkit._runtime.torch_compat.thread_stacks import (
    backward_runs_elsewhere,
    others_wait,
    take_while,
)
from swapkit._runtime.torch_compat.wrappers import tensors_inside
from swapkit.reporting.text import Holder
from swapkit.units import format_bytes

# ---- memory holders ------------------------------------------------------------------------------
#
# Memory holders: names for blocks in use and for tensors outside the pool.
#
# Only `explain()` and error messages use this, on any thread, with or without the runtime's lock.
# Which tensors are safe to read depends on the other threads (see `torch_compat/thread_stacks.py`):
#
# - While every other thread waits: every tensor that the garbage collector tracks.
# - Otherwise: the models and optimizers of this thread's own sessions. Their parameters, buffers
#   and optimizer states are only replaced in Python, under the interpreter's lock, which we hold.
# - The thread that runs backward replaces `.grad`. So `.grad` is read only while no other thread
#   runs backward, even for parameters of this thread's sessions.
#
# All other blocks are named after the module that allocated them: the pool tags each block.

NESTED = 3  # depth of nested containers searched for optimizer states
UNCOLLECTED_AGE = 3  # steps


class _Found(NamedTuple):
    """Tensors that are safe to read while `may_look` returns true."""

    tensors: list[torch.Tensor]
    buffers: list[torch.Tensor]
    states: list[torch.Tensor]
    may_look: Callable[[], bool]


def find_holders(device: Device, tracker: ModuleTracker) -> list[Holder]:
    """Return the holders of the pool's blocks in use, largest first."""
    assert device.pool is not None
    names = _name_tensors(_find(tracker), device)
    blocks = [block for block in device.pool.blocks() if block.state is BlockState.IN_USE]
    return _sum_up(
        (names.get(block.address) or _name_tag(block.tag, tracker), block.nbytes)
        for block in blocks
    )


def find_uncollected(device: Device, tracker: ModuleTracker, steps: int) -> list[Holder]:
    """Return who made memory in a step that is still in use steps later, largest first.

    Such a block is neither a parameter, gradient, buffer nor optimizer state, and no memory from
    the first step: most often, the program keeps a tensor that it does not need.

    Args:
        device: its pool's blocks.
        tracker: knows the modules.
        steps: that a session has counted.
    """
    assert device.pool is not None
    names = _name_tensors(_find(tracker), device)
    return _sum_up(
        (_name_tag(block.tag, tracker), block.nbytes)
        for block in device.pool.blocks()
        if block.state is BlockState.IN_USE
        and UNCOLLECTED_AGE <= block.age < steps
        and not block.tag & TAG_OPTIMIZER
        and block.address not in names
    )


def find_outside(device: Device, tracker: ModuleTracker) -> list[Holder]:
    """Return the holders of a device's tensors outside its pool, largest first.

    Such a tensor was created before the pool was installed, or shares memory with numpy, a file or
    another process. The budget does not cover it. While other threads run, only tensors of this
    thread's sessions are found.
    """
    assert device.pool is not None
    found = _find(tracker)
    names = _name_tensors(found, device)
    sizes: dict[int, int] = {}
    for tensor in take_while(found.may_look, found.tensors):
        for storage in storages_of(tensor, device):
            address = wrappers.address_of(storage)
            if address != 0 and not device.pool.owns(address):
                sizes[address] = storage.nbytes()
    return _sum_up((names.get(address, "other tensors"), n) for address, n in sizes.items())


def _sum_up(parts: Iterable[tuple[str, int]]) -> list[Holder]:
    """Add up the bytes of each name; largest first."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, nbytes in parts:
        totals[name][0] += nbytes
        totals[name][1] += 1
    holders = [Holder(name, n, count) for name, (n, count) in totals.items()]
    return sorted(holders, key=lambda holder: (-holder.nbytes, holder.name))


def _find(tracker: ModuleTracker) -> _Found:
    if others_wait(in_backward=True):
        return _find_all(tracker)
    return _find_own()


def _find_all(tracker: ModuleTracker) -> _Found:
    """Return all tensors that the garbage collector tracks, from one walk over all objects."""
    tensors: list[torch.Tensor] = []
    optimizers: list[torch.optim.Optimizer] = []
    for item in gc.get_objects():
        kind = type(item)  # not isinstance(): asking a lazy proxy for its class would run its code
        if kind is torch.Tensor or issubclass(kind, torch.nn.Parameter) or _is_wrapper(kind):
            tensors.append(item)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(item)
    buffers = [each for module in tracker.modules() for each in module.buffers(recurse=False)]
    return _Found(tensors, buffers, states_of(optimizers), lambda: others_wait(in_backward=True))


def find_trained() -> list[torch.nn.Module | torch.optim.Optimizer]:
    """Return all models and optimizers of the program; none while other threads may change them."""
    if not others_wait(in_backward=True):
        return []
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    found = (each for each in gc.get_objects() if issubclass(type(each), kinds))
    return [each for each in found if vars(each)]  # not those that are being unpickled


def _is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class consist of others, as a DTensor of its local shard."""
    return issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_flatten__")


def _find_own() -> _Found:
    """Return the tensors of the models and optimizers of this thread's sessions."""
    trained = [each for swapper in thread_state.sessions for each in swapper.trained()]
    models = [each for each in trained if isinstance(each, torch.nn.Module)]
    optimizers = [each for each in trained if isinstance(each, torch.optim.Optimizer)]
    buffers = [buffer for model in models for buffer in model.buffers()]
    parameters = [parameter for model in models for parameter in model.parameters()]
    states = states_of(optimizers)
    return _Found([*parameters, *buffers, *states], buffers, states, lambda: True)


def states_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the tensors in the states of optimizers."""
    values = [value for optimizer in optimizers for value in list(optimizer.state.values())]
    return list(_tensors_in(values))


def _tensors_in(values: Iterable[object], depth: int = NESTED) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers: LBFGS keeps lists of past directions."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, dict):
            yield from _tensors_in(list(value.values()), depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            yield from _tensors_in(list(value), depth - 1)


def _name_tag(tag: int, tracker: ModuleTracker) -> str:
    name = tracker.name(tag)
    if not name:
        return "made outside of any module"
    return f"made in backward of {name}" if tag & BACKWARD else f"made in {name}"


def _name_tensors(found: _Found, device: Device) -> dict[int, str]:
    """Return names by address of parameters, their gradients, buffers and optimizer states."""
    names: dict[int, str] = {}

    def add(tensor: torch.Tensor | None, name: str) -> None:
        for storage in () if tensor is None else storages_of(tensor, device):
            names[wrappers.address_of(storage)] = name

    for state in take_while(found.may_look, found.states):
        add(state, "optimizer states")
    # A parameter that is sharded has the class of its shards.
    parameters = [each for each in found.tensors if isinstance(each, torch.nn.Parameter)]
    for parameter in take_while(found.may_look, parameters):
        add(parameter, "parameters")
    here = [each for each in parameters if each.device == device.name]
    for parameter in take_while(lambda: found.may_look() and not backward_runs_elsewhere(), here):
        add(parameter.grad, "gradients of parameters")
    for buffer in take_while(found.may_look, found.buffers):
        add(buffer, "buffers")
    return names


def storages_of(tensor: torch.Tensor, device: Device) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor, or of the tensors that it consists of, on a device."""
    try:
        parts = list(tensors_inside(tensor))
    except Exception:  # noqa: BLE001 - code of the user's class; it must not hide why memory is short
        return []
    storages = [_storage_of(part, device) for part in parts]
    return [storage for storage in storages if storage is not None]


def _storage_of(tensor: torch.Tensor, device: Device) -> torch.UntypedStorage | None:
    """Return the storage of a tensor if it has bytes on a device, else None.

    Some tensors have no storage (lazy parameters, wrappers of function transforms). None of them
    may make an error message fail.
    """
    try:
        if tensor.device != device.name or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        has_bytes = wrappers.may_leave(storage_address(storage)) or storage.data_ptr() != 0
        return storage if storage.nbytes() > 0 and has_bytes else None
    except (RuntimeError, ValueError):  # NotImplementedError is a RuntimeError
        return None


# ---- advice --------------------------------------------------------------------------------------
#
# Hints for out-of-memory errors, from the failing thread's stack and the pool's layout.

# Files of torch that run checkpointed regions, and that call compiled graphs.
_CHECKPOINT = torch.utils.checkpoint.__file__
_COMPILED = str(
    Path(torch.__file__).parent / "_functorch" / "_aot_autograd" / "runtime_wrappers.py"
)
# With more reserved memory free than this, suggest a setting.
SCATTERED_BYTES = 1 << 30


def advise_here(stats: dict[str, int], asked_bytes: int, *, separates: bool) -> list[str]:
    """Return hints for an allocation that failed on this thread.

    Args:
        stats: of the pool.
        asked_bytes: the size of the allocation.
        separates: whether the pool keeps memory that lives unequally long apart.
    """
    hints = []
    if _is_in(_CHECKPOINT):
        hints.append(
            "this is inside a checkpointed region (torch.utils.checkpoint): tensors saved during "
            "its recomputation stay on the device until its backward has run. Make the regions "
            "smaller, or remove them and let the budget choose what to recompute"
        )
    if _is_in(_COMPILED):
        hints.append(
            "this is inside a compiled graph (torch.compile): the budget recomputes nothing there, "
            "and the graph's inputs and results stay until it ends. Let torch recompute inside "
            "(torch._functorch.config.activation_memory_budget = 0.5)"
        )
    if _is_in(torch.serialization.__file__) or _is_in(_file_of("safetensors.torch"), "load_file"):
        hints.append(
            "this reads a checkpoint whose tensors are all on the device at once. Pass mmap=True "
            'and map_location="cpu" to torch.load, or no device to safetensors: '
            "load_state_dict then copies one tensor at a time"
        )
    in_use_bytes, budget_bytes = stats["allocated_bytes.all.current"], stats["budget_bytes"]
    if budget_bytes == 0 or in_use_bytes + asked_bytes <= budget_bytes:  # it would fit in one piece
        hints += advise_layout(stats, separates=separates)
    return hints


def _file_of(module: str) -> str:
    """Return the file of a module that the program may have imported; else nothing."""
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _is_in(code: str, name: str = "") -> bool:
    """Return whether a function of the file `code` is on this thread's Python stack; "": any."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to see callers
    while frame is not None:
        if frame.f_code.co_filename == code and name in {"", frame.f_code.co_name}:
            return True
        frame = frame.f_back
    return False


def advise_layout(stats: dict[str, int], *, separates: bool, at_peak: bool = False) -> list[str]:
    """Suggest a setting if much reserved memory is free but scattered.

    Args:
        stats: of the pool.
        separates: whether the pool keeps memory that lives unequally long apart.
        at_peak: compare the peaks. Between steps most reserved memory is free, scattered or not.
    """
    moment = "peak" if at_peak else "current"
    free_bytes = stats[f"reserved_bytes.all.{moment}"] - stats[f"allocated_bytes.all.{moment}"]
    is_movable = bool(stats.get("expandable_segments", 0))
    if free_bytes <= SCATTERED_BYTES or (is_movable and separates):
        return []
    advice = "set PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation"
    if is_movable:
        advice = (
            "call swapkit.install(lifetimes=True), or set MEMORY_FRAGMENTATION=1, to keep memory "
            "that lives unequally long apart"
        )
    at = " at the peak" if at_peak else ""
    return [f"{format_bytes(free_bytes)} are reserved but unallocated{at}: {advice}"]
