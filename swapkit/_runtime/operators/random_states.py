"""Restoring of random states, so that recomputed operators draw the same numbers.

The generators of Python, numpy and torch are global to the process. For a repetition they are reset
to their state in forward, then restored. A thread that draws meanwhile repeats numbers from
forward, and draws them again later. So this is done only for operators during whose run a generator
moved, even if only because another thread drew from it.
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

# Getter and setter of a generator's state.
_Access: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object]]"

_NO_GENERATOR = ("cpu", "meta")  # without a device generator
_TORCH = ("aten", "prims")  # operators with a tag that says whether they draw random numbers


def may_be_random(function: Operator) -> bool:
    """Return whether an operator draws, or may draw, random numbers."""
    return is_random(function) or _is_foreign(function)


def _is_foreign(function: Operator) -> bool:
    """Return whether an operator is not torch's own: it may run any Python code."""
    return function.namespace not in _TORCH


class RandomState:
    """The states of the generators of the CPU and of an operator's device.

    For a user's operator, also the states of Python's and numpy's global generators.
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
        """Return whether the operator, which has run by now, may have drawn random numbers.

        Operators of torch declare this. For a user's operator the states are compared, and of
        Python's and numpy's states only those that moved are kept.
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
        """Apply these states again; restore the current ones at exit."""
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
        # The legacy form supports only MT19937, but the global generator may be of another kind.
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
    """Allow random operators where torch batches gradients: vmap mode refuses them."""
    key = "VmapMode"
    was_excluded = is_key_excluded(key)
    set_key_excluded(key, True)  # noqa: FBT003
    try:
        yield
    finally:
        set_key_excluded(key, was_excluded)
