"""Graphs that were recorded without our hooks: before a session, or on another thread.

Under memory pressure we register hooks on their saved tensors, which can then move like all others.
Autograd allows this once per saved tensor. It refuses saved tensors that already have hooks, were
freed, or were changed in place; we leave all of these alone. We also leave alone tensor subclasses
and tensors of function transforms: torch would pass the hooks a plain tensor without memory, or
fail half-way and leave hooks with nothing saved.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch

from swapkit._native.lib import defer_interruption, note_failure
from swapkit._runtime.shim.library import Shim
from swapkit._runtime.shim.types import MakeSavedTensor, SavedTensor
from swapkit._runtime.torch_compat.internals import current_node
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.thread_stacks import (
    backward_runs_elsewhere,
    others_wait,
    take_while,
)
from swapkit._runtime.torch_compat.wrappers import gathers_gradients, graph_of
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.errors import SwapkitError

PREFIX = "_raw_saved_"
TENSORS = "_raw_saved_tensors"  # of functions written in Python; public name: `saved_tensors`


class _Saved(Protocol):
    """A saved tensor in a graph: `torch._C._autograd.SavedTensor`."""

    unpack_hook: Callable[..., Any] | None

    def register_hooks(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        """Replace the tensor with the result of `pack`; `unpack` returns it from now on."""


def adopt_graphs(
    pack: Callable[[torch.Tensor], SavedTensor],
    unpack: Callable[[SavedTensor], torch.Tensor],
    shim: Shim,
) -> int:
    """Register hooks on every saved tensor without hooks, in all graphs that Python holds.

    Args:
        pack: the hook that saves a tensor.
        unpack: the hook that returns the tensor.
        shim: knows which tensors have memory.

    Returns:
        How many saved tensors got hooks. 0 while another thread runs or is in a backward pass:
        that thread may be using these graphs (`torch_compat/thread_stacks.py`).
    """
    if not _is_alone():
        return 0
    careful = _careful(pack, shim.saved_tensor)
    adopted = 0
    with hidden():
        for node in take_while(_is_alone, _walk(_roots())):
            for name in _saved_names(node.__class__):
                for saved, tensor in _read_saved(node, name, shim.has_plain_memory):
                    adopted += _adopt(saved, tensor, careful, unpack)
    return adopted


def _careful(
    pack: Callable[[torch.Tensor], SavedTensor], saved_tensor: MakeSavedTensor
) -> Callable[[torch.Tensor], SavedTensor]:
    """Return a pack hook that never raises: on an error the saved tensor would be lost."""

    @untraced
    def careful(tensor: torch.Tensor) -> SavedTensor:
        kept = saved_tensor(tensor, itself=True)
        try:
            try:
                return pack(tensor)
            except (RuntimeError, MemoryError, SwapkitError) as error:  # from torch or swapkit
                note_failure("saved-tensor hooks of an existing graph", error)
        except BaseException as error:  # noqa: BLE001 - from a signal handler; raised later
            defer_interruption(error)
        return kept

    return careful


def _read_saved(
    node: torch.autograd.graph.Node, name: str, has_plain_memory: Callable[[object, int], bool]
) -> Sequence[tuple[_Saved, torch.Tensor]]:
    """Return the unchanged saved tensors of a node under a name, if none of them has hooks.

    Skip weights, which autograd would no longer return themselves. Skip small ones: some are
    numbers that torch wrapped in tensors, and an alias of a wrapped number is not a wrapped number.
    """
    try:
        saved = getattr(node, name)
        each = saved if isinstance(saved, tuple) else (saved,)
        if all(one is None or one.unpack_hook is None for one in each):
            # Autograd checks versions on this access; it no longer does once there are hooks.
            found = getattr(
                node, "saved_tensors" if name == TENSORS else name.replace("_raw", "", 1)
            )
            values = found if isinstance(found, tuple) else (found,)
            return [
                (one, value)
                for one, value in zip(each, values, strict=True)
                if one is not None and has_plain_memory(value, MIN_SWAP_BYTES)
                if not _is_weight(value)
            ]
    except RuntimeError:  # freed (its backward has run), or changed in place
        pass
    return ()


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or gathers_gradients(tensor)


def _adopt(
    saved: _Saved, tensor: torch.Tensor, pack: Callable[..., Any], unpack: Callable[..., Any]
) -> bool:
    held = [tensor]  # only until it is packed: the graph keeps the hook

    @untraced
    def adopting(alias: torch.Tensor) -> SavedTensor:
        packed: SavedTensor = pack(alias)
        packed.leaf = held.pop()  # torch passes an alias of a leaf
        return packed

    try:
        saved.register_hooks(adopting, unpack)
    except RuntimeError:  # its node was freed meanwhile
        return False
    return True


def _is_alone() -> bool:
    return others_wait() and not backward_runs_elsewhere()


def _roots() -> Iterator[Any]:
    """Yield the graph node that runs now, and the graph node of every tensor."""
    node = current_node()
    if node is not None:
        yield node
    try:
        # Not isinstance(): reading `__class__` of a lazy proxy would run its code. No local holds
        # all objects: up to Python 3.10 this frame is one of them, and would hold itself.
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    except MemoryError:  # too little host memory is left to search
        return
    for tensor in take_while(_is_alone, tensors):
        root = _node_of(tensor)
        if root is not None:
            yield root


def _node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    try:
        return graph_of(tensor)
    except RuntimeError:  # a dead wrapper of a function transform
        return None


def _walk(roots: Iterator[Any]) -> Iterator[Any]:
    """Yield every reachable node once."""
    seen: set[Any] = set()
    waiting = deque(roots)
    while waiting:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(other for other, _ in node.next_functions if other is not None)


@functools.cache
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    """Return the attribute names of saved tensors for a node class (one class per operator).

    Return none for Python functions that allow only one access to their saved tensors.
    """
    function = getattr(kind, "_forward_cls", None)
    if getattr(function, "clear_saved_tensors_on_access", False):
        return ()
    return tuple(name for name in dir(kind) if name.startswith(PREFIX))
