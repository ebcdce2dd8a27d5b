"""What a session tells, while it is active and afterwards: statistics, plan, reasons, steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.allocators.advice import advise_layout
from swapkit._runtime.allocators.memory_holders import find_outside, find_uncollected
from swapkit._runtime.control.plan_status import PlanStatus, describe_progress
from swapkit._runtime.session.explanation import (
    explain,
    explain_layout,
    explain_states,
    explain_uncollected,
)
from swapkit._runtime.session.memory_history import PoolLook
from swapkit._runtime.session.reports import gather, tell_plan
from swapkit._runtime.session.stats import list_metrics, summarize
from swapkit._runtime.session.trace_files import TraceSources, write_trace_file
from swapkit.errors import SessionError
from swapkit.ir.codec import write_planned
from swapkit.reporting.html.card import STEPS_SHOWN, render_card, render_new
from swapkit.reporting.reports import check_target, write_report
from swapkit.reporting.traces.names import check_suffix
from swapkit.units import format_bytes

if TYPE_CHECKING:
    import os

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit._runtime.session.life import SessionLife
    from swapkit._runtime.session.memory_history import MemoryRecording
    from swapkit.ir.plans import Plan
    from swapkit.ir.runs import SessionStats, StepRecord
    from swapkit.ir.traces import Trace
    from swapkit.reporting.run_records import RunRecord

NOT_ACTIVE = "this session is not active: use `with swapkit.budget(...) as s:`"


class SessionResults:
    """What a session tells on any thread. The values of an ended session are its last ones."""

    def __init__(self, config: SessionConfig) -> None:
        self.limit_bytes = config.limits.budget_bytes
        self._config = config
        self._active: SessionLife | None = None
        self._final: SessionStats | None = None
        self._history: tuple[StepRecord, ...] = ()
        self._last_step_ended_at = 0.0
        self._recording: MemoryRecording | None = None  # of the pool, while it is on
        self._final_memory: PoolLook | None = None  # of a recording, at the session's end
        self._status = PlanStatus()
        self._threads = ""  # the CPUs that they are bound to
        self._installation: Installation | None = None

    @property
    def is_active(self) -> bool:
        """Whether the session was entered and has not ended."""
        return self._active is not None and not self._active.is_closed

    @property
    def stage(self) -> str:
        """`"warmup"`, `"search"` or `"stable"`; always stable in a session that makes no plans."""
        return self._look().stage.value

    @property
    def progress(self) -> str:
        """How far the search for a plan is, in words; empty in a session that makes no plans.

        It is recording, planning (since which step), following a first plan, trying one of several
        plans, or settled at a step.
        """
        return describe_progress(self._look())

    @property
    def plan(self) -> Plan | None:
        """The decision for each saved tensor; None until a plan has settled."""
        return self._look().plan

    @property
    def trace(self) -> Trace | None:
        """The recorded step that the plan is for; None before a step was recorded."""
        return self._look().trace

    @property
    def stats(self) -> SessionStats:
        """The statistics so far, or those at the session's end.

        Raises:
            SessionError: the session was not entered yet.
        """
        return self._final if self._final is not None else self._require().stats()

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """The steps so far, oldest first; at most the latest 10,000.

        Example:
            >>> import swapkit
            >>> with swapkit.budget("64MiB") as session:
            ...     session.mark_step()
            >>> session.history[-1].step, session.history[-1].stage
            (1, 'warmup')
        """
        return self._history if self._active is None else self._active.history.records()

    def metrics(self, *, prefix: str = "swapkit/") -> dict[str, int | float]:
        """Return `stats` as a flat dict of numbers, for loggers such as TensorBoard.

        The keys are the prefix plus the field names. Unknown values are left out. `stage` is 0 in
        the warm-up, 1 in the search and 2 in a stable session. The units are bytes and seconds.

        Args:
            prefix: the start of every key.

        Raises:
            SessionError: the session was not entered yet.

        Example:
            >>> import swapkit
            >>> with swapkit.budget("64MiB") as session:
            ...     session.mark_step()
            ...     metrics = session.metrics()
            >>> metrics["swapkit/budget_bytes"], metrics["swapkit/steps"]
            (67108864, 1)
        """
        return list_metrics(self.stats, self._look().stage, prefix)

    def explain(self) -> str:
        """Return a text about the session's work, its plan, and memory outside of the budget.

        With a plan, the text gives the decision for each place that saves tensors, with its reason,
        bytes and time. It also says what another budget would change.

        Raises:
            SessionError: the session was not entered yet.
        """
        stats = self.stats
        assert self._installation is not None
        device, tracker = self._installation.device, self._installation.tracker
        outside = find_outside(device, tracker)
        uncollected = explain_uncollected(find_uncollected(device, tracker, stats.steps))
        advice = advise_layout(
            self._installation.pool.stats(),
            separates=self._installation.separates_lives,
            at_peak=True,
        )
        threads = [self._threads] if self._threads else []
        layout = self._installation.layout
        places = [] if layout is None else explain_layout(layout.stats())
        text = explain(stats, self._look(), self._policy_name, outside)
        states = [] if self._active is None else explain_states(self._active.swapper.trained())
        texts = [text, *states, *uncollected, *places, *threads, *advice]
        return "\n".join(texts)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a report of the session so far: a page that works offline, or its data.

        The page shows memory over a step, the lanes of computing and copying, the decisions with
        their reasons, the effect of other budgets, and all steps. Without a plan, it shows what
        there is and says why the rest is missing. Other budgets are planned for, which may take
        seconds. Call it on any thread, during the session or after it.

        Args:
            path: the file to write. `"run.html"`: the page. `"run.json"`: the data, from which
                `swapkit report run.json` draws the page later, or on another computer.

        Raises:
            SessionError: the session was not entered yet.
            InvalidArgument: `path` does not end in .html or .json.
            MissingPackage: the page needs Bokeh, which is not installed.
            DiskError: the file cannot be written; its previous content stays.

        Example:
            >>> import swapkit
            >>> with swapkit.budget("64MiB") as session:
            ...     session.mark_step()
            >>> session.report("run.json")  # doctest: +SKIP
        """
        check_target(path)
        write_report(path, self._gather())

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for `swapkit.budget(..., plan=path)`.

        Before a plan is chosen, this writes the best plan so far. If a plan is in the making, the
        call waits for it, which may take as long as a few steps.

        Raises:
            SessionError: there is no plan yet, since no step was recorded.
            InvalidArgument: `path` is not a path.
            DiskError: the file cannot be written. A subclass of `OSError`.
        """
        active = self._active
        status = self._status if active is None else active.status_to_save()
        if status.plan is None or status.trace is None:
            why = status.why_none or describe_progress(status) or "policy='rescue'"
            raise SessionError(f"there is no plan to save: {why}")
        write_planned(path, status.trace, status.plan)

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the session's steps or its memory to a file for a viewer, by the file's suffix.

        `.json` and `.json.gz` are for https://ui.perfetto.dev and chrome://tracing. They have the
        planned step as simulated (operators, copies, recomputations, memory) and the measured steps
        of `history`; times are in microseconds. `.pickle` is a snapshot as
        `torch.cuda.memory._dump_snapshot` writes it, for https://pytorch.org/memory_viz and
        `torch.cuda._memory_viz`, with the pool's blocks.

        After `record_memory_history`, both also have what was recorded: the first the copies with
        their times and the pool's bytes, the second every allocation and free. An ended session
        writes what was recorded until its end. Without a plan the file has what there is.

        Args:
            path: the file. Its suffix is one of these three.

        Raises:
            SessionError: the session was not entered yet; or a `.pickle` on a device that keeps
                torch's own allocator.
            InvalidArgument: another suffix, or not a path.
            DiskError: the file cannot be written. A subclass of `OSError`.

        Example:
            >>> import os, swapkit, tempfile
            >>> with tempfile.TemporaryDirectory() as folder, swapkit.budget("64MiB") as session:
            ...     session.mark_step()
            ...     session.export_trace(os.path.join(folder, "trace.json"))
            ...     os.listdir(folder)
            ['trace.json']
        """
        suffix = check_suffix(path)
        if self._final is None:
            self._require()
        installation = self._installation
        assert installation is not None
        active = self._active
        steps, ended_at = (
            (self._history, self._last_step_ended_at)
            if active is None
            else active.history.timed_records()
        )
        sources = TraceSources(
            status=self._look(),
            steps=steps,
            ended_at=ended_at,
            budget_bytes=self.limit_bytes,
            look_at_memory=lambda: PoolLook(installation),
            memory=self._look_at_memory(installation),
        )
        write_trace_file(path, suffix, sources)

    def _look_at_memory(self, installation: Installation) -> PoolLook | None:
        """Return the recorded memory; None: it is not recorded.

        Another thread may end the session meanwhile. It keeps the record, then forgets the
        recording, then stops it: so a look while the recording is known has all events.
        """
        recording = self._recording
        if recording is not None:
            look = PoolLook(installation)
            if self._recording is recording:
                return look
        return self._final_memory

    def _gather(self) -> RunRecord:
        stats = self.stats
        assert self._installation is not None
        return gather(
            self._installation,
            stats,
            self._look(),
            self.history,
            policy=self._policy_name,
            is_ended=not self.is_active,
        )

    def _repr_html_(self) -> str:
        """Return a small card for notebooks."""
        if self._active is None and self._final is None:
            return render_new(self.limit_bytes)
        state = self.stage if self.is_active else "ended"
        plan_text = tell_plan(self._look(), self.limit_bytes)
        return render_card(self.stats, state, plan_text, self.history[-STEPS_SHOWN:])

    def __repr__(self) -> str:
        if self._active is None and self._final is None:
            return f"<swapkit session, budget {format_bytes(self.limit_bytes)}, not entered>"
        state = self.stage if self.is_active else "ended"
        return f"<swapkit session, {summarize(self.stats, state, self.progress)}>"

    def _look(self) -> PlanStatus:
        """Return the status of the search for a plan."""
        return self._status if self._active is None else self._active.status()

    @property
    def _policy_name(self) -> str:
        policy = self._config.policy
        return policy if isinstance(policy, str) else type(policy).__name__

    def _require(self) -> SessionLife:
        if self._active is None:
            raise SessionError(NOT_ACTIVE)
        return self._active
