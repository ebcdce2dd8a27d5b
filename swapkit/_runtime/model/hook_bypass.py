"""Threads that bypass our module hooks inside a forward that follows its plan.

With any global hook, torch takes a slow path through every module call, which costs about 10 us.
Removing and re-adding our hooks would break other threads that iterate over torch's hook tables. So
we replace the tables with our own. They always hold our hooks, but are false when torch tests them
on a thread that *bypasses* them. The first such thread installs the tables; the removal of the
hooks replaces them.

A bypass starts inside a module call that the listeners know of. It lasts until that call
ends, or until the set of listeners or their needs change on any thread. An interruption (Ctrl-C) of
that call triggers no hook. The bypass then lasts until that module is called again, the step leaves
its plan, or the step ends.

The compiler checks torch's tables before it runs compiled code, so compiled code must always see
the same tables. After anything was compiled, no thread bypasses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from swapkit._runtime.torch_compat.internals import (
    MODULE_CALL,
    MODULE_HOOK_TABLES,
    has_compiled,
    module_hooks,
)

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Mapping

# Torch tests this table only if the other one was false.
_LAST = max(MODULE_HOOK_TABLES, key=MODULE_CALL.co_names.index)
Table: TypeAlias = "OrderedDict[int, Callable[..., Any]]"


class Bypass(Protocol):
    """One period in which a thread bypasses the hooks."""

    def end(self) -> None:
        """End the bypass, unless it has ended. Safe to call from any thread."""


class _Shim(Protocol):
    """Functions called so often that they are C++ (`shim/cpp/running/hook_bypass.hpp`)."""

    # Tables of one kind of hooks; false on a thread that bypasses them.
    FirstTable: type[Table]
    LastTable: type[Table]

    def prepare_bypass(self, root: int, /) -> Bypass:
        """See `prepare`."""

    def begin_bypass(self, bypass: Bypass, /) -> None:
        """See `begin`."""

    def end_bypass(self) -> None:
        """See `end`."""

    def interrupt_bypasses(self) -> None:
        """See `interrupt`."""

    def is_bypassing(self) -> bool:
        """See `is_active`."""


_shim: _Shim | None = None  # None: no thread bypasses


def connect(shim: Any) -> None:  # noqa: ANN401 - a module of C++
    """Use the shim to let threads bypass the hooks."""
    global _shim  # noqa: PLW0603 - torch's tables are the process's
    _shim = shim


def is_active() -> bool:
    """Return whether this thread bypasses the hooks."""
    return _shim is not None and _shim.is_bypassing()


def prepare(root: int) -> Bypass | None:
    """Return a bypass for `begin`, void if `interrupt` is called meanwhile. None: no shim.

    `root`: the `id` of the module whose call the bypass is for.
    """
    return None if _shim is None else _shim.prepare_bypass(root)


def begin(bypass: Bypass) -> None:
    """Let this thread bypass the hooks. Called by a listener of `global_hooks.calls` there."""
    if _shim is not None:
        _shim.begin_bypass(bypass)


def end() -> None:
    """End the bypass of this thread."""
    if _shim is not None:
        _shim.end_bypass()


def interrupt() -> None:
    """End the bypasses of all threads. Safe to call from any thread."""
    if _shim is not None:
        _shim.interrupt_bypasses()


def install(hooks: Mapping[str, Callable[..., Any]]) -> bool:
    """Install our tables; return whether threads may bypass the hooks.

    Args:
        hooks: our hooks, by the names of torch's tables.
    """
    if _shim is None or has_compiled():
        return False
    tables = {name: getattr(module_hooks, name) for name in hooks}
    if any(list(table.values()) != [hooks[name]] for name, table in tables.items()):
        return False  # other hooks exist: torch takes the slow path for them anyway
    for name, table in tables.items():
        if not isinstance(table, (_shim.FirstTable, _shim.LastTable)):
            # Swap atomically and keep torch's table unchanged: a thread may iterate over it.
            ours = _shim.LastTable(table) if name == _LAST else _shim.FirstTable(table)
            setattr(module_hooks, name, ours)
    return True
