"""Optimizer states that stay on the host between steps, and come chunk by chunk."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeVar

import torch

from swapkit._native.lib import raise_interruption
from swapkit._runtime.model.global_hooks import running_steps
from swapkit._runtime.optimizer.state_mover import (
    Arrival,
    Executor,
    StateMover,
    StatePlaces,
    find_places,
    find_states,
)
from swapkit._runtime.optimizer.state_slots import Slot, find_slots, is_sharded, local_part
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.thread_state import tries_memory
from swapkit._runtime.torch_compat.internals import step_pre_hooks_of
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit.errors import SessionError
from swapkit.texts import get_logger

# ---- chunks --------------------------------------------------------------------------------------
#
# Chunks of an optimizer's groups: the parameters whose states are on the device together.

Group = dict[str, Any]
_ABSENT = object()


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Some parameters of one group, in the group's order."""

    group: Group
    params: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0  # of their states that are on the device during the step


def divide(group: Group, sizes: list[int], chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of one group, at least one. `sizes`: bytes of states per parameter."""
    params = group["params"]
    if len({id(param) for param in params}) < len(params):
        # Keep the group whole: the step updates a parameter listed twice two times in a row.
        return [Chunk(group=group, params=params, nbytes=sum(sizes))]
    chunks = [Chunk(group=group)]
    for param, nbytes in zip(params, sizes, strict=True):
        if chunks[-1].nbytes and chunks[-1].nbytes + nbytes > chunk_bytes:
            chunks.append(Chunk(group=group))
        chunks[-1].params.append(param)
        chunks[-1].nbytes += nbytes
    return chunks


def take_over(given: Group, group: Group) -> None:
    """Copy entries that a step changed in the group it was given to the original group."""
    for key, value in given.items():
        if key != "params" and group.get(key, _ABSENT) is not value:
            group[key] = value


# ---- state dicts ---------------------------------------------------------------------------------
#
# State dicts of optimizers whose states are on the host.
#
# A plain state on the host is a CPU tensor, and needs no help. A DTensor whose shard is on the host
# still reports the device of its mesh (`state_slots.py`). Code that moves it there, such as
# `torch.distributed.checkpoint` for full state dicts, would not move the shard. So a state dict has
# another DTensor of the same shard that reports the CPU, as the states of FSDP2's
# `CPUOffloadPolicy`.

StateDict = dict[str, Any]


def report_places(_optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Replace DTensors that report another device than their shard's: a state dict's post-hook.

    The optimizer's own states are unchanged. A shard is shared, not copied.
    """
    states = state_dict["state"]
    if not any(map(_misreports, _values_of(states))):
        return state_dict
    return {**state_dict, "state": {key: _report(state) for key, state in states.items()}}


def _values_of(states: dict[object, object]) -> list[object]:
    dicts = [state for state in states.values() if isinstance(state, dict)]
    return [value for state in dicts for value in state.values()]


def _misreports(value: Any) -> bool:  # noqa: ANN401 - a tensor or another value
    return is_sharded(value) and value.device != local_part(value).device


def _report(value: Any) -> Any:  # noqa: ANN401 - of the same kind
    if isinstance(value, dict):
        return {key: _report(each) for key, each in value.items()}
    if not _misreports(value):
        return value
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())


# ---- chunked step --------------------------------------------------------------------------------
#
# Optimizer states that stay on the host between steps.
#
# The optimizer is not patched. A step pre-hook replaces `optimizer.param_groups` with our own list
# of the same groups. Only the code of `step` itself sees a difference: when `step` iterates over
# the groups, it gets each group in *chunks*. A chunk has the group's hyperparameters and some of
# its parameters, whose states are on the device by then. While the step processes a chunk, the next
# one is copied in and the previous one is copied out. Hooks, closures, schedulers and scalers see
# one step and the original groups.
#
# This is correct for optimizers that update each parameter independently, as all of `torch.optim`
# except LBFGS do. For any other optimizer, all states are copied in before the step and copied out
# after it: the results are equally correct, but the device holds all states during the step.

_log = get_logger("optimizer")
_Method = TypeVar("_Method", bound="Callable[..., None]")

MIN_BYTES = 1024
LEAST_CHUNK_BYTES = 1 << 20
MOST_CHUNK_BYTES = 64 << 20
# The share of all states that may be on the device at any time: the current chunk, the next one,
# and the one being copied out. The goal: the peak falls by the states' bytes within 2 %.
SHARE_ON_DEVICE = 0.015
CHUNKS_ON_DEVICE = 3
# A parameter without states gets states of at most this many times its own bytes.
NEW_STATES = 3
# The modules with steps that update each parameter independently.
PER_PARAMETER = frozenset(
    f"torch.optim.{name}"
    for name in (
        "_adafactor",
        "_muon",
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
        "sparse_adam",
    )
)


def attach(
    optimizer: torch.optim.Optimizer,
    executor: Executor,
    *,
    chunk_bytes: int | None = None,
    device: torch.device = CPU,
    wrappers: Iterable[torch.optim.Optimizer] = (),
) -> OptimizerStates:
    """Offload the states of an optimizer to the host between steps.

    Args:
        optimizer: of any class. During a step, states are copied back in chunks if the optimizer
            is one of `torch.optim` that updates each parameter independently, else all at once.
        executor: copies the states.
        chunk_bytes: approximate bytes of states per chunk; at most three chunks are on the device.
            A larger state is a chunk of its own. None: 1 MiB to 64 MiB, so that three chunks are
            1.5 % of all states.
        device: states of parameters on this device are moved.
        wrappers: optimizers whose `load_state_dict` puts states into `optimizer`.

    Returns:
        A handle; call `detach` to undo the offload.

    Raises:
        SessionError: the optimizer's states are already offloaded.
    """
    if attached(optimizer) is not None:
        raise SessionError("the states of this optimizer are already offloaded")
    states = OptimizerStates(optimizer, executor, chunk_bytes=chunk_bytes, device=device)
    states.follow(wrappers)
    return states


def attached(optimizer: torch.optim.Optimizer) -> OptimizerStates | None:
    """Return what `attach` returned for an optimizer; None: its states are not offloaded."""
    hooks = step_pre_hooks_of(optimizer).values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return next((each for each in owners if isinstance(each, OptimizerStates)), None)


def _hide_from_compiler(method: _Method) -> _Method:
    """Make a compiled step call `method` without tracing it."""
    hidden: _Method = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return hidden


class _ChunkedGroups(list[Group]):
    """The groups of an optimizer during a step; only the step's own code gets them in chunks."""

    def __init__(self, groups: list[Group], states: OptimizerStates, code: CodeType) -> None:
        super().__init__(groups)
        self._original = groups
        self._states = states
        self._code = code

    def __iter__(self) -> Iterator[Group]:
        if sys._getframe(1).f_code is self._code:  # noqa: SLF001
            return self._states.iterate(self[:])
        return super().__iter__()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Copy and pickle as a plain list."""
        return list, (list(self),)

    def unwrap(self) -> list[Group]:
        """Return the original list, with groups that were added meanwhile."""
        if len(self) != len(self._original):
            self._original[:] = self
        return self._original


class OptimizerStates:
    """The states of one optimizer, referred to weakly. Use from one thread at a time."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        executor: Executor,
        *,
        chunk_bytes: int | None = None,
        min_bytes: int = MIN_BYTES,
        device: torch.device = CPU,
    ) -> None:
        """Copy the states to the host, and register hooks for the optimizer's steps.

        Args:
            optimizer: the optimizer that owns the states.
            executor: copies the states.
            chunk_bytes: see `attach`.
            min_bytes: smaller states stay on the device.
            device: states of parameters on this device are moved.
        """
        self._optimizer = weakref.ref(optimizer)
        self._chunk_bytes = chunk_bytes
        self._mover = StateMover(executor, min_bytes=min_bytes, device=device)
        self._code = inspect.unwrap(type(optimizer).step).__code__
        self._is_chunked = _treats_each_parameter_by_itself(type(optimizer))
        self._has_told = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._recover),
            optimizer.register_state_dict_post_hook(report_places),
            optimizer.register_load_state_dict_post_hook(self._send_all),
        ]
        self._send_all(optimizer)

    def follow(self, wrappers: Iterable[torch.optim.Optimizer]) -> None:
        """Also offload the states that `load_state_dict` of a wrapper puts into the optimizer."""
        self._handles += [
            each.register_load_state_dict_post_hook(self._after_load) for each in wrappers
        ]

    @property
    def hosted_bytes(self) -> int:
        """Bytes of host memory that currently hold states."""
        return self._mover.hosted_bytes()

    def detach(self) -> None:
        """Copy all states back to the device, and remove all hooks.

        Raises:
            torch.OutOfMemoryError: too little memory is free; no state is lost, hooks stay.
        """
        optimizer = self._optimizer()
        if optimizer is not None and self._handles:
            self._recover(optimizer)
            self._fetch_all(optimizer)
        while self._handles:
            self._handles.pop().remove()

    # ---- hooks ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # A compiled step cannot run in chunks. The compiler traces this line only.
        self._begin(optimizer, is_chunked=self._is_chunked and not torch.compiler.is_compiling())

    @_hide_from_compiler
    def _begin(self, optimizer: torch.optim.Optimizer, *, is_chunked: bool) -> None:
        raise_interruption()
        self._recover(optimizer)
        if is_chunked:
            groups = optimizer.param_groups
            optimizer.param_groups = _ChunkedGroups(groups, self, self._code)
        else:
            self._fetch_all(optimizer)

    @_hide_from_compiler
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        was_chunked = isinstance(optimizer.param_groups, _ChunkedGroups)
        self._recover(optimizer)
        is_outermost = _count_running_steps(optimizer) <= 1
        if not was_chunked and is_outermost:
            self._send_all(optimizer)
        if not self._has_told and is_outermost:
            self._has_told = True
            self._log_places(find_places(optimizer, self._mover))

    def _after_load(self, wrapper: torch.optim.Optimizer) -> None:
        # Torch's ZeroRedundancyOptimizer also loads the states into itself, where nothing reads
        # them: as second references or copies, they would keep the memory of the device.
        optimizer = self._optimizer()
        if optimizer is not None:
            for param in wrapper.state.keys() & optimizer.state.keys():
                wrapper.state[param] = optimizer.state[param]
            self._recover(optimizer)
            self._send_all(optimizer)

    def _log_places(self, places: StatePlaces) -> None:
        """Say what does not move; called once, as the first step makes the states."""
        if places.is_worth_logging:
            _log.warning("offload(optimizer): %s", places)

    def _recover(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step, also one that raised: restore the optimizer's own list of groups."""
        if isinstance(optimizer.param_groups, _ChunkedGroups):
            optimizer.param_groups = optimizer.param_groups.unwrap()
        self._mover.settle()

    def places(self) -> StatePlaces | None:
        """Return where the states are; None: a step moves them, or the optimizer is gone."""
        optimizer = self._optimizer()
        if optimizer is None or isinstance(optimizer.param_groups, _ChunkedGroups):
            return None
        return find_places(optimizer, self._mover)

    # ---- all at once ----------------------------------------------------------------------------

    def _find_states(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[torch.device, list[Slot]]]:
        # A chunk has the states of its parameters only, so others would never come back.
        return find_states(optimizer, None if self._is_chunked else self._mover.device)

    def _fetch_all(self, optimizer: torch.optim.Optimizer) -> None:
        arrivals: list[Arrival] = []
        for _, slots in self._find_states(optimizer):
            following = self._mover.fetch(slots)
            self._mover.land(arrivals)
            arrivals = following
        self._mover.land(arrivals)

    def _send_all(self, optimizer: torch.optim.Optimizer) -> None:
        for device, slots in self._find_states(optimizer):
            self._mover.send(slots, device, self._mover.find_held(slots, device))
        self._mover.settle()

    # ---- chunk by chunk -------------------------------------------------------------------------

    def iterate(self, groups: list[Group]) -> Iterator[Group]:
        """Yield the groups in chunks, with the states of each chunk on the device.

        Only the step holds this iterator. If the step raises, prefetched copies are freed with the
        iterator, and the states of the current chunk stay on the device, as the step left them.
        """
        chunks, limit_bytes = self._plan(groups)
        arrivals: list[Arrival] | None = None
        for index, chunk in enumerate(chunks):
            raise_interruption()
            if arrivals is None:
                arrivals = self._fetch(chunk, limit_bytes - chunk.nbytes)
            self._mover.land(arrivals)
            following = chunks[index + 1] if index + 1 < len(chunks) else None
            arrivals = self._fetch_ahead(following, limit_bytes - chunk.nbytes)
            held = self._find_held(chunk)
            given = {**chunk.group, "params": chunk.params}
            yield given
            take_over(given, chunk.group)
            self._send(chunk, held)

    @unseen
    def _find_held(self, chunk: Chunk) -> set[int]:
        return {
            tensor
            for param in chunk.params
            for tensor in self._mover.find_held(self._slots_of(param), param.device)
        }

    @unseen
    def _send(self, chunk: Chunk, held: set[int]) -> None:
        for param in chunk.params:
            self._mover.send(self._slots_of(param), param.device, held)

    @unseen
    def _plan(self, groups: list[Group]) -> tuple[list[Chunk], int]:
        """Return the chunks of a step, and the maximum bytes of states on the device."""
        sizes = [[self._weigh(param) for param in group["params"]] for group in groups]
        chunk_bytes = self._chunk_bytes
        if chunk_bytes is None:
            share = int(sum(map(sum, sizes)) * SHARE_ON_DEVICE / CHUNKS_ON_DEVICE)
            chunk_bytes = min(max(share, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)
        chunks = [
            chunk
            for group, sizes_of in zip(groups, sizes, strict=True)
            for chunk in divide(group, sizes_of, chunk_bytes)
        ]
        largest_bytes = max((chunk.nbytes for chunk in chunks), default=0)
        return chunks, max(chunk_bytes * CHUNKS_ON_DEVICE, largest_bytes)

    def _weigh(self, param: torch.Tensor) -> int:
        """Return the bytes of a parameter's states that the step needs on the device."""
        if param.grad is None or not self._mover.serves(param.device):
            return 0
        slots = self._slots_of(param)
        if not slots:
            local = local_part(param)
            return local.numel() * local.element_size() * NEW_STATES
        return self._mover.count_bytes(slots, param.device)

    def _slots_of(self, param: torch.Tensor) -> list[Slot]:
        optimizer = self._optimizer()
        return [] if optimizer is None else find_slots(optimizer.state.get(param))

    @unseen
    def _fetch(self, chunk: Chunk, room_bytes: int) -> list[Arrival]:
        """Start copying a chunk in, once at most `room_bytes` of others are being copied out."""
        self._mover.settle(max(0, room_bytes), strip=True)
        params = [param for param in chunk.params if param.grad is not None]
        slots = [slot for param in params for slot in self._slots_of(param)]
        try:
            with tries_memory():
                return self._mover.fetch(slots)
        except torch.OutOfMemoryError:
            self._mover.settle(strip=True)
        return self._mover.fetch(slots)

    def _fetch_ahead(self, chunk: Chunk | None, room_bytes: int) -> list[Arrival] | None:
        """Start copying the next chunk in if it fits beside the current one, else return None."""
        if chunk is None or chunk.nbytes > room_bytes:
            return None
        try:
            with tries_memory():
                return self._fetch(chunk, room_bytes - chunk.nbytes)
        except torch.OutOfMemoryError:
            return None


def _treats_each_parameter_by_itself(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a step gives the same result in chunks of parameters."""
    parts = [kind.step, getattr(kind, "_init_group", kind.step)]
    return all(inspect.unwrap(part).__module__ in PER_PARAMETER for part in parts)


def _count_running_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps of an optimizer run on this thread; `super().step()` counts too."""
    running = running_steps(sys._getframe(1))  # noqa: SLF001
    return sum(each is optimizer for each in running)
