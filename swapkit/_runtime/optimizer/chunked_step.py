"""Optimizer states that live on the host between steps.

Nothing of the optimizer is patched. A hook before the step puts a list of our own in the place of
`optimizer.param_groups`; it holds the same groups and is the same list to everyone but the code of
the step itself. When that iterates over its groups it is given each of them in *chunks*: the same
hyperparameters with some of the parameters, whose states are on the device by then. While the step
works on a chunk, the next one is copied in and the one before is copied out. Hooks, closures,
schedulers and scalers see one step, and the groups as they are.

This is right for optimizers that treat each parameter by itself, as those of `torch.optim` do but
for LBFGS. With any other one, all states are brought in before the step and sent out after it: the
numbers are as right, but during the step the device holds all states.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swapkit._native.lib import raise_interruption
from swapkit._runtime.model import global_hooks
from swapkit._runtime.optimizer.state_mover import StateMover, find_slots
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.torch_compat.internals import step_pre_hooks_of
from swapkit.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

    from swapkit._runtime.optimizer.state_mover import Arrival, Executor, StateSlot

Group = dict[str, Any]
_Method = TypeVar("_Method", bound="Callable[..., None]")

MIN_BYTES = 1024
LEAST_CHUNK_BYTES = 1 << 20
MOST_CHUNK_BYTES = 64 << 20
# Of all states, how much may be on the device at any time: what is worked on, what follows, and
# what is on its way out. The peak is to fall by the states' bytes within 2 %.
SHARE_ON_DEVICE = 0.015
CHUNKS_ON_DEVICE = 3
# A parameter without states yet will get at most this many times its own bytes.
NEW_STATES = 3
# Where the steps are defined that treat each parameter by itself.
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
_ABSENT = object()


def attach(
    optimizer: torch.optim.Optimizer,
    executor: Executor,
    *,
    chunk_bytes: int | None = None,
    device: torch.device = CPU,
) -> OptimizerStates:
    """Let the states of an optimizer live on the host between steps, from now on.

    Args:
        optimizer: of any class. During a step, states come back piece by piece if it is one of
            `torch.optim` that treats each parameter by itself, else all at once.
        executor: who copies.
        chunk_bytes: about how many bytes of states a piece has; three pieces are on the device at
            most. A larger state is a piece of its own. None: 1 MiB to 64 MiB, so that these
            three are 1.5 % of all states.
        device: whose parameters' states are moved.

    Returns:
        A handle; its `detach` undoes this.

    Raises:
        SessionError: the optimizer's states are offloaded already.
    """
    hooks = step_pre_hooks_of(optimizer).values()
    if any(isinstance(getattr(hook, "__self__", None), OptimizerStates) for hook in hooks):
        raise SessionError("the states of this optimizer are offloaded already")
    return OptimizerStates(optimizer, executor, chunk_bytes=chunk_bytes, device=device)


def _hide_from_compiler(method: _Method) -> _Method:
    """Let a compiled step call `method` as it is."""
    hidden: _Method = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return hidden


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Some parameters of one group, in its order."""

    group: Group
    params: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0  # of their states that are on the device during the step


class _ChunkedGroups(list[Group]):
    """The groups of an optimizer in a step; only the step's own code gets them in chunks."""

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
        """Copies and pickles are plain lists."""
        return list, (list(self),)

    def unwrap(self) -> list[Group]:
        """Return the list that this one stands for, with what was added meanwhile."""
        if len(self) != len(self._original):
            self._original[:] = self
        return self._original


class OptimizerStates:
    """The states of one optimizer, which they do not keep alive. One thread at a time."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        executor: Executor,
        *,
        chunk_bytes: int | None = None,
        min_bytes: int = MIN_BYTES,
        device: torch.device = CPU,
    ) -> None:
        """Send the states to the host, and see every step from now on.

        Args:
            optimizer: whose states.
            executor: who copies.
            chunk_bytes: see `attach`.
            min_bytes: smaller states stay on the device.
            device: of the parameters whose states are moved.
        """
        self._optimizer = weakref.ref(optimizer)
        self._chunk_bytes = chunk_bytes
        self._mover = StateMover(executor, min_bytes=min_bytes, device=device)
        self._code = inspect.unwrap(type(optimizer).step).__code__
        self._is_chunked = _treats_each_parameter_by_itself(type(optimizer))
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._recover),
            optimizer.register_load_state_dict_post_hook(self._send_all),
        ]
        self._send_all(optimizer)

    @property
    def hosted_bytes(self) -> int:
        """Host memory that holds states now."""
        return self._mover.hosted_bytes()

    def detach(self) -> None:
        """Bring all states back to the device, and leave the optimizer alone from now on.

        Raises:
            torch.OutOfMemoryError: there is no room for all; nothing is lost or detached.
        """
        optimizer = self._optimizer()
        if optimizer is not None and self._handles:
            self._recover(optimizer)
            self._fetch_all(optimizer)
        while self._handles:
            self._handles.pop().remove()

    # ---- hooks ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # A compiled step has no code that could be given chunks. The compiler sees this line only.
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
        if not was_chunked and _count_running_steps(optimizer) <= 1:
            self._send_all(optimizer)

    def _recover(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step, be it that it raised: give the optimizer its own list of groups back."""
        if isinstance(optimizer.param_groups, _ChunkedGroups):
            optimizer.param_groups = optimizer.param_groups.unwrap()
        self._mover.settle()

    # ---- all at once ----------------------------------------------------------------------------

    def _fetch_all(self, optimizer: torch.optim.Optimizer) -> None:
        arrivals: list[Arrival] = []
        for _, slots in _find_states(optimizer):
            following = self._mover.fetch(slots)
            self._mover.land(arrivals)
            arrivals = following
        self._mover.land(arrivals)

    def _send_all(self, optimizer: torch.optim.Optimizer) -> None:
        for device, slots in _find_states(optimizer):
            self._mover.send(slots, device, self._mover.find_held(slots, device))
        self._mover.settle()

    # ---- chunk by chunk -------------------------------------------------------------------------

    def iterate(self, groups: list[Group]) -> Iterator[Group]:
        """Yield the groups in chunks, whose states are on the device meanwhile.

        Only the step holds this iterator. If it raises, what was fetched ahead goes with it, and
        the states of the chunk at hand stay on the device, as the step left them.
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
            held = {
                tensor
                for param in chunk.params
                for tensor in self._mover.find_held(self._slots_of(param), param.device)
            }
            given = {**chunk.group, "params": chunk.params}
            yield given
            _take_over(given, chunk.group)
            for param in chunk.params:
                self._mover.send(self._slots_of(param), param.device, held)

    def _plan(self, groups: list[Group]) -> tuple[list[_Chunk], int]:
        """Return the chunks of a step, and how many bytes of states may be on the device."""
        sizes = [[self._weigh(param) for param in group["params"]] for group in groups]
        chunk_bytes = self._chunk_bytes
        if chunk_bytes is None:
            share = int(sum(map(sum, sizes)) * SHARE_ON_DEVICE / CHUNKS_ON_DEVICE)
            chunk_bytes = min(max(share, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)
        chunks = [
            chunk
            for group, sizes_of in zip(groups, sizes, strict=True)
            for chunk in _divide(group, sizes_of, chunk_bytes)
        ]
        largest_bytes = max((chunk.nbytes for chunk in chunks), default=0)
        return chunks, max(chunk_bytes * CHUNKS_ON_DEVICE, largest_bytes)

    def _weigh(self, param: torch.Tensor) -> int:
        """Return the bytes of states that a step needs on the device for a parameter."""
        if param.grad is None or not self._mover.serves(param.device):
            return 0
        slots = self._slots_of(param)
        if not slots:
            return param.numel() * param.element_size() * NEW_STATES
        return self._mover.count_bytes(slots, param.device)

    def _slots_of(self, param: torch.Tensor) -> list[StateSlot]:
        optimizer = self._optimizer()
        return [] if optimizer is None else find_slots(optimizer.state.get(param))

    def _fetch(self, chunk: _Chunk, room_bytes: int) -> list[Arrival]:
        """Start bringing a chunk in when no more than `room_bytes` of others are on their way."""
        self._mover.settle(max(0, room_bytes), strip=True)
        params = [param for param in chunk.params if param.grad is not None]
        slots = [slot for param in params for slot in self._slots_of(param)]
        try:
            return self._mover.fetch(slots)
        except torch.OutOfMemoryError:
            self._mover.settle(strip=True)
        return self._mover.fetch(slots)

    def _fetch_ahead(self, chunk: _Chunk | None, room_bytes: int) -> list[Arrival] | None:
        """Start bringing the next chunk in if there is room for it beside the present one."""
        if chunk is None or chunk.nbytes > room_bytes:
            return None
        try:
            return self._fetch(chunk, room_bytes - chunk.nbytes)
        except torch.OutOfMemoryError:
            return None


def _find_states(optimizer: torch.optim.Optimizer) -> list[tuple[torch.device, list[StateSlot]]]:
    """Return the states of each parameter, with the device that they belong on."""
    keys: list[object] = list(optimizer.state)
    params = [key for key in keys if isinstance(key, torch.Tensor)]
    return [(param.device, find_slots(optimizer.state[param])) for param in params]


def _divide(group: Group, sizes: list[int], chunk_bytes: int) -> list[_Chunk]:
    """Return the chunks of one group, at least one; `sizes` are of its parameters' states."""
    params = group["params"]
    if len({id(param) for param in params}) < len(params):
        # One that is in it twice is treated twice, one after the other.
        return [_Chunk(group=group, params=params, nbytes=sum(sizes))]
    chunks = [_Chunk(group=group)]
    for param, nbytes in zip(params, sizes, strict=True):
        if chunks[-1].nbytes and chunks[-1].nbytes + nbytes > chunk_bytes:
            chunks.append(_Chunk(group=group))
        chunks[-1].params.append(param)
        chunks[-1].nbytes += nbytes
    return chunks


def _take_over(given: Group, group: Group) -> None:
    """Write what a step has changed in the group that it was given to the real one."""
    for key, value in given.items():
        if key != "params" and group.get(key, _ABSENT) is not value:
            group[key] = value


def _treats_each_parameter_by_itself(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a step is the same if it is given its parameters a few at a time."""
    parts = [kind.step, getattr(kind, "_init_group", kind.step)]
    return all(inspect.unwrap(part).__module__ in PER_PARAMETER for part in parts)


def _count_running_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps of an optimizer run on this thread: `super().step()` is one, too."""
    running = global_hooks.running_steps(sys._getframe(1))  # noqa: SLF001
    return sum(each is optimizer for each in running)
