"""The base of all our dispatch modes: coexistence with the compiler, and safe leaving.

Torch takes other formulas, with other bits, where its stack has a mode. So ours are *late*: torch's
stack has them only while an operator passes them (`shim/cpp/running/late_modes.cpp`). Modes inside
of a foreign one are not, as torch takes the other formulas there anyway. Nor are modes in programs
that compile: code is compiled for a set of keys. Nor are those that see tensors without bytes: fake
tensors dispatch before late modes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.internals import (
    KEY_GUARD,
    NO_TASK,
    RESTORE_KEYS,
    C,
    DispatchKey,
    ExcludeKey,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    count_modes,
    graph_task,
    has_python_key,
    higher_order_operators,
    keys_to_fall_through,
    mode_at,
    pop_mode,
    push_mode,
)
from swapkit._runtime.torch_compat.isolation import (
    is_in_compiled_call,
    make_fork_lock,
    may_compile,
    untraced,
)

if TYPE_CHECKING:
    from typing import Self

    import torch

# The shim's: read and replace this thread's late modes, outermost first. Without the shim there are
# none: only steps on `meta` are recorded then, which have no bits.
_get_late: Callable[[], tuple[DispatchMode, ...]] = tuple
_set_late: Callable[[tuple[DispatchMode, ...]], int] | None = None


def set_late_modes_of(
    get: Callable[[], tuple[DispatchMode, ...]], replace: Callable[[tuple[DispatchMode, ...]], int]
) -> None:
    """Set the functions that read and replace a thread's late modes."""
    global _get_late, _set_late
    _get_late, _set_late = get, replace


def mode_stack() -> list[TorchDispatchMode]:
    """Return this thread's dispatch modes, outermost first."""
    return [*_get_late(), *_stack()]


def _stack() -> list[TorchDispatchMode]:
    """Return those of torch's stack."""
    return [mode_at(index) for index in range(count_modes())]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base class of all our dispatch modes; compiled blocks stay compiled under these modes.

    Subclasses decorate `__torch_dispatch__` with `isolation.untraced`.
    """

    supports_higher_order_operators = True
    sees_bytes = True  # False: fake tensors

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: `untraced` already excludes the mode, without a wrapper for each call."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: else torch silently runs compiled code as single operators."""
        return True

    def __enter__(self) -> Self:
        if not self.sees_bytes or count_modes() or _set_late is None or may_compile():
            super().__enter__()  # type: ignore[no-untyped-call]
            return self
        _show_higher_order_operators(DispatchKey(_set_late((*_get_late(), self))))
        return self

    def leave(self) -> None:
        """Leave this thread's modes, even if some that were entered later are still there.

        Call this only on the thread that entered the mode. No effect if the mode is not there, or
        if an operator passes it.
        """
        late = _get_late()
        if _set_late is not None and any(mode is self for mode in late):
            _set_late(tuple(mode for mode in late if mode is not self))
            return
        stack = _stack()
        for at, mode in enumerate(stack):
            if mode is self:
                with _aside(stack[at + 1 :]):
                    self._restore_flags(is_inside=at > 0)
                    TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def _restore_flags(self, *, is_inside: bool) -> None:
        """Restore the flags that torch pops, if an interruption ended an exit before the stack pop.

        Torch pops these flags first; each says whether there was an outer mode (`is_inside`).
        """
        for flags in (
            self.old_dispatch_mode_flags,
            self.old_non_infra_dispatch_mode_flags,
            self.old_without_ignore_compile_internals_dispatch_mode_flags,
        ):
            if not flags:
                flags.append(is_inside)


@contextlib.contextmanager
def _aside(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Take the innermost modes off torch's stack, and put them back.

    With torch's own `__exit__` and `__enter__`, which keep torch's flags in order: side effects of
    subclasses are not repeated. Modes that were put there without `__enter__` have no flags.
    """
    with contextlib.ExitStack() as stack:
        for mode in reversed(modes):
            if getattr(mode, "old_dispatch_mode_flags", None):
                TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
                stack.callback(TorchDispatchMode.__enter__, mode)
            else:
                pop_mode(None)
                stack.callback(push_mode, mode)
        yield


_lock = make_fork_lock()
_shown: set[str] = set()  # names of operators of `torch.ops.higher_order`


def _show_higher_order_operators(key: DispatchKey) -> None:
    """Let operators of `torch.ops.higher_order` run in late modes: fallbacks do not serve them.

    Those that are defined while a mode is there run without it; the operators inside do not.
    """
    if len(higher_order_operators) == len(_shown):
        return
    with _lock:
        if key not in keys_to_fall_through:
            keys_to_fall_through.append(key)
        for name, each in list(higher_order_operators.items()):
            if name not in _shown:
                each.py_impl(key)(partial(_run_higher_order, each, key))
                _shown.add(name)


def _run_higher_order(
    operator: HigherOrderOperator,
    key: DispatchKey,
    *args: Any,
    **kwargs: Any,
) -> Any:  # noqa: ANN401
    """Run an operator of `torch.ops.higher_order` in the innermost late mode, if there is one."""
    late = _get_late()
    if _set_late is None or not late:
        with ExcludeKey(key, True):  # noqa: FBT003 - torch's
            return operator(*args, **kwargs)
    *outer, mode = late
    _set_late(tuple(outer))
    try:
        return mode.__torch_dispatch__(operator, (), args, kwargs)  # type: ignore[no-untyped-call]
    finally:
        _set_late((*_get_late(), mode))


def renew() -> None:
    """Show operators to this thread's modes again: a guard of all keys may have ended that."""
    late = _get_late()
    if late and _set_late is not None:
        _set_late(late)
    elif count_modes() and not has_python_key():
        push_mode(pop_mode(None))


class _RenewingGuard:
    """Torch's guard of all dispatch keys; behind it, modes that were entered within go on."""

    @untraced
    def __init__(self, make: Callable[..., AbstractContextManager[None]], *keys: object) -> None:
        self._guard = make(*keys)

    @untraced
    def __enter__(self) -> None:
        self._guard.__enter__()

    @untraced
    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)  # type: ignore[arg-type]
        renew()


@cache  # once per process
def renew_behind_compiled_calls() -> None:
    """Let modes see what runs behind a compiled call that they were entered in.

    Dynamo restores the keys from before the call. Of a model that was compiled by `Module.compile`,
    the call that a step begins with is such a call, and its loss follows.
    """
    if hasattr(C, RESTORE_KEYS):
        setattr(C, RESTORE_KEYS, partial(_restore_and_renew, getattr(C, RESTORE_KEYS)))
    elif hasattr(C, KEY_GUARD):
        setattr(C, KEY_GUARD, partial(_RenewingGuard, getattr(C, KEY_GUARD)))


@untraced
def _restore_and_renew(restore: Callable[[], None]) -> None:
    restore()
    renew()


@contextlib.contextmanager
def entered(modes: Sequence[DispatchMode]) -> Iterator[None]:
    """Enter modes, the last one innermost. Leave all of them, even if a signal handler raises."""
    try:
        for mode in modes:
            mode.__enter__()
        yield
    finally:
        leave_all(modes)


def leave_all(modes: Sequence[DispatchMode]) -> None:
    """Leave modes of this thread, the last one first, even if leaving one of them raises."""
    if modes:
        try:
            modes[-1].leave()
        finally:
            leave_all(modes[:-1])


class SeeingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs operators unchanged, and notes them.

    A mode that is left in the middle of a backward pass (optimizers in hooks end a step there), of
    a compiled call (of the optimizer's step), or on another thread becomes inert: at the end of the
    pass, the engine restores the mode stack of the pass's beginning, and a compiled call restores
    the keys of that stack. The thread that entered the mode removes it later (`drop_left`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._task = graph_task()
        self._left = thread_state.left_modes  # this thread's

    def __enter__(self) -> Self:
        # Outside of foreign modes: they end earlier, and torch's exit takes the innermost mode off.
        # Torch's own kinds, such as that of fake tensors, have places of their own.
        others = [mode for mode in _stack() if getattr(mode, "_mode_key", None) is None]
        with _aside(others):
            return super().__enter__()

    @property
    def sees(self) -> bool:
        """Whether the mode notes operators now."""
        raise NotImplementedError

    def repeat(
        self,
        function: OpOverload[..., Any] | HigherOrderOperator,
        operands: list[torch.Tensor],
        run: Callable[[], list[torch.Tensor]],
    ) -> None:
        """Note an operator of a region that `run` runs again."""
        raise NotImplementedError

    def leave(self) -> None:
        """Stop seeing operators; leave the mode stack now, or later if that is not possible yet."""
        if self._left is thread_state.left_modes and self._is_where_entered():
            super().leave()  # no effect while the mode itself runs
        else:
            self._left.append(self)

    def drop(self) -> bool:
        """Leave the stack on the thread that entered, if possible now; return whether it was."""
        if not self._is_where_entered():
            return False
        super().leave()
        return True

    def _is_where_entered(self) -> bool:
        """Return whether nothing that began later will restore the thread's modes or keys."""
        if graph_task() != self._task:
            return False
        # Without the key, the compiled call in which the mode was entered has ended, and those that
        # run now began without it. With it, that may have been before the call: wait for its end.
        return not has_python_key() or not is_in_compiled_call()


def drop_left() -> None:
    """Remove from this thread's stack the modes that could not leave it earlier."""
    for mode in list(thread_state.left_modes):
        if mode.drop():
            thread_state.left_modes.remove(mode)


def can_stay() -> bool:
    """Return whether a mode entered here stays until the session's step ends.

    It may not if another mode is on the stack, which may end earlier. Nor if the previous step
    ended in a backward pass, so that this step begins there: the engine then restores the modes.
    """
    drop_left()
    return not mode_stack() and graph_task() == NO_TASK


def seeing_here() -> SeeingMode | None:
    """Return the innermost mode that notes this thread's operators now; None: there is none."""
    stack = reversed(mode_stack())
    seeing = (mode for mode in stack if isinstance(mode, SeeingMode) and mode.sees)
    return next(seeing, None)


class OwnMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that changes no operator; code that looks for foreign modes ignores it."""


def has_foreign_mode(*, may_record: bool = False) -> bool:
    """Return whether a foreign mode may change operators here; in backward it would be missing.

    `may_record`: a `SeeingMode` does not count as foreign.
    """
    ours = (OwnMode, SeeingMode) if may_record else OwnMode
    return not all(isinstance(mode, ours) for mode in mode_stack())
