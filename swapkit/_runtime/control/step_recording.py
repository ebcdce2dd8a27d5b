"""The recorder of a session's step: one at a time, which any thread may stop for good."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.tables.clocks import StreamTimer
from swapkit._runtime.torch_compat.stream_delays import LongCalls
from swapkit.ir.traces import EventKind
from swapkit.planning.smoothing import find_doubt, smooth_times

if TYPE_CHECKING:
    import torch

    from swapkit._runtime.recording.notes import Setting
    from swapkit._runtime.shim.types import Packer
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.cases import Case

MOST_DOUBT = 0.1  # of a step's time


class StepRecording:
    """Starts and stops recorders, on the thread of the session's steps. Any thread: `drop`."""

    def __init__(self, packer: Packer) -> None:
        """Record nothing as yet. `packer`: tells what autograd saves."""
        self._packer = packer
        self._long_calls = LongCalls()  # what one recorder learns, the next one knows
        self._recorder: Recorder | None = None
        self._is_dropped = False
        # Held where a recorder comes or goes: one that is dropped elsewhere is not half started.
        # Reentrant: a finalizer may end the session in between.
        self._lock = threading.RLock()

    @property
    def recorder(self) -> Recorder | None:
        """The one that records now."""
        return self._recorder

    def has_used(self) -> bool:
        """Return whether something that was saved in the step was used."""
        recorder = self._recorder
        events = () if recorder is None else tuple(recorder.savings.events)
        return any(event.kind is EventKind.USE for event in events)

    def start(self, setting: Setting, root: torch.nn.Module | None) -> None:
        """Record from here on. `root`: runs already."""
        recorder = Recorder(setting)
        if isinstance(recorder.timer, StreamTimer):
            recorder.timer.long_calls = self._long_calls
        with self._lock:
            if self._is_dropped:
                return
            self._recorder = recorder
            recorder.start()
            if root is not None:
                recorder.calls.enter(root)
            self._packer.observer = recorder.savings

    def stop(self) -> Recorder | None:
        """Record no more; return what knows the step. None: nothing was recorded."""
        with self._lock:
            recorder, self._recorder = self._recorder, None
            if recorder is None:
                return None
            self._packer.observer = None
        recorder.stop()  # without the lock: it waits for the device
        return recorder

    def drop(self) -> None:
        """Let go of what is recorded, which holds the model, and record nothing from now on.

        Operators may run meanwhile, on the thread that is recorded: what they note is nobody's.
        """
        self._is_dropped = True
        self.stop()


def finish_trace(
    trace: Trace, doubtful: frozenset[int], case: Case, *, has_looked: bool
) -> Trace | None:
    """Return a recorded step as plans are made of it; None: one is to be recorded once more.

    Args:
        trace: as it was recorded.
        doubtful: operators whose time may hold more than they take: what takes long in the call of
            one is covered the next time.
        case: of the step; a second recording of it in a row is taken as it is.
        has_looked: a region ran for the first time, which keeps more than it does later.
    """
    is_unlike_others = has_looked or find_doubt(trace, doubtful) > MOST_DOUBT
    case.is_again = not case.is_again and is_unlike_others
    return None if case.is_again else smooth_times(trace, doubtful)
