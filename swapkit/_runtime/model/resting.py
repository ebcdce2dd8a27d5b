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

import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from swapkit._runtime.torch_compat.internals import (
    MODULE_CALL,
    MODULE_HOOK_TABLES,
    has_compiled,
    module_hooks,
)

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

# Torch looks into this one only if the other was false.
_LAST = max(MODULE_HOOK_TABLES, key=MODULE_CALL.co_names.index)
Table: TypeAlias = "OrderedDict[int, Callable[..., Any]]"

# Torch's own tables while ours are in place, with the number of our hook in it.
_former: dict[str, tuple[Table, int]] = {}


class Rest(Protocol):
    """One rest of a thread."""

    def end(self) -> None:
        """End it, if it has not ended. Any thread."""


class _Shim(Protocol):
    """What is asked so often that it is C++ (`shim/cpp/running/resting.hpp`)."""

    # Tables of a kind of hooks: false for a thread that rests.
    FirstTable: type[Table]
    LastTable: type[Table]

    def prepare_rest(self, root: int, /) -> Rest:
        """As `prepare`."""

    def begin_rest(self, rest: Rest, /) -> None:
        """As `begin`."""

    def end_rest(self) -> None:
        """As `end`."""

    def interrupt_rests(self) -> None:
        """As `interrupt`."""

    def is_resting(self) -> bool:
        """As the function here."""


_shim: _Shim | None = None  # None: nobody rests


def connect(shim: Any) -> None:  # noqa: ANN401 - a module of C++
    """Let threads rest, with the help of the shim."""
    global _shim  # noqa: PLW0603 - torch's tables are the process's
    _shim = shim


def is_resting() -> bool:
    """Return whether this thread rests."""
    return _shim is not None and _shim.is_resting()


def prepare(root: int) -> Rest | None:
    """Return a rest for `begin`, void if somebody comes to hear of modules meanwhile.

    `root`: the `id` of the module in whose call it is. None: nobody can rest.
    """
    return None if _shim is None else _shim.prepare_rest(root)


def begin(rest: Rest) -> None:
    """Let this thread rest. From within a listener of `global_hooks.calls`, on its own thread."""
    if _shim is not None:
        _shim.begin_rest(rest)


def end() -> None:
    """Let this thread rest no more."""
    if _shim is not None:
        _shim.end_rest()


def interrupt() -> None:
    """Let no thread rest that does now. Any thread."""
    if _shim is not None:
        _shim.interrupt_rests()


def install(handles: Sequence[RemovableHandle]) -> bool:
    """Put the tables in place; return whether threads may rest.

    Args:
        handles: of our hooks, in the order of the tables.
    """
    if _shim is None or has_compiled() or len(handles) != len(MODULE_HOOK_TABLES):
        return False
    tables = [getattr(module_hooks, name) for name in MODULE_HOOK_TABLES]
    if any(list(table) != [handle.id] for table, handle in zip(tables, handles, strict=True)):
        return False  # hooks of others: torch takes the longer way for them
    for name, table, handle in zip(MODULE_HOOK_TABLES, tables, handles, strict=True):
        if not isinstance(table, (_shim.FirstTable, _shim.LastTable)):
            ours = _shim.LastTable(table) if name == _LAST else _shim.FirstTable(table)
            _former[name] = table, handle.id  # first: an interruption may come between two lines
            handle.hooks_dict_ref = weakref.ref(ours)
            # At once, and torch's stays as it is: a thread may be iterating over it.
            setattr(module_hooks, name, ours)
    return True


def uninstall() -> None:
    """Give torch its tables again, unless others have hooks in ours. No thread looks into them."""
    for name, (table, own) in list(_former.items()):
        current = getattr(module_hooks, name)
        if current is table or not current:
            table.pop(own, None)
            setattr(module_hooks, name, table)
            del _former[name]  # last: what an interruption leaves is done the next time
