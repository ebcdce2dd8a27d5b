"""The dispatch mode by which a recorder sees operators."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from swapkit._runtime.guards import untraced

if TYPE_CHECKING:
    from swapkit._runtime.operators import Operator
    from swapkit._runtime.recorder import Recorder

_DISPATCH = "__torch_dispatch__"
_no_dispatch = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Whether no tensor among an operator's is made of others, whose operators are to be seen."""
    return all(
        issubclass(each, FakeTensor) or getattr(each, _DISPATCH, None) is _no_dispatch
        for each in types
    )


class RecordingMode(TorchDispatchMode):
    """Sees operators for a recorder. On a thread that it cannot leave it goes inert."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder: Recorder | None = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not by a wrapper around each call: `untraced` does."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled stay so: it has no single operators."""
        return True

    @untraced
    def __torch_dispatch__(
        self,
        func: Operator,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        recorder = self._recorder
        if recorder is None or recorder.is_paused:
            return func(*args, **(kwargs or {}))
        if types and not _are_plain(tuple(types)):
            if torch._C._len_torch_dispatch_stack() == 0:  # noqa: SLF001
                return NotImplemented  # the operators on what it is made of come here next
            return func(*args, **(kwargs or {}))  # to another mode, which may know what it is
        return recorder.run(func, args, kwargs or {})

    def leave(self) -> None:
        """See no more, and leave this thread's stack of modes, whoever was entered inside."""
        self._recorder = None
        count = torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        stack = [torch._C._get_dispatch_stack_at(index) for index in range(count)]  # noqa: SLF001
        if not any(mode is self for mode in stack):
            return  # another thread's, or it runs right now
        inner: list[TorchDispatchMode] = []
        # As torch enters and leaves modes; what theirs do besides is not repeated.
        while stack[-1] is not self:
            inner.append(stack.pop())
            TorchDispatchMode.__exit__(inner[-1], None, None, None)  # type: ignore[no-untyped-call]
        TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(inner):
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
