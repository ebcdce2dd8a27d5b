"""The user's handle for a training run inside a budget."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from swapkit._native.lib import raise_interruption
from swapkit._runtime.allocators.advice import advise_layout
from swapkit._runtime.allocators.installation import ensure_installation
from swapkit._runtime.allocators.memory_holders import find_outside, find_uncollected
from swapkit._runtime.control.plan_status import PlanStatus
from swapkit._runtime.process.undo import add_notes, raise_first
from swapkit._runtime.session.explanation import explain, explain_layout, explain_uncollected
from swapkit._runtime.session.life import SessionLife, finish_ended
from swapkit._runtime.session.stats import list_metrics, summarize
from swapkit._runtime.torch_compat.fork_locks import make_fork_lock
from swapkit._runtime.user_choices.wrapping import is_suspended
from swapkit.errors import InvalidType, SessionError
from swapkit.ir.codec import write_planned
from swapkit.units import format_bytes, show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType
    from typing import SupportsIndex

    import torch
    from typing_extensions import Self

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit._runtime.session.stats import SessionStats
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

_Function = TypeVar("_Function", bound="Callable[..., Any]")
_NOT_ACTIVE = "this session is not active: use `with swapkit.budget(...) as s:`"


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
        self._active: SessionLife | None = None
        self._final: SessionStats | None = None
        self._status = PlanStatus()
        self._threads = ""  # the CPUs that they are bound to
        self._advice: list[Callable[[int], str]] = []
        self._on_loss: weakref.finalize[[], Self] | None = None
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
    def plan(self) -> Plan | None:
        """The decision for each saved tensor; None while there is no plan."""
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

    def mark_step(self) -> None:
        """End a step by hand, in a loop without an optimizer.

        After the first call, only `mark_step` and optimizers given to the session end its steps.

        Raises:
            SessionError: the session is not active.
        """
        raise_interruption()
        if not self.is_active:
            raise SessionError(_NOT_ACTIVE)
        self._require().mark_step()

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
        texts = [text, *uncollected, *places, *threads, *advice]
        return "\n".join(texts)

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
            why = status.why_none or f"the session is still in stage {status.stage.value!r}"
            raise SessionError(f"there is no plan to save: {why}")
        write_planned(path, status.trace, status.plan)

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device, as when an allocation does not fit; return the bytes freed.

        Return 0 after the session's end. Freed tensors come back when backward needs them.
        """
        return 0 if self._active is None else self._active.rescue(needed_bytes)

    def hints(self, needed_bytes: int = 0) -> list[str]:
        """Return hints for a user whose session runs out of memory.

        Args:
            needed_bytes: the bytes in use plus those of the failed request.
        """
        return [] if self._active is None else self._active.hints(needed_bytes)

    def add_hint(self, advise: Callable[[int], str]) -> None:
        """Add a hint to the error message of a step that does not fit.

        Args:
            advise: takes the needed bytes of the device, returns what to try.
        """
        self._advice.append(advise)

    def separate_lives(self) -> None:
        """Keep memory that lives unequally long apart, from the first step on."""
        self._config = replace(self._config, separates_lives=True)

    def __repr__(self) -> str:
        if self._active is None and self._final is None:
            return f"<swapkit session, budget {format_bytes(self.limit_bytes)}, not entered>"
        state = self.stage if self.is_active else "ended"
        return f"<swapkit session, {summarize(self.stats, state)}>"

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a swapkit session belongs to its process and cannot be pickled or copied: save its "
            "plan with `session.save_plan(path)`, to pass to the next one as plan=path, and its "
            "numbers from `session.metrics()`"
        )

    def _look(self) -> PlanStatus:
        """Return the status of the search for a plan."""
        return self._status if self._active is None else self._active.status()

    @property
    def _policy_name(self) -> str:
        policy = self._config.policy
        return policy if isinstance(policy, str) else type(policy).__name__

    # ---- life ----------------------------------------------------------------------------------

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
        finish_ended()
        installation = self._installation = ensure_installation(self._config.device)
        if self._model is not None:
            installation.tracker.add_model(self._model)
        life = SessionLife(installation, self._config, self._model, self._optimizers)
        life.advice = self._advice
        on_loss = self._on_loss = weakref.finalize(self, life.abandon)
        on_loss.atexit = False
        self._active = life
        try:
            life.start()
            self._threads = life.threads
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
        """End the session. Errors become notes of the exception of the block, if it raised one."""
        if self._active is None and self._final is None:
            self._require()
        errors = self._end()
        if error is None:
            raise_first(errors)
        else:
            add_notes(error, "while swapkit's session ended", errors)
        raise_interruption()

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
                self._final, self._status = life.stats(), life.status()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
        errors += life.close()
        if self._final is not None and life.is_undone:
            if self._on_loss is not None:
                self._on_loss.detach()
            # From now on, only graphs that were recorded in the block keep host copies alive.
            self._active = self._model = None
            self._optimizers = ()
        return errors

    def _require(self) -> SessionLife:
        if self._active is None:
            raise SessionError(_NOT_ACTIVE)
        return self._active


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
    finish_ended()
    found = (reference() for reference in list(_entered))
    return tuple(each for each in found if each is not None and each.is_active)


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
