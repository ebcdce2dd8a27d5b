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

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat.internals import (
    MODULE_CALL,
    MODULE_HOOK_TABLES,
    module_hooks,
)
from swapkit._runtime.torch_compat.isolation import has_compiled

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


def install() -> bool:
    """Install our tables in place of torch's, which hold only our hooks.

    Returns:
        Whether threads may bypass the hooks.
    """
    if _shim is None or has_compiled():
        return False
    torchs = {
        name: table
        for name in MODULE_HOOK_TABLES
        if not isinstance(table := getattr(module_hooks, name), (_shim.FirstTable, _shim.LastTable))
    }
    if torchs and may_register():
        return False
    for name, table in torchs.items():
        # Swap atomically and keep torch's table unchanged: a thread may iterate over it.
        ours = _shim.LastTable(table) if name == _LAST else _shim.FirstTable(table)
        setattr(module_hooks, name, ours)
    return True


# Torch's functions that register global hooks. Each makes a handle for the table, and then adds the
# hook: if the table is replaced in between, the handle cannot remove the hook.
_REGISTERING = frozenset(
    function.__code__
    for function in (
        module_hooks.register_module_forward_pre_hook,
        module_hooks.register_module_forward_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    )
)


def may_register() -> bool:
    """Return whether another thread may be registering a global hook, so that no table may go."""
    return any(code in _REGISTERING for stack in threads.stacks() for code, _ in stack)
