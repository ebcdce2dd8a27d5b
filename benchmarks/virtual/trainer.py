"""One way to train on the virtual GPU: `-m benchmarks.virtual.trainer SETUP RESULT` inside of it.

As `benchmarks.gpu.trainer`, which does the work; what is looked at here, a real GPU does not tell.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

from benchmarks.gpu import measure, trainer
from benchmarks.gpu.probe import Probe
from tests.cuda.timed import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.gpu.trainer import Figures, Training
    from swapkit._runtime.recording.tables.clocks import Timer

# Counters of the machine: the figure that says it per step, and how many of it make up its unit.
OF_MACHINE = {
    "mean_step_ms": ("now_ns", 1e6),
    "busy_ms": ("compute_busy_ns", 1e6),
    "host_gap_ms": ("gap_host_ns", 1e6),
    "copy_wait_ms": ("gap_stream_ns", 1e6),
    "sync_ms": ("gap_sync_ns", 1e6),
    "kernels": ("kernels", 1),
    "step_out_bytes": ("copy_bytes_out", 1),
    "step_in_bytes": ("copy_bytes_in", 1),
    "step_maps": ("maps", 1),
    "step_unmaps": ("unmaps", 1),
}
WARM_STEPS, FREE_STEPS = 2, 5  # with a host that takes no time


class WatchedTimer:
    """A recorder's timer, and beside it what the kernels of each operator really take."""

    def __init__(self, timer: Any, times: dict[str, float]) -> None:  # noqa: ANN401 - a `Timer`
        self._timer = timer
        self._times = times
        self._own_ns: defaultdict[int, int] = defaultdict(int)  # by thread: the timer's own kernels

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a timer has
        return getattr(self._timer, name)

    def begin(self) -> tuple[Any, int]:
        return self._timer.begin(), self._busy_ns()

    def end(self, begun: tuple[Any, int], function: Any) -> tuple[Any, int]:  # noqa: ANN401
        true_ns = self._busy_ns() - begun[1]
        return self._timer.end(begun[0], function), true_ns

    def stop(self) -> None:
        self._leave_out(self._timer.stop)

    def go_on(self) -> None:
        self._leave_out(self._timer.go_on)

    def nothing(self) -> tuple[Any, int]:
        return self._timer.nothing(), 0

    def seconds(self, taken: Sequence[tuple[Any, int]]) -> list[float]:
        found: list[float] = self._timer.seconds([one for one, _ in taken])
        self._times["true_ms"] = sum(ns for _, ns in taken) / 1e6
        return found

    def _busy_ns(self) -> int:
        return machine.times()["compute_busy_ns"] - self._own_ns[threading.get_ident()]

    def _leave_out(self, call: Callable[[], None]) -> None:
        """Call something whose kernels are none of the operator that runs."""
        before = self._busy_ns()
        call()
        self._own_ns[threading.get_ident()] += self._busy_ns() - before


class VirtualProbe(Probe):
    """Looks at the machine itself."""

    watches_device = False  # the clock is that of all threads of the process

    def __init__(self) -> None:
        super().__init__()
        self._recorded: dict[str, float] = {}  # of the step that was recorded last

    def prepare(self) -> None:
        """See what is recorded."""
        watch_recorders(self._recorded)

    def read(self, training: Training, session: Any) -> dict[str, float]:  # noqa: ANN401
        """Return all counters as they are now."""
        now = machine.times()
        found = {key: now[name] / unit for key, (name, unit) in OF_MACHINE.items()}
        return super().read(training, session) | found

    def after(self, training: Training, session: Any) -> Figures:  # noqa: ANN401
        """Return what the steps would take if the host took no time."""
        before = self.read(training, session)
        with free_host():
            measure.time_steps(training.step, WARM_STEPS, training.setup.device)
            times = measure.time_steps(training.step, FREE_STEPS, training.setup.device)
        after = self.read(training, session)
        return {
            "host_free_ms": measure.median_of(times),
            "host_free_replans": after.get("step_replans", 0) - before.get("step_replans", 0),
            "link_out_gb_per_s": machine.parameter("LINK_OUT"),
            "link_in_gb_per_s": machine.parameter("LINK_IN"),
            "stage": "" if session is None else session.stage,
            **describe_prediction(session),
            **self._recorded,
        }


def describe_prediction(session: Any) -> Figures:  # noqa: ANN401 - swapkit's Session
    """Return what the plan of a session's steps takes, and no plan takes less than.

    As it was made: a session scales what it tells by steps that it timed on the host only.
    """
    if session is None:
        return {}
    status = session._find_status()  # noqa: SLF001
    plan = status.plan
    if plan is None or plan.prediction is None:
        return {}
    return {
        "predicted_ms": plan.prediction.step_seconds / status.pace * 1e3,
        "bound_ms": plan.bound_seconds and plan.bound_seconds / status.pace * 1e3,
    }


@contextlib.contextmanager
def free_host() -> Iterator[None]:
    """Let neither the host nor calls of the driver take time."""
    slowness = machine.host_slowness()
    with machine.parameters({f"COST_{name}_NS": 0 for name in machine.COSTS}):
        machine.host_slowness(0.0)
        try:
            yield
        finally:
            machine.host_slowness(slowness)


def watch_recorders(times: dict[str, float]) -> None:
    """Let the timer of each recorder be watched, whichever it is."""
    from swapkit._runtime.recording.recorder import Recorder

    begin = Recorder.begin

    def begin_watched(recorder: Recorder) -> None:
        recorder.timer = cast("Timer", WatchedTimer(recorder.timer, times))
        begin(recorder)

    Recorder.begin = begin_watched  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    trainer.main(VirtualProbe())
