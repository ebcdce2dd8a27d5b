"""The base of all our dispatch modes: how they live with the compiler, and how they are left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.internals import (
    NO_TASK,
    TorchDispatchMode,
    count_modes,
    graph_task,
    mode_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from swapkit._runtime.torch_compat.internals import HigherOrderOperator, OpOverload


def mode_stack() -> list[TorchDispatchMode]:
    """Return the dispatch modes that are on this thread's stack, outermost first."""
    return [mode_at(index) for index in range(count_modes())]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators. Every dispatch mode of ours is one, so that compiled blocks stay compiled.

    A `__torch_dispatch__` is decorated with `guards.untraced`.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not by a wrapper around each call: `untraced` does that."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled stay so: else torch runs it as single operators, without a word."""
        return True

    def leave(self) -> None:
        """Leave this thread's stack of modes, whichever modes were entered inside and are still on.

        Only on the thread that entered it; without effect where it is not on the stack.
        """
        stack = mode_stack()
        if not any(mode is self for mode in stack):
            return
        inner: list[TorchDispatchMode] = []
        # As torch enters and leaves modes; what theirs do besides is not repeated.
        while stack[-1] is not self:
            inner.append(stack.pop())
            TorchDispatchMode.__exit__(inner[-1], None, None, None)  # type: ignore[no-untyped-call]
        self._restore_flags(is_inside=len(stack) > 1)
        TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(inner):
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]

    def _restore_flags(self, *, is_inside: bool) -> None:
        """Let torch leave this mode once more, of which an interruption has left the stack alone.

        Torch takes back flags first: whether there were modes around, `is_inside` of one.
        """
        for flags in (
            self.old_dispatch_mode_flags,
            self.old_non_infra_dispatch_mode_flags,
            self.old_without_ignore_compile_internals_dispatch_mode_flags,
        ):
            if not flags:
                flags.append(is_inside)


class SeeingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode of ours that has operators run as they are, and notes what they do.

    Where it is left in the middle of a backward pass (a step ends there by optimizers in hooks),
    or on another thread, it goes inert: at the end of the pass the engine puts the stack of modes
    back as it was at its beginning. The thread that entered takes it off later (`drop_left`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._task = graph_task()
        self._left = thread_state.left_modes  # of this thread

    @property
    def sees(self) -> bool:
        """Whether it notes operators now."""
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
        """See no more, and leave this thread's stack of modes, whoever was entered inside."""
        if self._left is thread_state.left_modes and graph_task() == self._task:
            super().leave()  # without effect while it runs
        else:
            self._left.append(self)

    def drop(self) -> bool:
        """Leave the stack for good, on the thread that entered, if that is possible now."""
        if graph_task() != self._task:
            return False
        super().leave()
        return True


def drop_left() -> None:
    """Take those modes off this thread's stack that were left where they could not be taken off."""
    for mode in list(thread_state.left_modes):
        if mode.drop():
            thread_state.left_modes.remove(mode)


def can_stay() -> bool:
    """Return whether a mode that begins here stays until the session's step ends.

    A mode of somebody's may end before it. And a step that ends in a backward pass begins the next
    one there: the engine puts the modes back as they were.
    """
    drop_left()
    return count_modes() == 0 and graph_task() == NO_TASK


def seeing_here() -> SeeingMode | None:
    """Return the innermost mode that notes this thread's operators now, if there is one."""
    stack = reversed(mode_stack())
    seeing = (mode for mode in stack if isinstance(mode, SeeingMode) and mode.sees)
    return next(seeing, None)


class OwnMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that changes no operator: what others make of them is as if it were not there."""


def has_foreign_mode(*, may_record: bool = False) -> bool:
    """Return whether a mode of others changes what operators make here: backward is without it.

    `may_record`: one that records them is none of these.
    """
    ours = (OwnMode, SeeingMode) if may_record else OwnMode
    return not all(isinstance(mode, ours) for mode in mode_stack())
