"""The base of all our dispatch modes: how they live with the compiler, and how they are left."""

from __future__ import annotations

from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        stack = [_get_dispatch_stack_at(index) for index in range(_len_torch_dispatch_stack())]
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


class SeeingMode(Mode):  # type: ignore[no-untyped-call]
    """A mode of ours that has operators run as they are, and notes what they do."""


class OwnMode(Mode):  # type: ignore[no-untyped-call]
    """A mode that changes no operator: what others make of them is as if it were not there."""


def has_foreign_mode(*, may_record: bool = False) -> bool:
    """Return whether a mode of others changes what operators make here: backward is without it.

    `may_record`: one that records them is none of these.
    """
    ours = (OwnMode, SeeingMode) if may_record else OwnMode
    stack = map(_get_dispatch_stack_at, range(_len_torch_dispatch_stack()))
    return not all(isinstance(mode, ours) for mode in stack)
