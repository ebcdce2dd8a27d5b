"""Graphs that were recorded without our hooks: before a session, or outside of its thread.

Under memory pressure their saved tensors are given hooks after the fact, and can be moved like any
others. Autograd allows that once for each saved tensor, and not for those that have hooks already,
were freed, or were changed in place; all of these stay as they are. So do tensors of subclasses and
of function transforms: torch would hand the hooks a plain tensor without memory in their place, or
fail half-way, which leaves hooks without anything saved.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swapkit._native.lib import defer_interruption, note_failure
from swapkit._runtime.torch_compat.internals import current_node
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.thread_stacks import (
    backward_runs_elsewhere,
    others_wait,
    take_while,
)
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.errors import SwapkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from swapkit._runtime.shim.library import Shim
    from swapkit._runtime.shim.types import MakeSavedTensor, SavedTensor

PREFIX = "_raw_saved_"
TENSORS = "_raw_saved_tensors"  # of functions written in Python, which show them by another name


class _Saved(Protocol):
    """A saved tensor in a graph: `torch._C._autograd.SavedTensor`."""

    unpack_hook: Callable[..., Any] | None

    def register_hooks(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        """Let hooks stand for the tensor from now on."""


def adopt_graphs(
    pack: Callable[[torch.Tensor], SavedTensor],
    unpack: Callable[[SavedTensor], torch.Tensor],
    shim: Shim,
) -> int:
    """Give hooks to every saved tensor of every graph that Python holds and that has none.

    Args:
        pack: the hook that saves one,
        unpack: and that gives it back.
        shim: knows which tensors have memory.

    Returns:
        How many saved tensors got them. 0 while another thread runs or is in a backward pass:
        there is no telling whose graphs these are (`torch_compat/thread_stacks.py`).
    """
    if not _is_alone():
        return 0
    careful = _careful(pack, shim.saved_tensor)
    adopted = 0
    with hidden():
        for node in take_while(_is_alone, _walk(_roots())):
            for name in _saved_names(node.__class__):
                for saved in _look(node, name, shim.has_plain_memory):
                    adopted += _adopt(saved, careful, unpack)
    return adopted


def _careful(
    pack: Callable[[torch.Tensor], SavedTensor], saved_tensor: MakeSavedTensor
) -> Callable[[torch.Tensor], SavedTensor]:
    """Return a pack hook for saved tensors that exist already; if it failed they would be lost."""

    @untraced
    def careful(tensor: torch.Tensor) -> SavedTensor:
        kept = saved_tensor(tensor, itself=True)
        try:
            try:
                return pack(tensor)
            except (RuntimeError, MemoryError, SwapkitError) as error:  # torch's or ours
                note_failure("taking in a graph", error)
        except BaseException as error:  # noqa: BLE001 - a signal handler's; raised where it can be
            defer_interruption(error)
        return kept

    return careful


def _look(
    node: torch.autograd.graph.Node, name: str, has_plain_memory: Callable[[object, int], bool]
) -> Sequence[_Saved]:
    """Return what a node saved under a name and nobody has changed, without hooks so far.

    Not small ones: numbers that torch wrapped in tensors are among them, and an alias of one would
    not be one.
    """
    try:
        saved = getattr(node, name)
        each = saved if isinstance(saved, tuple) else (saved,)
        if all(one is None or one.unpack_hook is None for one in each):
            # Autograd compares versions here, and no more once there are hooks.
            found = getattr(
                node, "saved_tensors" if name == TENSORS else name.replace("_raw", "", 1)
            )
            values = found if isinstance(found, tuple) else (found,)
            return [
                one
                for one, value in zip(each, values, strict=True)
                if one is not None and has_plain_memory(value, MIN_SWAP_BYTES)
            ]
    except RuntimeError:  # freed: its backward has run; or changed in place
        pass
    return ()


def _adopt(saved: _Saved, pack: Callable[..., Any], unpack: Callable[..., Any]) -> bool:
    try:
        saved.register_hooks(pack, unpack)
    except RuntimeError:  # it is nobody's any more
        return False
    return True


def _is_alone() -> bool:
    return others_wait() and not backward_runs_elsewhere()


def _roots() -> Iterator[Any]:
    """Yield the graph nodes that tensors hold, and the one that runs."""
    node = current_node()
    if node is not None:
        yield node
    try:
        objects = gc.get_objects()
    except MemoryError:  # so little is left that nothing can be looked for
        return
    # Not isinstance(): asking a lazy proxy for its class would run its code.
    tensors = [item for item in objects if issubclass(type(item), torch.Tensor)]
    for tensor in take_while(_is_alone, tensors):
        root = _node_of(tensor)
        if root is not None:
            yield root


def _node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    try:
        return tensor.grad_fn
    except RuntimeError:  # of a function transform's wrapper that is dead
        return None


def _walk(roots: Iterator[Any]) -> Iterator[Any]:
    """Yield every node that is reachable, once."""
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
    """Return the names of what nodes of a kind save: every operator has a kind of its own.

    None of a function in Python that shows what it has saved only once.
    """
    function = getattr(kind, "_forward_cls", None)
    if getattr(function, "clear_saved_tensors_on_access", False):
        return ()
    return tuple(name for name in dir(kind) if name.startswith(PREFIX))
