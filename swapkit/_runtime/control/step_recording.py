"""The recorder of a session's steps: one at a time. Any thread may drop it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from swapkit._runtime.execution.plan_checks import is_heavier
from swapkit._runtime.model.node_ranks import count_ranks
from swapkit._runtime.recording.next_steps import count_growth, has_leftovers
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.tables.clocks import StreamTimer
from swapkit._runtime.torch_compat.stream_delays import LongCalls
from swapkit.ir.traces import EventKind
from swapkit.planning.smoothing import find_doubt, smooth_times

if TYPE_CHECKING:
    import torch

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.shim.types import Packer
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.cases import Case

MOST_DOUBT = 0.1  # of a step's time


class StepRecording:
    """Starts and stops recorders, on the thread that runs the steps. `drop`: any thread."""

    def __init__(self, packer: Packer) -> None:
        """Record nothing yet. `packer`: reports saved tensors and their uses."""
        self._packer = packer
        self._long_calls = LongCalls()  # shared by successive recorders
        self._recorder: Recorder | None = None
        self._interrupted: Recorder | None = None
        self._is_dropped = False
        # Held while a recorder starts or stops, so that `drop` never meets a half-started one.
        # Reentrant: a finalizer may end the session while the lock is held.
        self._lock = threading.RLock()

    @property
    def recorder(self) -> Recorder | None:
        """The running recorder, if any."""
        return self._recorder

    def has_used(self) -> bool:
        """Return whether a tensor that was saved in the step was used."""
        recorder = self._recorder
        events = () if recorder is None else tuple(recorder.savings.events)
        return any(event.kind is EventKind.USE for event in events)

    @property
    def is_recording(self) -> bool:
        """Whether a recorder has begun."""
        recorder = self._recorder
        return recorder is not None and recorder.has_begun

    @property
    def is_waiting(self) -> bool:
        """Whether a recorder is prepared that has not begun."""
        recorder = self._recorder
        return recorder is not None and not recorder.has_begun

    def prepare(self, setting: Setting) -> None:
        """Prepare a recorder, between two steps. `begin` may then be called inside an operator."""
        self._finish_interrupted()
        recorder = Recorder(setting)
        if isinstance(recorder.timer, StreamTimer):
            recorder.timer.long_calls = self._long_calls
        with self._lock:
            if self._is_dropped:
                return
            self._recorder = recorder
            recorder.prepare()

    def begin(self, root: torch.nn.Module | None) -> None:
        """Begin to record with the prepared recorder. `root`: a module whose forward already runs.

        If `root` is None, a tensor is being saved: its operator is recorded if it runs afterwards.
        """
        with self._lock:
            recorder = self._recorder
            if recorder is None:
                return
            recorder.begin()
            if root is not None:
                recorder.calls.enter(root)
            self._packer.observer = recorder.savings

    def stop(self) -> Recorder | None:
        """Stop recording; return the recorder with the step. None: nothing was recorded."""
        self._finish_interrupted()
        recorder = None
        try:
            with self._lock:
                recorder, self._recorder = self._recorder, None
                if recorder is None:
                    return None
                if recorder.has_begun:
                    self._packer.observer = None
            recorder.stop()  # without the lock: it waits for the device
        except BaseException:
            self._interrupted = recorder
            raise
        return recorder

    def _finish_interrupted(self) -> None:
        """Stop the recorder whose stop was interrupted. Its step is lost: notes may be missing."""
        if self._interrupted is not None:
            self._interrupted.stop()
            self._interrupted = None

    def drop(self) -> None:
        """Drop the recorder, which refers to the model, and record nothing from now on.

        Operators may still run on the recorded thread: their notes are lost.
        """
        self._is_dropped = True
        self.stop()


def find_setting(
    installation: Installation,
    root: torch.nn.Module | None,
    optimizers: tuple[torch.optim.Optimizer, ...],
) -> Setting:
    """Return what a recorder needs to know of a model's steps."""
    device = installation.device
    return Setting(
        device=device.name,
        tracker=installation.tracker,
        pool=device.pool,
        root=root,
        optimizers=optimizers,
        make_room=installation.runtime.make_room if device.makes_reclaimable else None,
    )


def take_trace(
    recorder: Recorder, case: Case, signature: str, step_seconds: float, limit_bytes: int
) -> Trace | None:
    """Return the trace of a recorder that has stopped; None: record another step first.

    Args:
        recorder: of the step.
        case: of the step.
        signature: of the step's inputs.
        step_seconds: of such a step without a recorder; 0: not known.
        limit_bytes: the budget.
    """
    trace = replace(recorder.trace(step_seconds=step_seconds), signature=signature)
    # The next step begins with what this step leaves behind, such as an optimizer's states.
    is_growing = is_heavier(count_growth(trace, recorder.storages), 0, limit_bytes)
    is_unusual = recorder.has_looked or is_growing or has_leftovers(trace, recorder.storages)
    return finish_trace(trace, recorder.doubtful, case, is_unusual=is_unusual)


def finish_trace(
    trace: Trace, doubtful: frozenset[int], case: Case, *, is_unusual: bool
) -> Trace | None:
    """Return a recorded step, ready for planning; None: record another step first.

    Args:
        trace: as it was recorded.
        doubtful: operators whose time may include waiting for their own long call; the next
            recording hides that call behind a delay.
        case: of the step; its second recording in a row is always accepted.
        is_unusual: whether later steps are expected to need another amount of memory.
    """
    is_unlike_others = is_unusual or find_doubt(trace, doubtful) > MOST_DOUBT
    case.is_again = not case.is_again and is_unlike_others
    if case.is_again:
        return None
    return replace(smooth_times(trace, doubtful), ranks=count_ranks())
