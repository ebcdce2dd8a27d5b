"""Threads that rest from hearing of modules: inside of a forward that goes as planned.

Torch takes a longer way through every call of a module, some 10 us, as long as there is a global
hook. Taking ours off and putting them back would break other threads, which iterate over torch's
tables. So the tables are ones of our own, which always hold our hooks, and are false where torch
asks whether there are any while the thread rests. They are put in place by the first thread that
rests, and taken away with the hooks.

A thread rests from within a call of a module that was told of until that call ends; or until
anything changes about who hears of modules, on whichever thread. Where that call was interrupted
(Ctrl-C), of which nobody hears, the thread goes on resting until that module is called again, the
step leaves its plan, or it ends.

What the compiler has seen stays as it is: it compares torch's tables before it runs what it has
compiled. After it has compiled anything nobody rests.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as module_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

# Torch asks here whether there are hooks; it calls those of a module in a function inside of it.
CALL = torch.nn.Module._call_impl.__code__  # noqa: SLF001
_AROUND = torch.nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - calls it, with few locals
_NAMES = ("_global_forward_pre_hooks", "_global_forward_hooks")
# Torch looks into this one only if the other was false.
_LAST = max(_NAMES, key=CALL.co_names.index)


# Torch's own tables while ours are in place, with the number of our hook in it.
_former: dict[str, tuple[OrderedDict[int, Callable[..., Any]], int]] = {}


class Rest:
    """One rest of a thread."""

    __slots__ = ("period", "root")

    def __init__(self, period: int, root: int = 0) -> None:
        self.period = period
        self.root = root  # `id` of the module in whose call it is

    def end(self) -> None:
        """End it, if it has not ended. Any thread."""
        self.period = 0


class _Thread(threading.local):
    """The latest rest of this thread."""

    rest = Rest(0)


_thread = _Thread()
_periods = itertools.count(1)
_period = next(_periods)  # another one with each change of who hears of modules


class _Table(OrderedDict[int, "Callable[..., Any]"]):
    """Torch's table of a kind of hooks, which holds ours, and those that others add."""

    is_last = False  # set before torch sees the table

    def __bool__(self) -> bool:
        """Return whether torch is to look into it."""
        rest = _thread.rest
        if rest.period != _period or len(self) != 1:
            return len(self) > 0
        frame = sys._getframe(1)  # noqa: SLF001
        if frame.f_code is not CALL:
            return True
        if self.is_last:
            return False
        # A call of that module inside of its own, or after one that was interrupted unseen, is told
        # of. Locals are copied to be read, and those that are not set yet cost most.
        caller = frame.f_back
        if caller is not None and caller.f_code is _AROUND:
            frame = caller
        return id(frame.f_locals["self"]) == rest.root


def is_resting() -> bool:
    """Return whether this thread rests."""
    return _thread.rest.period == _period


def prepare(root: int) -> Rest:
    """Return a rest for `begin`, void if somebody comes to hear of modules meanwhile.

    `root`: the `id` of the module in whose call it is.
    """
    return Rest(_period, root)


def begin(rest: Rest) -> None:
    """Let this thread rest. From within a listener of `global_hooks.calls`, on its own thread."""
    _thread.rest = rest


def end() -> None:
    """Let this thread rest no more."""
    _thread.rest.end()


def interrupt() -> None:
    """Let no thread rest that does now. Any thread."""
    global _period  # noqa: PLW0603
    _period = next(_periods)


def install(handles: Sequence[RemovableHandle]) -> bool:
    """Put the tables in place; return whether threads may rest.

    Args:
        handles: of our hooks, in the order of the tables.
    """
    if _has_compiled() or len(handles) != len(_NAMES):
        return False
    tables = [getattr(module_hooks, name) for name in _NAMES]
    if any(list(table) != [handle.id] for table, handle in zip(tables, handles, strict=True)):
        return False  # hooks of others: torch takes the longer way for them
    for name, table, handle in zip(_NAMES, tables, handles, strict=True):
        if type(table) is not _Table:
            ours = _Table(table)
            ours.is_last = name == _LAST
            # At once, and torch's stays as it is: a thread may be iterating over it.
            setattr(module_hooks, name, ours)
            handle.hooks_dict_ref = weakref.ref(ours)
            _former[name] = table, handle.id
    return True


def uninstall() -> None:
    """Give torch its tables again, unless others have hooks in ours. No thread looks into them."""
    for name, (table, own) in list(_former.items()):
        if not getattr(module_hooks, name):
            del _former[name]
            table.pop(own, None)
            setattr(module_hooks, name, table)


def _has_compiled() -> bool:
    """Return whether the compiler has met any function."""
    loaded = sys.modules.get("torch._dynamo.convert_frame")
    return loaded is not None and loaded.FRAME_COUNTER > 0
