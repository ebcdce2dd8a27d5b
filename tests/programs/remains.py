"""What a program leaves behind besides its results: all that a user could look at afterwards.

Parameters, buffers and their gradients of every module that it made, its leaves, and the state of
the generators. A suite that compared results only would miss statistics that are updated twice.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.modules import module as torch_modules

from tests.support.place import ON_CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Remains:
    """The leaves and modules that a program makes.

    They are held until the program has ended. Those that its graph uses would live as long anyway:
    a graph holds its leaves.
    """

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.modules: dict[int, torch.nn.Module] = {}

    def tensors(self) -> list[torch.Tensor]:
        """Return copies of all that has memory, in the order in which the program made it."""
        held = list(self.leaves)
        for module in self.modules.values():
            held += [each for each in module._parameters.values() if each is not None]
            held += [each for each in module._buffers.values() if each is not None]
        held += [each.grad for each in held if each.is_leaf and each.grad is not None]
        plain = [each for each in held if type(each) in _PLAIN and not each.is_meta]
        states = [torch.get_rng_state()]
        if not ON_CPU:
            states.append(torch.get_device_module().get_rng_state())
        return [each.detach().clone() for each in plain] + states


class _Here(threading.local):
    remains: Remains | None = None


_here = _Here()


watchers: list[Callable[[torch.Tensor], object]] = []  # each is called with every leaf


def note_leaf(leaf: torch.Tensor) -> None:
    """Count a leaf as left behind by the program that runs on this thread."""
    for watch in watchers:
        watch(leaf)
    if _here.remains is not None:
        _here.remains.leaves.append(leaf)


@contextmanager
def noted_remains() -> Iterator[Remains]:
    """Note what the program makes that this thread runs meanwhile."""
    outer, _here.remains = _here.remains, Remains()

    def note(module: torch.nn.Module, _name: str, _tensor: torch.Tensor) -> None:
        # Torch calls this on whatever thread makes a module.
        if _here.remains is not None:
            _here.remains.modules[id(module)] = module

    handles = [
        torch_modules.register_module_parameter_registration_hook(note),
        torch_modules.register_module_buffer_registration_hook(note),
    ]
    try:
        yield _here.remains
    finally:
        for handle in handles:
            handle.remove()
        _here.remains = outer
