"""The dispatch mode by which a recorder sees operators."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swapkit._runtime.torch_compat.dispatch_modes import SeeingMode
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from swapkit._runtime.operators.names import Operator
    from swapkit._runtime.recording.recorder import Recorder

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001
_NO_TASK = -1
_DISPATCH = "__torch_dispatch__"
_no_dispatch = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Whether no tensor among an operator's is made of others, whose operators are to be seen."""
    return all(
        issubclass(each, FakeTensor) or getattr(each, _DISPATCH, None) is _no_dispatch
        for each in types
    )


class _Left(threading.local):
    """Modes that are on this thread's stack and have been left elsewhere."""

    def __init__(self) -> None:
        self.modes: list[RecordingMode] = []


_left = _Left()


def drop_left() -> None:
    """Take those modes off this thread's stack that were left where they could not be taken off."""
    for mode in list(_left.modes):
        if mode.drop():
            _left.modes.remove(mode)


def recording_here() -> Recorder | None:
    """Return the recorder that sees this thread's operators now, if there is one."""
    at = torch._C._get_dispatch_stack_at  # noqa: SLF001
    count = torch._C._len_torch_dispatch_stack()  # noqa: SLF001
    modes = [mode for index in range(count) if isinstance(mode := at(index), RecordingMode)]
    for mode in reversed(modes):
        recorder = mode.recorder
        if recorder is not None and not recorder.is_paused:
            return recorder
    return None


def can_stay() -> bool:
    """Return whether a mode that begins here stays until the session's step ends.

    A mode of somebody's may end before it. And a step that ends in a backward pass begins the next
    one there: the engine puts the modes back as they were.
    """
    drop_left()
    return torch._C._len_torch_dispatch_stack() == 0 and _graph_task() == _NO_TASK  # noqa: SLF001


class RecordingMode(SeeingMode):
    """Sees operators for a recorder, on the thread that enters it and autograd's that work for it.

    Where it is left in the middle of a backward pass (a step ends there by optimizers in hooks),
    or on another thread, it goes inert: at the end of the pass the engine puts the stack of modes
    back as it was at its beginning. The thread that entered takes it off later (`drop_left`).
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder: Recorder | None = recorder
        self._task = _graph_task()
        self._left = _left.modes  # of this thread

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

    @property
    def recorder(self) -> Recorder | None:
        """Whom it tells; None: it has been left."""
        return self._recorder

    def leave(self) -> None:
        """See no more, and leave this thread's stack of modes, whoever was entered inside."""
        self._recorder = None
        if self._left is _left.modes and _graph_task() == self._task:
            super().leave()  # without effect while it runs
        else:
            self._left.append(self)

    def drop(self) -> bool:
        """Leave the stack for good, on the thread that entered, if that is possible now."""
        if _graph_task() != self._task:
            return False
        super().leave()
        return True
