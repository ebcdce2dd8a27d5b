"""What a session tells, while it is active and afterwards: statistics, plan, reasons, steps."""

from __future__ import annotations

import os

from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.allocators.memory_holders import advise_layout, find_outside, find_uncollected
from swapkit._runtime.control.plan_status import PlanStatus, describe_progress
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.session.history import list_metrics, summarize
from swapkit._runtime.session.life import SessionLife
from swapkit._runtime.session.memory_history import MemoryRecording, PoolLook
from swapkit.errors import SessionError
from swapkit.ir.codec import write_planned
from swapkit.ir.plans import Plan
from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.ir.traces import Trace
from swapkit.reporting.paths import check_report, check_trace
from swapkit.units import format_bytes

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
        return self._find_status().stage.value

    @property
    def progress(self) -> str:
        """How far the search for a plan is, in words; empty in a session that makes no plans.

        It is recording, planning (since which step), following a first plan, trying one of several
        plans, or settled at a step.
        """
        return describe_progress(self._find_status())

    @property
    def plan(self) -> Plan | None:
        """The decision for each saved tensor; None until a plan has settled."""
        return self._find_status().plan

    @property
    def trace(self) -> Trace | None:
        """The recorded step that the plan is for; None before a step was recorded."""
        return self._find_status().trace

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
        return list_metrics(self.stats, self._find_status().stage, prefix)

    def explain(self) -> str:
        """Return a text about the session's work, its plan, and memory outside of the budget.

        With a plan, the text gives the decision for each place that saves tensors, with its reason,
        bytes and time. It also says what another budget would change.

        Raises:
            SessionError: the session was not entered yet.
        """
        from swapkit._runtime.session import reports

        stats = self.stats
        assert self._installation is not None
        device, tracker = self._installation.device, self._installation.tracker
        outside = find_outside(device, tracker)
        uncollected = find_uncollected(device, tracker, stats.steps)
        advice = advise_layout(
            self._installation.pool.stats(),
            separates=self._installation.separates_lives,
            at_peak=True,
        )
        threads = [self._threads] if self._threads else []
        layout = self._installation.layout
        places = [] if layout is None else reports.explain_layout(layout.stats())
        text = reports.explain(stats, self._find_status(), self._policy_name, outside)
        trained = () if self._active is None else self._active.swapper.trained()
        states = reports.explain_states(trained)
        kept = reports.explain_uncollected(uncollected)
        texts = [text, *states, *kept, *places, *threads, *advice]
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
            DiskError: the file cannot be written; its previous content stays.

        Example:
            >>> import swapkit
            >>> with swapkit.budget("64MiB") as session:
            ...     session.mark_step()
            >>> session.report("run.json")  # doctest: +SKIP
        """
        check_report(path)
        stats = self.stats
        from swapkit._runtime.session.reports import gather
        from swapkit.reporting.html.page import write_report

        assert self._installation is not None
        record = gather(
            self._installation,
            stats,
            self._find_status(),
            self.history,
            policy=self._policy_name,
            is_ended=not self.is_active,
        )
        write_report(path, record)

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
        """Write the session's steps to a file for https://ui.perfetto.dev and chrome://tracing.

        It has the planned step as simulated (operators, copies, recomputations, memory) and the
        measured steps of `history`; times are in microseconds. After `record_memory_history`, it
        also has each copy with its time, and the pool's bytes. An ended session writes what was
        recorded until its end. Without a plan the file has what there is.

        Args:
            path: the file. Its name ends in `.json`, or in `.json.gz` for a compressed one.

        Raises:
            SessionError: the session was not entered yet.
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
        from swapkit._runtime.session.reports import write_trace_file

        check_trace(path)
        if self._final is None:
            self._require()
        installation = self._installation
        assert installation is not None
        active = self._active
        timed = (
            (self._history, self._last_step_ended_at)
            if active is None
            else active.history.timed_records()
        )
        look = self._read_memory(installation)
        memory = None if look is None else look.history()
        write_trace_file(path, self._find_status(), timed, self.limit_bytes, memory)

    def _read_memory(self, installation: Installation) -> PoolLook | None:
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

    def _repr_html_(self) -> str:
        """Return a small card for notebooks."""
        from swapkit._runtime.session.reports import describe_plan
        from swapkit.reporting.html.card import STEPS_SHOWN, render_card, render_new

        if self._active is None and self._final is None:
            return render_new(self.limit_bytes)
        state = self.stage if self.is_active else "ended"
        plan_text = describe_plan(self._find_status(), self.limit_bytes)
        return render_card(self.stats, state, plan_text, self.history[-STEPS_SHOWN:])

    def __repr__(self) -> str:
        if self._active is None and self._final is None:
            return f"<swapkit session, budget {format_bytes(self.limit_bytes)}, not entered>"
        state = self.stage if self.is_active else "ended"
        return f"<swapkit session, {summarize(self.stats, state, self.progress)}>"

    def _find_status(self) -> PlanStatus:
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
