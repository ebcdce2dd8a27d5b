"""The user's handle for a training run inside a budget."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from swapkit._native.lib import raise_interruption
from swapkit._runtime.allocators.installation import ensure_installation
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.allocators.memory_holders import advise_layout, find_outside, find_uncollected
from swapkit._runtime.control.plan_status import PlanStatus, describe_progress
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.model.tracker import ModelParts
from swapkit._runtime.process.undo import add_notes, raise_first
from swapkit._runtime.session.history import list_metrics, summarize
from swapkit._runtime.session.life import SessionLife, close_left, finish_ended
from swapkit._runtime.session.memory_history import (
    MOST_ENTRIES,
    MemoryRecording,
    PoolLook,
    check_entries,
)
from swapkit._runtime.torch_compat.isolation import make_fork_lock, uncompiled
from swapkit._runtime.user_choices.wrapping import is_suspended
from swapkit.errors import InvalidType, SessionError
from swapkit.ir.codec import write_planned
from swapkit.ir.plans import Plan
from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.ir.traces import Trace
from swapkit.reporting.paths import check_report, check_trace
from swapkit.texts import waiting
from swapkit.units import format_bytes, show

if TYPE_CHECKING:
    from typing import SupportsIndex

    import torch
    from typing_extensions import Self

NOT_ACTIVE = "this session is not active: use `with swapkit.budget(...) as s:`"
_Function = TypeVar("_Function", bound="Callable[..., Any]")


@dataclass(frozen=True)
class Final:
    """The last values of an ended session. `timed`: its steps, and when the last one ended."""

    stats: SessionStats
    status: PlanStatus
    timed: tuple[tuple[StepRecord, ...], float]


class Session:
    """The session of `with swapkit.budget(...) as session`. Entered once; ends when it is lost.

    You can call the methods from any thread. The session sees the saved tensors of the thread that
    entered it, and of threads that run its model.
    """

    def __init__(
        self,
        config: SessionConfig,
        model: torch.nn.Module | None,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
    ) -> None:
        self.limit_bytes = config.limits.budget_bytes
        self._config = config
        self._model = model
        self._optimizers = optimizers
        self._advice: list[Callable[[int], str]] = []
        self._on_loss: weakref.finalize[[], Self] | None = None
        self._active: SessionLife | None = None
        self._final: Final | None = None
        self._recording: MemoryRecording | None = None  # of the pool, while it is on
        self._final_memory: PoolLook | None = None  # of a recording, at the session's end
        self._threads = ""  # the CPUs that they are bound to
        self._installation: Installation | None = None

    @uncompiled
    def mark_step(self) -> None:
        """End a step by hand, in a loop without an optimizer.

        After the first call, only `mark_step` and optimizers given to the session end its steps.

        Raises:
            SessionError: the session is not active.
        """
        raise_interruption()
        if not self.is_active:
            raise SessionError(NOT_ACTIVE)
        self._require().mark_step()

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device, as when an allocation does not fit; return the bytes freed.

        Return 0 after the session's end. Freed tensors come back when backward needs them.
        """
        return 0 if (active := self._active) is None else active.rescue(needed_bytes)

    def hints(self, needed_bytes: int = 0) -> list[str]:
        """Return hints for a user whose session runs out of memory.

        Args:
            needed_bytes: the bytes in use plus those of the failed request.
        """
        return [] if (active := self._active) is None else active.hints(needed_bytes)

    def add_hint(self, advise: Callable[[int], str]) -> None:
        """Add a hint to the error message of a step that does not fit.

        Args:
            advise: takes a budget in bytes that fits the whole step as far as it is known, returns
                what to try.
        """
        self._advice.append(advise)

    def hold_weakly(self) -> None:
        """Do not keep the model and the optimizers alive: their owner may drop them meanwhile.

        For code that opens a session for objects of others. Call it before you enter the session.
        Such a session does not warn that an optimizer was not passed. A list of parts is kept.
        """
        self._config = replace(self._config, holds_weakly=True)

    def separate_lives(self) -> None:
        """Keep memory that lives unequally long apart, from the first step on."""
        self._config = replace(self._config, separates_lives=True)

    def record_memory_history(
        self, *, enabled: bool = True, max_entries: int = MOST_ENTRIES
    ) -> None:
        """Record every copy and change of the pool's bytes from now on, for `export_trace`.

        It ends with the session, which keeps the record. While it is on, each event takes less than
        a microsecond, and each copy has two more calls in its stream, which read the clock. Off, it
        costs nothing.

        Args:
            enabled: False: stop, and drop the record. True again: begin a new one.
            max_entries: of these, the latest are kept; each takes 80 bytes of the host.

        Raises:
            SessionError: the session is not active, another one records the same pool, or the
                device keeps torch's own allocator.
            InvalidArgument: `max_entries` is not a number of at least 1.

        Example:
            >>> import swapkit
            >>> with swapkit.budget("64MiB") as session:
            ...     session.record_memory_history()
        """
        if not self.is_active:
            raise SessionError(NOT_ACTIVE)
        check_entries(max_entries)  # first: a refused call leaves the present record
        life = self._require()
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        life.names.is_recorded = enabled
        if enabled:
            self._recording = MemoryRecording(life, max_entries)

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a swapkit session belongs to its process and cannot be pickled or copied: save its "
            "plan with `session.save_plan(path)`, to pass to the next one as plan=path, and its "
            "numbers from `session.metrics()`"
        )

    # ---- life ----------------------------------------------------------------------------------

    def _end_recording(self, life: SessionLife, errors: list[BaseException]) -> None:
        """Keep the record of the pool's memory as it is before the session lets go of it."""
        if self._recording is None:
            return
        try:
            self._final_memory = PoolLook(life.installation)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
        recording, self._recording = self._recording, None  # first: see `_read_memory`
        recording.stop()

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function: each call runs in a new session with these options.

        `swapkit.sessions()[-1]` is that session during the call.

        Raises:
            InvalidType: it is not a function, or other code runs in the middle of it (a generator
                or coroutine): a session sees everything that its thread does.
            SessionError: this session was entered.
        """
        self._refuse_entered()
        _check_function(function)

        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            session = Session(self._config, self._model, self._optimizers)
            session._advice = self._advice
            with session:
                return function(*args, **kwargs)

        return cast("_Function", run)

    def _refuse_entered(self) -> None:
        if self._active is not None or self._final is not None:
            raise SessionError("a session can be entered only once: call swapkit.budget(...) again")

    def __enter__(self) -> Self:
        self._refuse_entered()
        close_left()
        finish_ended()
        installation = self._installation = ensure_installation(self._config.device)
        if self._model is not None:
            installation.tracker.add_model(self._model)
        life = SessionLife(installation, self._config, self._model, self._optimizers)
        life.advice = self._advice
        if self._config.on_step is not None:  # a life never refers to its session
            life.on_step = functools.partial(_call, self._config.on_step, weakref.ref(self))
        on_loss = self._on_loss = weakref.finalize(self, life.abandon)
        on_loss.atexit = False
        self._active = life
        try:
            life.start()
            self._threads = life.threads
            if self._config.holds_weakly:
                # Only the session refers to a list of parts as one module.
                self._model = self._model if isinstance(self._model, ModelParts) else None
                self._optimizers = ()
            _list(self)
        except BaseException:  # interruptions too: `__exit__` is not called after one
            self._active = None
            on_loss.detach()
            life.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the session. Errors become notes of the exception of the block, if it raised one.

        Raises:
            RankOutOfMemory: instead of the block's exception, if it comes from a rank that ran out
                of memory, and `on_oom="all"`.
        """
        if self._active is None and self._final is None:
            self._require()
        cause = None
        if error is not None and self._active is not None:
            cause = self._active.find_cause(error)
        errors = self._end()
        if error is None:
            raise_first(errors)
        else:
            add_notes(error, "while swapkit's session ended", errors)
        raise_interruption()
        if cause is not None:
            raise cause from error

    @uncompiled
    def close(self) -> None:
        """End the session, on any thread and in any order. Safe to call twice.

        The budget is lifted at once. If another thread entered the session, the hooks on that
        thread pass tensors through until it leaves its `with` block or ends a step. Recorded graphs
        keep working.
        """
        raise_first(self._end())
        raise_interruption()

    def _end(self) -> list[BaseException]:
        """End the session; return the errors. The next call retries the undo steps that failed."""
        life = self._active
        if life is None:
            finish_ended()
            return []
        errors: list[BaseException] = []
        try:
            if self._final is None:
                self._final = Final(life.stats(), life.status(), life.history.timed_records())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
        self._end_recording(life, errors)
        errors += life.close()
        if self._final is not None and life.is_undone:
            if self._on_loss is not None:
                self._on_loss.detach()
            # From now on, only graphs that were recorded in the block keep host copies alive.
            self._active = self._model = None
            self._optimizers = ()
        return errors

    # ---- results: on any thread; those of an ended session are its last ones ---------------------

    @property
    def is_active(self) -> bool:
        """Whether the session was entered and has not ended."""
        return (active := self._active) is not None and not active.is_closed

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
        active, final = self._active, self._final  # in this order: one of them is there
        if final is not None:
            return final.stats
        return self._require().stats() if active is None else active.stats()

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
        return self._timed()[0]

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

    @waiting("swapkit: planning for other budgets, to explain this one")
    def explain(self) -> str:
        """Return a text about the session's work, its plan, and memory outside of the budget.

        With a plan, the text gives the decision for each place that saves tensors, with its reason,
        bytes and time. It also says what another budget would change.

        Raises:
            SessionError: the session was not entered yet.
        """
        from swapkit._runtime.session import reports

        stats, installation = self.stats, self._installation
        assert installation is not None
        device, tracker = installation.device, installation.tracker
        outside = find_outside(device, tracker)
        kept = reports.explain_uncollected(find_uncollected(device, tracker, stats.steps))
        advice = advise_layout(
            installation.pool.stats(), separates=installation.separates_lives, at_peak=True
        )
        threads = [self._threads] if self._threads else []
        layout = installation.layout
        places = [] if layout is None else reports.explain_layout(layout.stats())
        text = reports.explain(stats, self._find_status(), self._config.policy_name, outside)
        active = self._active
        states = [] if active is None else reports.explain_placed(active.swapper)
        regions = reports.explain_regions()
        return "\n".join([text, *regions, *states, *kept, *places, *threads, *advice])

    @waiting("swapkit: planning for other budgets and writing the report")
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
            policy=self._config.policy_name,
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
        status = self._find_status() if active is None else active.status_to_save()
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
        assert self._installation is not None
        timed, look = self._timed(), self._read_memory(self._installation)
        memory = None if look is None else look.history()
        write_trace_file(path, self._find_status(), timed, self.limit_bytes, memory)

    def _timed(self) -> tuple[tuple[StepRecord, ...], float]:
        """Return the steps so far, and when the last one ended."""
        if (active := self._active) is not None:
            return active.history.timed_records()
        return ((), 0.0) if self._final is None else self._final.timed

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
        if (active := self._active) is not None:
            return active.status()
        return PlanStatus() if self._final is None else self._final.status

    def _require(self) -> SessionLife:
        if (active := self._active) is None:
            raise SessionError(NOT_ACTIVE)
        return active


# Sessions in the order of their entry; ended ones are removed when the next one is entered.
_entered: list[weakref.ref[Session]] = []
_lock = make_fork_lock()


def sessions() -> tuple[Session, ...]:
    """Return the active sessions of all threads and devices, in the order of their entry.

    `session.close()` ends a session from any thread. A session whose handle is lost has ended.

    Example:
        >>> import swapkit
        >>> with swapkit.budget("64MiB") as session:
        ...     swapkit.sessions() == (session,)
        True
        >>> swapkit.sessions()
        ()
    """
    close_left()
    finish_ended()
    found = (reference() for reference in list(_entered))
    return tuple(each for each in found if each is not None and each.is_active)


def _call(on_step: Callable[[Session], object], found: weakref.ref[Session]) -> None:
    """Call the user's function, unless the session was lost or closed in this step."""
    session = found()
    if session is not None and session.is_active:
        on_step(session)


def _list(session: Session) -> None:
    with _lock:
        present = [each for each in _entered if (other := each()) is not None and other.is_active]
        _entered[:] = [*present, weakref.ref(session)]


def _check_function(function: object) -> None:
    """Refuse to decorate an object whose body does not run between its call and its return.

    Raises:
        InvalidType: it is not a function, or its body runs after the call.
    """
    if not callable(function) or isinstance(function, type):
        raise InvalidType(f"budget(...) decorates functions, not {show(function)}: use `with`")
    if is_suspended(function):
        raise InvalidType(
            f"budget(...) cannot decorate {show(function)}: its body runs after the call, "
            "interleaved with other code, which the budget would also cover. Use `with "
            "swapkit.budget(...):` inside, around code that neither yields nor awaits"
        )
