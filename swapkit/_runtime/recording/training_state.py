"""What training steps change: a copy of it on the host, and its restoration.

Values are restored into the tensors that hold them, so that all references stay valid. Copies lie
in Python's memory, which no pool counts.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.process.undo import raise_first
from swapkit._runtime.torch_compat.accelerators import initialized_accelerator
from swapkit._runtime.torch_compat.internals import FakeTensor, buffers_of
from swapkit._runtime.torch_compat.plain_tensors import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


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
