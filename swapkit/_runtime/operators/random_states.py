"""Random numbers that come again: for operators that are computed again.

Generators of Python, of numpy and of torch are the whole process's. While an operator is repeated
they are wound back, then set as they were before the repetition: what other threads draw in that
moment is what came in forward, and comes again after it. So it is done only for operators in whose
run a generator moved, if only because another thread drew from it then.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from swapkit._runtime.operators.names import is_random
from swapkit._runtime.torch_compat.internals import is_key_excluded, set_key_excluded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swapkit._runtime.operators.names import Operator

# How the state of a generator is read and set.
_Access: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object]]"

_NO_GENERATOR = ("cpu", "meta")  # of a device of their own
_TORCH = ("aten", "prims")  # operators that say of themselves whether they draw random numbers


def may_be_random(function: Operator) -> bool:
    """Return whether an operator draws random numbers, or does not say that it does not."""
    return is_random(function) or _is_foreign(function)


def _is_foreign(function: Operator) -> bool:
    """Return whether an operator is a user's: it may be a function of Python, and run anything."""
    return function.namespace not in _TORCH


class RandomState:
    """The random numbers that come next on the CPU and on an operator's device.

    For a user's operator also those of Python's and numpy's global generators.
    """

    def __init__(self, function: Operator, arguments: Sequence[object]) -> None:
        self._is_foreign = _is_foreign(function)
        self._cpu = torch.get_rng_state()
        accesses = _global_generators() if self._is_foreign else []
        self._others = [(access, access[0]()) for access in accesses]
        devices = [getattr(each, "device", each) for each in arguments]
        self._device = next(
            (
                each
                for each in devices
                if isinstance(each, torch.device) and each.type not in _NO_GENERATOR
            ),
            None,
        )
        if self._device is not None:
            module = getattr(torch, self._device.type)
            self._on_device: torch.Tensor = module.get_rng_state(self._device)

    def has_moved(self) -> bool:
        """Return whether the operator, which has run now, may have drawn any; keep what is needed.

        Operators of torch say so of themselves. Users' may be compared: the others' states are kept
        only where they moved.
        """
        if not self._is_foreign:
            return True
        self._others = [
            (access, state) for access, state in self._others if not _is_same(access[0](), state)
        ]
        return bool(self._others) or self._has_torch_moved()

    def _has_torch_moved(self) -> bool:
        if not torch.equal(torch.get_rng_state(), self._cpu):
            return True
        device = self._device
        if device is None:
            return False
        now = getattr(torch, device.type).get_rng_state(device)
        return not torch.equal(now, self._on_device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let the same numbers come again, and afterwards those that would have come."""
        device = self._device
        devices = [] if device is None else [device]
        with (
            _without_vmap(),
            torch.random.fork_rng(devices, device_type=device.type if device else "cuda"),
        ):
            torch.set_rng_state(self._cpu)
            if device is not None:
                getattr(torch, device.type).set_rng_state(self._on_device, device)
            with _others_again(self._others):
                yield


def _global_generators() -> list[_Access]:
    found: list[_Access] = [(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        # The other form is only of numpy's former kind of generator, which may be another one.
        found.append((functools.partial(numpy.get_state, legacy=False), numpy.set_state))
    return found


def _is_same(one: Any, other: Any) -> bool:  # noqa: ANN401 - a state: dictionaries, arrays, numbers
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


@contextlib.contextmanager
def _others_again(others: Sequence[tuple[_Access, Any]]) -> Iterator[None]:
    before = [(set_state, get_state()) for (get_state, set_state), _ in others]
    for (_, set_state), state in others:
        set_state(state)
    try:
        yield
    finally:
        for set_state, state in before:
            set_state(state)


@contextlib.contextmanager
def _without_vmap() -> Iterator[None]:
    """Run random operators where torch computes many gradients at once, and would refuse them."""
    key = "VmapMode"
    was_excluded = is_key_excluded(key)
    set_key_excluded(key, True)  # noqa: FBT003
    try:
        yield
    finally:
        set_key_excluded(key, was_excluded)
