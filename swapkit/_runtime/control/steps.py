"""A session's steps: their times, where they begin, forwards that raise, the recorder."""

from __future__ import annotations

import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.execution.plan_compiler import is_heavier
from swapkit._runtime.execution.plan_executor import PlanExecutor, StepReport
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.hook_bypass import Bypass
from swapkit._runtime.model.ranks import count_ranks
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.tables.clocks import StreamTimer
from swapkit._runtime.recording.trace_builder import count_growth, has_leftovers
from swapkit._runtime.shim.types import Mover, Packer
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit._runtime.torch_compat.stream_delays import LongCalls
from swapkit.ir.traces import EventKind, Trace
from swapkit.planning.selection.cases import Case, Timing
from swapkit.planning.smoothing import find_doubt, smooth_times

# ---- step times ----------------------------------------------------------------------------------
#
# The times of steps, by kind of step.

STEPS_TIMED = 32  # per kind: the median of these latest steps is the step time
KINDS_KEPT = 16
BUSY = 0.9  # of a step's time: a host that is busy for this share is not ahead of the device


class StepTime(NamedTuple):
    """The time of a step: see `Outcome`."""

    seconds: float
    timing: Timing
    is_host_bound: bool = False


class StepClock:
    """Times one step after the other, on the thread that runs the steps."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to time steps on a device."""
        self._device = device
        self._timing = Timing.HOST
        self._began = time.perf_counter()  # a step that does not begin lasts from the last end
        self._ended: torch.Event | None = None  # the end on the device of a `Timing.LEAD` step

    def begin(self, timing: Timing) -> None:
        """Begin to time a step in this way.

        If the previous step was not timed as `Timing.LEAD`, `Timing.PACE` first waits until the
        device is idle.
        """
        self._timing = Timing.HOST if self._device.type == "cpu" else timing
        if self._timing is not Timing.PACE:
            self._ended = None
        elif self._ended is None:
            self._ended = self._mark()
            self._ended.synchronize()
        self._began = time.perf_counter()

    def end(self) -> StepTime:
        """Return the time of the step that ends."""
        began, self._began = self._began, time.perf_counter()
        queued = self._began - began
        before, self._ended = self._ended, None
        if self._timing is Timing.LEAD:
            self._ended = self._mark()
        if before is None:
            return StepTime(queued, self._timing)
        ended = self._mark()
        ended.synchronize()
        seconds = before.elapsed_time(ended) / 1e3
        return StepTime(seconds, Timing.PACE, queued >= BUSY * seconds)

    def _mark(self) -> torch.Event:
        """Record an event on this thread's stream, which holds the work of the step."""
        module = torch.get_device_module(self._device)
        event: torch.Event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))
        return event


class StepTimes:
    """Seconds of the latest steps of the latest kinds. Each kind of step has its own plan."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, kind: str, seconds: float) -> None:
        """Add the time of a step."""
        self._seconds.setdefault(kind, deque(maxlen=STEPS_TIMED)).append(seconds)
        self._seconds.move_to_end(kind)
        while len(self._seconds) > KINDS_KEPT:
            self._seconds.popitem(last=False)

    def latest(self, kind: str) -> float:
        """Return the seconds of the latest step of a kind; 0: there was no such step.

        Of the latest two the shorter one: another rank that planned at the end of its step has kept
        the next one waiting. Not of more: what steps do may have changed.
        """
        return min(list(self._seconds[kind])[-2:]) if kind in self._seconds else 0.0

    def median(self, kind: str) -> float | None:
        """Return the median seconds of a kind; None: there was no such step."""
        return statistics.median(self._seconds[kind]) if kind in self._seconds else None

    def others(self, kind: str) -> tuple[float, ...]:
        """Return the medians of all other kinds, latest first."""
        return tuple(
            statistics.median(seconds)
            for other, seconds in reversed(self._seconds.items())
            if other != kind
        )


# ---- first events --------------------------------------------------------------------------------
#
# Where a step begins if the session's model is not called as a whole.
#
# Pipeline schedules call stages of a model; other programs call its parts, or functions. Their
# steps begin with the first call of a module of the model, in forward (without a model: of any
# module), or with the first tensor that autograd saves, whichever comes first. So what the previous
# step leaves behind until then (gradients, the last batch, results) is not part of the step.


class FirstEvent:
    """Waits for the first event of a step. Holds no lock.

    `wait` and `end` run on the thread of the steps. `is_call` and `saved` run on any thread, of
    this session or of another; only the thread of the steps begins one.
    """

    def __init__(
        self,
        packer: Packer,
        find_model: Callable[[], torch.nn.Module | None],
        is_here: Callable[[], bool],
    ) -> None:
        """Wait for nothing yet.

        Args:
            packer: the session's; its observer is free while a step is waited for.
            find_model: returns the session's model; None: it has none.
            is_here: returns whether the current thread runs the session's steps.
        """
        self._packer = packer
        self._find_model = find_model
        self._has_model = find_model() is not None
        self._is_here = is_here
        self._begin: Callable[[], object] | None = None  # None: no step is waited for
        self._parts: frozenset[int] | None = None  # the modules of the model; None: not looked up

    def wait(self, begin: Callable[[], object]) -> None:
        """Wait for a step. `begin` is called where a tensor is saved before a module is called."""
        self._begin, self._parts = begin, None
        self._packer.observer = self

    def end(self) -> None:
        """Stop waiting."""
        self._begin = self._parts = None
        if self._packer.observer is self:
            self._packer.observer = None

    def is_call(self, module: torch.nn.Module) -> bool:
        """Return whether the call of a module, which begins now, is the event waited for."""
        if self._begin is None or not self._is_here():
            return False
        if not torch.is_grad_enabled() or graph_task() != NO_TASK:
            return False
        return not self._has_model or self._is_part(module)

    def _is_part(self, module: torch.nn.Module) -> bool:
        parts = self._parts  # read once: another thread may end the session
        if parts is None:  # once per step: modules may be replaced between steps
            model = self._find_model()
            parts = self._parts = frozenset(() if model is None else map(id, model.modules()))
        # A compiled form has the module itself as its only child.
        return id(module) in parts or id(getattr(module, "_orig_mod", None)) in parts

    # ---- an observer of the packer ---------------------------------------------------------------

    @untraced
    def saved(self, tensor: torch.Tensor, packed: object) -> None:
        """Begin the step, unless the tensor is saved in backward or on another thread."""
        begin = self._begin  # read once: another thread may end the session
        if begin is None or graph_task() != NO_TASK or not self._is_here():
            return
        begin()
        observer = self._packer.observer
        if observer is not None and observer is not self:
            observer.saved(tensor, packed)

    def used(self, packed: object, tensor: torch.Tensor) -> None:
        """Do nothing: a backward of the previous step's graph may still run."""


# ---- step forwards -------------------------------------------------------------------------------
#
# Forwards of a session's model: handling of forwards that raise or that follow the plan.


class Forwards:
    """The forwards of the current step. Called on the thread that runs the step.

    A step begins again if its first forward raised: no part of the step is done then. If another
    forward raised, the step goes on, but is unlike the steps after it.
    """

    def __init__(self) -> None:
        """Begin before any step."""
        self._first: global_hooks.ModuleCall | None = (
            None  # the call of the model that began the step
        )
        self._is_broken = False  # the first forward raised, and no other has begun since
        self._is_odd = False  # another forward raised
        self._was_odd = False  # a forward raised in the previous step

    def begin(self) -> None:
        """Note that the call being reported to listeners is the first of a step."""
        self._first = global_hooks.this_call()

    def leave(self) -> None:
        """Note that the call of the model being reported to listeners has ended."""
        call = global_hooks.this_call()
        if call is None or not call.has_raised or graph_task() != NO_TASK:
            return  # a forward in backward is part of a recomputation
        if call is self._first:
            self._is_broken = True
        elif torch.is_grad_enabled():  # an evaluation is not part of the step
            self._is_odd = True

    def begins_again(self, has_used: Callable[[], bool]) -> bool:
        """Return whether the step begins again with the forward that begins now.

        Args:
            has_used: returns whether a tensor that the step saved was used. An exception may carry
                results (an early exit) that a backward starts from: then part of the step is done.
        """
        was_broken, self._is_broken = self._is_broken, False
        if was_broken:
            self._is_odd = has_used()
        return was_broken and not self._is_odd

    def end(self) -> bool:
        """Note that the step has ended; return whether it is worth learning from.

        A step in which a forward raised is not, unless one also raised in the previous step: then
        all steps may be like that.
        """
        was_odd, self._was_odd = self._was_odd, self._is_odd or self._is_broken
        self._is_odd = self._is_broken = False
        return was_odd or not self._was_odd


class ForwardBypass:
    """Turns off module events in a forward if the step and the previous one follow the plan."""

    def __init__(self, tracker: ModuleTracker) -> None:
        """Begin before any step."""
        self._tracker = tracker
        self._calm: PlanExecutor | None = None  # the executor that the latest step did not leave
        self._bypass: Bypass | None = None  # of the thread that runs the forward

    def begin(self, executor: PlanExecutor | None) -> None:
        """Handle the begin of a forward of the model, as reported to listeners."""
        if executor is None or executor is not self._calm or executor.needs_modules:
            return
        if torch.is_grad_enabled() and executor.now() is not None:
            self._bypass = self._tracker.bypass(executor)

    def end_step(self, executor: PlanExecutor | None, report: StepReport) -> None:
        """Handle the end of the step."""
        self._calm = executor if report.deviation is None else None
        if self._bypass is not None:
            self._bypass.end()  # the forward may have been interrupted, on any thread


# ---- step recording ------------------------------------------------------------------------------
#
# The recorder of a session's steps: one at a time. Any thread may drop it.

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
    mover: Mover,
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
        mover=mover if mover.held[0] else None,
        exclude_key=mover.exclude_held,
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
    is_unusual = recorder.had_first_runs or is_growing or has_leftovers(trace, recorder.storages)
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
