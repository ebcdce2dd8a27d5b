"""The dispatch mode by which a recorder sees operators."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from swapkit._runtime.torch_compat.dispatch_modes import SeeingMode
from swapkit._runtime.torch_compat.internals import FakeTensor, count_modes, disabled_dispatch
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from swapkit._runtime.operators.names import Operator

_DISPATCH = "__torch_dispatch__"


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Whether no tensor among an operator's is made of others, whose operators are to be seen."""
    return all(
        issubclass(each, FakeTensor) or getattr(each, _DISPATCH, None) is disabled_dispatch
        for each in types
    )


class Runs(Protocol):
    """A recorder, as the mode sees it. On every thread that is recorded."""

    is_paused: bool

    def run(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator and note what it did; return what it returned."""

    def repeat(
        self, function: Operator, given: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> None:
        """Run an operator again that a region of the user's needs, and note what it did."""


class RecordingMode(SeeingMode):  # type: ignore[no-untyped-call]
    """Sees operators for a recorder, on the thread that enters it and those of its backward."""

    def __init__(self, recorder: Runs) -> None:
        super().__init__()
        self._recorder: Runs | None = recorder

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
            if count_modes() == 0:
                return NotImplemented  # the operators on what it is made of come here next
            return func(*args, **(kwargs or {}))  # to another mode, which may know what it is
        return recorder.run(func, args, kwargs or {})

    @property
    def sees(self) -> bool:
        """Whether it has not been left, and its recorder does not pause."""
        return self._recorder is not None and not self._recorder.is_paused

    def repeat(
        self,
        function: Operator,
        operands: list[torch.Tensor],
        run: Callable[[], list[torch.Tensor]],
    ) -> None:
        """Note an operator of a region that `run` runs again, as a part of the step."""
        recorder = self._recorder
        if recorder is None:  # another thread has left meanwhile
            run()
        else:
            recorder.repeat(function, operands, run)

    def leave(self) -> None:
        """See no more, and leave this thread's stack of modes, whoever was entered inside."""
        self._recorder = None
        super().leave()
