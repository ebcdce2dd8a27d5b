"""What each step of a session took, for reports and callbacks."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from swapkit.ir.runs import StepRecord

if TYPE_CHECKING:
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit.planning.selection.cases import Stage

STEPS_KEPT = 10_000


class StepHistory:
    """The latest steps of one session.

    `add_peak` may be called on any thread; `end_step` on the one that ends a step.
    """

    def __init__(self, swapper: Swapper) -> None:
        """Begin before the first step."""
        self.steps = 0  # that ended
        self.peak_bytes = 0  # of all steps
        self._swapper = swapper
        self._records: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._counters = swapper.counters()
        self._began = time.perf_counter()
        self._step_peak_bytes = 0

    def begin(self) -> None:
        """Start the clock: the session begins."""
        self._began = time.perf_counter()

    def add_peak(self, peak_bytes: int) -> None:
        """Note a peak of reserved bytes in the present step."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self._step_peak_bytes = max(self._step_peak_bytes, peak_bytes)

    def end_step(self, stage: Stage) -> None:
        """Store the step that ended. Its peak was noted.

        Args:
            stage: in which the step ran.
        """
        self.steps += 1
        now, counters = time.perf_counter(), self._swapper.counters()
        done = counters - self._counters
        self._records.append(
            StepRecord(
                step=self.steps,
                stage=stage.value,
                seconds=now - self._began,
                peak_bytes=self._step_peak_bytes,
                rescues=done.rescues,
                swapped_out_bytes=done.copied_out_bytes,
                swapped_in_bytes=done.copied_in_bytes,
                stall_seconds=done.stall_seconds,
            )
        )
        self._began, self._counters, self._step_peak_bytes = now, counters, 0

    def timed_records(self) -> tuple[tuple[StepRecord, ...], float]:
        """Return the latest steps, and when the last one ended (`perf_counter`). Any thread."""
        while True:
            ended_at = self._began
            records = self.records()
            if ended_at == self._began:
                return records, ended_at

    def records(self) -> tuple[StepRecord, ...]:
        """Return the latest steps, at most `STEPS_KEPT`. Any thread."""
        while True:
            try:
                return tuple(self._records)
            except RuntimeError:  # another thread ended a step meanwhile
                continue
