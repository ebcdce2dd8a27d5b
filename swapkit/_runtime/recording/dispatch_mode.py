"""The dispatch mode that shows operators to a recorder."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from swapkit._runtime.torch_compat.dispatch_modes import SeeingMode, mode_stack
from swapkit._runtime.torch_compat.internals import FakeTensor, disabled_dispatch
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from swapkit._runtime.operators.names import Operator

_DISPATCH = "__torch_dispatch__"


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Return whether no type is a wrapper subclass, whose inner operators get recorded instead."""
    return all(
        issubclass(each, FakeTensor) or getattr(each, _DISPATCH, None) is disabled_dispatch
        for each in types
    )


class Runs(Protocol):
    """The recorder's interface for the mode. Called on every recorded thread."""

    is_paused: bool

    def run(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator and note it; return its result."""

    def repeat(
        self, function: Operator, given: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> None:
        """Run an operator again for a region of the user's, and note it."""


class RecordingMode(SeeingMode):  # type: ignore[no-untyped-call]
    """Shows operators to a recorder, on the thread that enters it and on its backward threads."""

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
            if not mode_stack():
                return NotImplemented  # the operators on the inner tensors arrive here next
            return func(*args, **(kwargs or {}))  # to another mode, which may know the type
        return recorder.run(func, args, kwargs or {})

    @property
    def sees(self) -> bool:
        """Whether the mode has not been left and its recorder is not paused."""
        return self._recorder is not None and not self._recorder.is_paused

    def repeat(
        self,
        function: Operator,
        operands: list[torch.Tensor],
        run: Callable[[], list[torch.Tensor]],
    ) -> None:
        """Note an operator of a region that `run` runs again, as part of the step."""
        recorder = self._recorder
        if recorder is None:  # another thread called `leave` meanwhile
            run()
        else:
            recorder.repeat(function, operands, run)

    def leave(self) -> None:
        """Stop seeing operators; leave this thread's mode stack, whatever modes are inside."""
        self._recorder = None
        super().leave()
