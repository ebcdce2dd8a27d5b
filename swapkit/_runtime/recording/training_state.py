"""Parameters, gradients and optimizer states of a recorded step, and their restoration."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from swapkit._runtime.model import global_hooks
from swapkit._runtime.process.undo import raise_first
from swapkit._runtime.recording.notes import Notes
from swapkit._runtime.torch_compat.accelerators import initialized_accelerator
from swapkit._runtime.torch_compat.internals import NO_TASK, FakeTensor, buffers_of, graph_task
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit._runtime.torch_compat.wrappers import is_plain
from swapkit.ir.traces import Kind, Phase

# ---- optimizer steps -----------------------------------------------------------------------------
#
# Parameters, gradients, optimizer states and optimizer steps of a recorded step.


class Optimizers:
    """All optimizers that step on a recorded thread. Methods hold or take the recorder's lock.

    Optimizers of other threads are ignored: those threads replace gradients without a lock.
    """

    def __init__(self, notes: Notes, known: tuple[torch.optim.Optimizer, ...]) -> None:
        """Start with the known optimizers; add others when they step."""
        self._notes: Notes | None = notes
        self._lock = notes.lock
        self._storages = notes.storages
        self._known: list[torch.optim.Optimizer] = list(known)
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._tasks: list[int] = []  # for each step under way, the backward pass it runs in
        self._was_backward = False

    def start(self) -> None:
        """Note the state of the known optimizers, and start to see steps."""
        with self._lock:
            for optimizer in self._known:
                self._add_states(optimizer)
        global_hooks.steps.add(self)

    def stop(self) -> None:
        """Look for new state a last time; undo `start`."""
        global_hooks.steps.remove(self)
        with self._lock:
            self.note_states()
        self._notes = None  # break the cycle

    @unseen
    def add_state(self, tensor: torch.Tensor) -> None:
        """Note a parameter or buffer."""
        known = self._parameters.get(id(tensor))
        if known is not None and known() is tensor:
            return
        self._storages.state(tensor, Kind.STATE)
        if tensor.requires_grad and tensor.is_leaf:  # torch warns of gradients of others
            self._parameters[id(tensor)] = weakref.ref(tensor)
            if tensor.grad is not None:
                self._storages.state(tensor.grad, Kind.GRADIENT)

    @property
    def is_stepping(self) -> bool:
        """Whether this thread's operators belong to an optimizer step."""
        # A closure recomputes the loss, with gradients enabled; the step itself runs in no_grad.
        is_inside = bool(self._tasks) and graph_task() == self._tasks[-1]
        return is_inside and not torch.is_grad_enabled()

    def phase(self) -> Phase:
        """Return the phase of the operator that just ran on this thread."""
        if self.is_stepping:
            return Phase.OPTIMIZER
        task = graph_task()
        if task != NO_TASK:
            self._was_backward = True
            return Phase.BACKWARD
        if self._was_backward:  # the first operator after backward
            self._was_backward = False
            self.note_states()
        return Phase.FORWARD

    @unseen
    def note_states(self) -> None:
        """Look for new gradients and optimizer states."""
        for reference in self._parameters.values():
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self._storages.state(parameter.grad, Kind.GRADIENT)
        for optimizer in self._known:
            for tensor in _states(optimizer):
                self._storages.state(tensor, Kind.OPTIMIZER_STATE)

    def _is_here(self) -> bool:
        recorder = self._notes  # read once: another thread may call `stop`
        return recorder is not None and recorder.is_here()

    def _add_states(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.add_state(parameter)
        for tensor in _states(optimizer):
            self._storages.state(tensor, Kind.OPTIMIZER_STATE)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step begins, if this thread is recorded."""
        if not self._is_here():
            return
        with self._lock:
            if not any(each is optimizer for each in self._known):
                self._known.append(optimizer)
                self._add_states(optimizer)
            self.note_states()
            self._tasks.append(graph_task())

    def after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Note that a step has ended."""
        if not self._is_here():
            return
        with self._lock:
            if self._tasks:
                self._tasks.pop()
            self.note_states()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (value for value in values if isinstance(value, torch.Tensor))


# ---- training state ------------------------------------------------------------------------------
#
# What training steps change: a copy of it on the host, and its restoration.
#
# Values are restored into the tensors that hold them, so that all references stay valid. Copies lie
# in Python's memory, which no pool counts.


class TrainingState:
    """The state of a model, its optimizers and the random generators at one moment.

    Covered: parameters and their gradients, buffers, states and options of the optimizers, modes of
    the modules (training or evaluation), and the global generators of torch (all devices), Python
    and numpy. Restoring is bitwise exact. Make and restore it on the thread that trains, between
    two steps; no lock is held.
    """

    def __init__(
        self, model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Copy the present state."""
        self._undo: list[Callable[[], object]] = []
        with torch.no_grad():
            for parameter in _parameters(model, optimizers):
                self._keep_tensor(parameter)
                self._keep_gradient(parameter)
            if model is not None:
                for module in model.modules():
                    self._keep_module(module)
            for optimizer in optimizers:
                self._keep_optimizer(optimizer)
            self._keep_generators()

    def restore(self) -> None:
        """Restore the state; an error of one part keeps no other from it. A second call repeats it.

        Parts that need no memory come first: the device may have none left.
        """
        errors: list[BaseException] = []
        with torch.no_grad():
            for undo in reversed(self._undo):
                try:
                    undo()
                except BaseException as error:  # noqa: BLE001 - raised below
                    errors.append(error)
        raise_first(errors)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        kept, requires_grad = _Kept(tensor), tensor.requires_grad

        def restore() -> None:
            kept.fill(tensor)
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)

        self._undo.append(restore)

    def _keep_gradient(self, parameter: torch.Tensor) -> None:
        kept = None if parameter.grad is None else _Kept(parameter.grad)

        def restore() -> None:
            # The former tensor is not held meanwhile: its memory would count as the step's.
            parameter.grad = None if kept is None else kept.into(parameter.grad)

        self._undo.append(restore)

    def _keep_module(self, module: torch.nn.Module) -> None:
        is_training = module.training
        kept = {name: _Kept(each) for name, each in module.named_buffers(recurse=False)}
        names = set(buffers_of(module))  # with those that are None

        def restore() -> None:
            module.training = is_training
            for name in [name for name in buffers_of(module) if name not in kept]:
                if name in names:
                    setattr(module, name, None)
                else:
                    delattr(module, name)
            for name, value in kept.items():
                if not value.fill(getattr(module, name, None)):
                    setattr(module, name, value.into(None))

        self._undo.append(restore)

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state = {key: _keep(value) for key, value in optimizer.state.items()}
        groups = [
            {name: _keep(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

        def restore() -> None:
            for key in [key for key in optimizer.state if key not in state]:
                del optimizer.state[key]
            for key, value in state.items():
                optimizer.state[key] = _put_back(value, optimizer.state.get(key))
            del optimizer.param_groups[len(groups) :]
            for group, options in zip(optimizer.param_groups, groups, strict=False):
                for name in [name for name in group if name not in {"params", *options}]:
                    del group[name]
                for name, value in options.items():
                    group[name] = _put_back(value, group.get(name))

        self._undo.append(restore)

    def _keep_generators(self) -> None:
        on_host = torch.get_rng_state()
        self._undo.append(lambda: torch.set_rng_state(on_host))
        accelerator = initialized_accelerator()
        if accelerator is not None:
            module: Any = getattr(torch, accelerator.type)
            on_devices = module.get_rng_state_all()
            self._undo.append(lambda: module.set_rng_state_all(on_devices))
        of_python = random.getstate()
        self._undo.append(lambda: random.setstate(of_python))
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is not None:
            of_numpy = numpy_random.get_state()
            self._undo.append(lambda: numpy_random.set_state(of_numpy))


class _Kept:
    """The value of a tensor, on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._requires_grad = tensor.device, tensor.requires_grad
        self._value = _copy(tensor)
        self._strides = tensor.stride() if is_plain(tensor) else None

    def fill(self, tensor: object) -> bool:
        """Write the value into a tensor; return False if the tensor is of another form."""
        value = self._value
        if not isinstance(tensor, torch.Tensor) or tensor.device != self._device:
            return False
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            return False
        if _has_value(tensor):
            _write(tensor.detach(), value)
        return True

    def into(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor with the value; a new one if it is of another form."""
        if tensor is not None and self.fill(tensor):
            return tensor
        if self._strides is None:
            return self._value.to(self._device).requires_grad_(self._requires_grad)
        made = torch.empty_strided(
            self._value.shape, self._strides, dtype=self._value.dtype, device=self._device
        )
        self.fill(made)
        return made.requires_grad_(self._requires_grad)


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value into a tensor, whose elements may be one in memory, as after `expand`."""
    strides = target.stride() if is_plain(target) else ()
    for dimension, stride in enumerate(strides):
        if stride == 0 and target.shape[dimension] > 1:
            target, value = target.narrow(dimension, 0, 1), value.narrow(dimension, 0, 1)
    target.copy_(value)


def _has_value(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host, outside of any pool if it is a plain one."""
    source = tensor.detach()
    if not _has_value(source):
        return source.clone()
    if not is_plain(source):
        return source.to("cpu", copy=True)
    nbytes = source.numel() * source.element_size()
    if not nbytes:
        return torch.empty_like(source)
    memory = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)
    return memory.view(source.dtype).view(source.shape).copy_(source)


def _keep(value: object) -> object:
    """Return a copy of an optimizer's value: its tensors and containers are copied."""
    if isinstance(value, torch.Tensor):
        return _Kept(value)
    if isinstance(value, dict):
        return {key: _keep(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in {list, tuple}:
        return type(value)([_keep(each) for each in value])
    return value


def _put_back(kept: object, present: object) -> object:
    """Return the value that was kept, in the tensors that are present where they fit."""
    if isinstance(kept, _Kept):
        return kept.into(present if isinstance(present, torch.Tensor) else None)
    if isinstance(kept, dict):
        return _put_back_dict(kept, present)
    if isinstance(kept, (list, tuple)) and type(kept) in {list, tuple}:
        others: list[object] = list(present) if isinstance(present, type(kept)) else []
        others += [None] * (len(kept) - len(others))
        return type(kept)([_put_back(*pair) for pair in zip(kept, others, strict=False)])
    return kept


def _put_back_dict(kept: dict[object, object], present: object) -> object:
    now = present if isinstance(present, dict) else {}
    made = {key: _put_back(each, now.get(key)) for key, each in kept.items()}
    now.clear()
    now.update(made)
    return now


def _parameters(
    model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """Yield each parameter of the model and the optimizers once."""
    seen: set[int] = set()
    listed = [] if model is None else list(model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            listed += group["params"]
    for parameter in listed:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter
