"""The dispatch mode by which a recorder sees operators."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swapkit._runtime.guards import untraced
from swapkit._runtime.modes import Mode

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


class RecordingMode(Mode):
    """Sees operators for a recorder. On a thread that it cannot leave it goes inert."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder: Recorder | None = recorder

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
        super().leave()  # without effect on another thread, or while it runs
