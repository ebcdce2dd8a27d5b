"""A session from its entry to its end, also one that ends with the call it belongs to."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from swapkit._native.layout import TAG_OPTIMIZER, LivesMode
from swapkit._native.pool import RingKind, set_tag
from swapkit._runtime.affinity.threads import ThreadBinding
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.control.plan_controller import PlanController
from swapkit._runtime.control.plan_maker import spare_bytes
from swapkit._runtime.control.plan_status import PlanStatus, log_progress
from swapkit._runtime.control.rank_alarm import ALL, RankWatch
from swapkit._runtime.control.session_config import RESCUE, SessionConfig
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.ranks import is_fsdp
from swapkit._runtime.model.step_counter import OPTIMIZER_STEP, StepCounter
from swapkit._runtime.model.tracker import NO_MODULE, NamesIfShort, Need
from swapkit._runtime.process.captures import see_everything
from swapkit._runtime.process.undo import Undo, raise_first
from swapkit._runtime.saved.eviction import EvictionTerms
from swapkit._runtime.saved.hooks import Hooks, pop_left
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.saved.weights import is_distributed
from swapkit._runtime.session.hints import Shortage, find_planned_bytes, list_facts, list_hints
from swapkit._runtime.session.history import StepHistory, predictions
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.isolation import make_fork_lock
from swapkit._runtime.torch_compat.thread_stacks import stacks
from swapkit._runtime.user_choices.wrapping import part_of
from swapkit.ir.plans import Action
from swapkit.ir.runs import SessionStats
from swapkit.planning.selection.cases import NO_PLAN, Stage
from swapkit.texts import get_logger
from swapkit.units import format_bytes

if TYPE_CHECKING:
    import torch

MOVES_WEIGHTS = frozenset({"auto", "swap", RESCUE})  # the policies that do
WEIGHTS = "weights leave the device in a session around this one"

# ---- life ----------------------------------------------------------------------------------------
#
# A session from its entry to its end.
#
# A `SessionLife` does the work: it limits the pool, sees saved tensors and steps, and ends. The
# user's `Session` refers to its life, never the other way round. So losing the `Session` ends it.
#
# Ending a session has two parts. The budget and all other state of the process is undone at once,
# on the thread that ends the session. Autograd hooks, dispatch modes and the plan in use belong to
# the thread that entered. That thread removes them at the end of its step, or when it next enters
# or leaves a session. Until then the hooks pass tensors through.

_log, _rescue_log = get_logger("session"), get_logger("rescue")


class SessionLife:
    """One session while it is active, as the installation sees it."""

    def __init__(
        self,
        installation: Installation,
        config: SessionConfig,
        model: torch.nn.Module | None,
        optimizers: tuple[torch.optim.Optimizer, ...],
    ) -> None:
        """Prepare; nothing changes before `start`."""
        self.installation = installation
        self.limit_bytes = config.limits.budget_bytes
        device = installation.device
        self.swapper = installation.runtime.new_swapper(
            device,
            device.new_scheduler(config.limits),
            EvictionTerms(self.limit_bytes, config.min_swap_bytes, config.rescue_multiple),
        )
        self.swapper.train(model, *optimizers)
        self.hooks = Hooks(self.swapper, Placement(Action.AUTO, min_bytes=config.min_swap_bytes))
        self.swapper.events = self.hooks.packer
        self.controller: PlanController | None = None
        self.is_closed = False
        self._config = config
        self._model = model
        self._optimizers = optimizers
        self._counter = StepCounter(
            model,
            optimizers,
            self._end_step,
            is_here=lambda: self.swapper in thread_state.sessions,
            rebase=installation.tracker.rebase,
            tag=installation.tracker.tag_named(OPTIMIZER_STEP) | TAG_OPTIMIZER,
        )
        self._counter.warns = not config.holds_weakly
        self.thread = threading.current_thread()
        self._of_process = Undo()
        self._of_thread = Undo()
        self._closing = threading.RLock()
        self.history = StepHistory(self.swapper)
        self.on_step: Callable[[], object] | None = None  # the user's, after each step
        self.advice: list[Callable[[int], str]] = []  # the user's hints, given a budget that fits
        self._began_bytes = installation.pool.in_use_bytes()
        self.threads = ""  # where they run, if they are bound
        self._ranks: RankWatch | None = None  # None: other ranks go on when one fails
        self.names = NamesIfShort(installation.tracker)

    # ---- status and steps ------------------------------------------------------------------------

    def status(self) -> PlanStatus:
        """Return the status of the search for a plan."""
        return self._without_plan() if self.controller is None else self.controller.status()

    def status_to_save(self) -> PlanStatus:
        """Return the status with the best plan so far; wait for a plan in the making."""
        return self._without_plan() if self.controller is None else self.controller.status_to_save()

    def _without_plan(self) -> PlanStatus:
        is_asked = self._config.plans and self._is_inside_streaming
        return PlanStatus(why_none=WEIGHTS, progress=NO_PLAN) if is_asked else PlanStatus()

    @property
    def _is_inside_streaming(self) -> bool:
        """Whether weights leave the device in a session around this one."""
        installation = self.installation
        swappers = installation.runtime.swappers(installation.device)
        return any(each.mover.held[0] for each in swappers if each is not self.swapper)

    def stats(self) -> SessionStats:
        """Return the statistics so far."""
        self.note_peak()
        counters, moved = self.swapper.counters(), self.swapper.scheduler.stats()
        status = self.status()
        return SessionStats(
            budget_bytes=self.limit_bytes,
            peak_bytes=self.history.peak_bytes,
            steps=self.history.steps,
            oom_rescues=counters.rescues,
            swapped_out_bytes=counters.copied_out_bytes,
            swapped_in_bytes=counters.copied_in_bytes,
            recomputed_regions=counters.recomputed,
            stall_seconds=counters.stall_seconds,
            host_peak_bytes=moved.host_peak_bytes,
            disk_peak_bytes=moved.disk_peak_bytes,
            replans=status.replans,
            step_seconds=status.step_seconds,
            **predictions(status),  # type: ignore[arg-type]
        )

    def mark_step(self) -> None:
        """End a step by hand."""
        if self._counter.mark():
            self._end_step()

    def _end_step(self) -> None:
        """End a step, on the thread that ran it, with no lock held.

        What other ranks have to say and `on_step` come last: what they raise reaches the caller of
        the optimizer, with all done.
        """
        self.swapper.end_step()
        set_tag(NO_MODULE)  # backward left the tag of its last module
        nested = self.installation.nested_with(self)
        is_pools = nested[-1:] == [self]  # a pool gets one mark for each step of a thread
        if is_pools:
            self.installation.pool.note(RingKind.MARK, self.history.steps)
        self.note_peak()
        controller = self.controller
        record = self.history.end_step(Stage.STABLE if controller is None else controller.stage)
        _log_rescues(record.step, record.rescues)
        if controller is None:
            in_use_bytes = self.installation.pool.in_use_bytes()
            self.names.end_step(in_use_bytes, is_short=record.rescues > 0)
        else:
            controller.end_step()
            if controller.note_progress(self.history.steps):
                log_progress(self.status(), self.limit_bytes)
        if is_pools and self.installation.layout is not None:
            is_settled = all(each.is_settled for each in nested)
            self.installation.layout.end_step(is_settled=is_settled)
        finish_ended()
        if self._ranks is not None:
            self._ranks.end_step()
        if self.on_step is not None:
            self.on_step()

    # ---- for the installation: any thread --------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the next steps are expected to be like the last one."""
        controller = self.controller
        return controller is None or controller.stage is Stage.STABLE

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device; return the bytes freed."""
        return self.swapper.rescue_bytes(needed_bytes)

    def hints(self, needed_bytes: int) -> list[str]:
        """Return hints for a user whose session runs out of memory.

        Args:
            needed_bytes: the bytes in use plus those of the failed request.
        """
        shortage = Shortage(
            needed_bytes,
            self._began_bytes,
            spare_bytes(self.swapper.device),
            find_planned_bytes(self.status(), self._config.policy),
        )
        return list_hints(self.swapper, self._config, shortage, self.advice)

    def facts(self) -> list[str]:
        """Return sentences about what the session could not free."""
        return list_facts(self.swapper)

    def note_peak(self) -> None:
        """Add the pool's peak since the last call to every active session."""
        if self.is_closed:
            return
        peak_bytes = self.installation.pool.peak_take()
        for session in self.installation.sessions:
            session.add_peak(peak_bytes)

    def add_peak(self, peak_bytes: int) -> None:
        """Note a peak of reserved bytes while the session was active."""
        self.history.add_peak(peak_bytes)

    def find_cause(self, error: BaseException) -> BaseException | None:
        """Return the failure of a rank that made this one fail with an error; None: none did."""
        return None if self._ranks is None else self._ranks.find_cause(error)

    # ---- beginning -------------------------------------------------------------------------------

    def start(self) -> None:
        """Apply the budget and begin to see saved tensors and steps; undo all if one part fails."""
        finish_ended()
        try:
            self._start_process()
            self._start_thread()
        except BaseException:
            for undo in (self._of_thread, self._of_process):
                for error in undo.run():
                    _log.error("cleanup failed after a session could not begin", exc_info=error)
            raise

    def _start_process(self) -> None:
        installation, undo = self.installation, self._of_process
        self._bind_threads()
        for other in installation.sessions:
            other.note_peak()
        undo.add(self.swapper.scheduler.trim)
        self._hold_weights()
        undo.add(lambda: installation.leave(self))
        installation.enter(self)
        installation.pool.peak_take()  # discard the peak from before the session
        self.history.begin()
        if installation.layout is not None:
            undo.add(functools.partial(installation.layout.stop, self))
            separates = self._config.separates_lives
            installation.layout.start(self, LivesMode.SEPARATE if separates else LivesMode.NOTED)
        if self._config.on_oom == ALL:
            self._ranks = RankWatch(installation, self.limit_bytes)
            undo.add(self._ranks.end)
        undo.add(self._counter.stop)  # drops the reference to this life
        self._counter.start()
        for swappers in (thread_state.sessions, installation.runtime.active):
            undo.add(functools.partial(_remove, swappers, self.swapper))
            swappers.append(self.swapper)
        self.swapper.weights.take_rest()

    def _hold_weights(self) -> None:
        """Let weights leave when memory runs out: now, if more than the limit is in use."""
        model, installation, swapper = self._model, self.installation, self.swapper
        is_moved = self._config.policy in MOVES_WEIGHTS and installation.pool.address != 0
        if not is_moved or installation.sessions or (model is not None and is_fsdp(model)):
            return
        is_needed = installation.pool.in_use_bytes() > self.limit_bytes
        if is_needed or not is_distributed():
            self._of_process.add(swapper.weights.stop)
            swapper.weights.start(
                model,
                self.limit_bytes,
                is_here=lambda: swapper in thread_state.sessions,
                is_kept=_is_kept,
            )
        if is_needed:
            with installation.lock:
                swapper.weights.adopt()

    def _bind_threads(self) -> None:
        """Bind the threads that work for the device to CPUs near it, if that is asked for."""
        installation, asked = self.installation, self._config.cpu_affinity
        if asked is None:
            return
        choice = installation.runtime.places.choose(installation.device.name, asked)
        if choice is None:
            return
        self.threads = choice.text
        _log.log(logging.WARNING if choice.is_shortfall else logging.INFO, "%s", choice.text)
        if choice.cpus is not None:
            binding = ThreadBinding(choice.cpus, installation.device.index)
            self._of_process.add(binding.undo)  # first: an interrupt may come between
            binding.apply()

    def _start_thread(self) -> None:
        installation, undo = self.installation, self._of_thread
        undo.add(functools.partial(installation.tracker.stop, self.names))
        installation.tracker.start(self.names, Need.NAMES)
        undo.add(self.hooks.leave)
        self.hooks.enter()
        model = self._model
        if self._config.is_host_scarce and not (model and is_fsdp(model)):
            evictor = self.swapper.evictor
            see_everything()
            self._of_process.add(evictor.end_standby)
            evictor.prepare_standby()
        if self._config.plans and not self._is_inside_streaming:
            controller = PlanController(
                installation, self.hooks, self._model, self._optimizers, self._config
            )
            undo.add(controller.stop)
            self.controller = controller
            controller.start()
        self._model, self._optimizers = None, ()  # the `Session` holds them while it is active

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def is_own(self) -> bool:
        """Whether this thread undoes the thread part: it entered, or the thread that did ended."""
        return threading.current_thread() is self.thread or not self.thread.is_alive()

    def close(self) -> list[BaseException]:
        """End the session, on any thread. Recorded graphs keep working. A second call retries.

        Returns:
            The errors raised. All steps that did not fail are undone.
        """
        with self._closing:
            is_own = self.is_own
            if not is_own and self not in _ending:  # first: the code below may raise
                _ending.append(self)
                global_hooks.steps.add(_finisher)
            self.note_peak()
            self._go_inert()
            errors = self._undo()
            if errors:  # again: `with` ends a session once, and an interruption passes
                errors += self._undo()
            if not is_own and self.controller is not None:
                self.controller.drop()
        return errors

    @property
    def is_undone(self) -> bool:
        """Whether nothing is left to undo for the thread that closes the session."""
        return self._of_process.is_done and (self._of_thread.is_done or not self.is_own)

    def _undo(self) -> list[BaseException]:
        return [*(self._of_thread.run() if self.is_own else ()), *self._of_process.run()]

    def abandon(self) -> None:
        """End because the user's `Session` was garbage-collected.

        The interpreter calls this at any point on any thread, so it never waits for a lock.
        """
        self._go_inert()
        _ending.append(self)
        lock = self.installation.lock
        if lock.is_owned() or not lock.acquire(blocking=False):
            return  # the lock is in use; `finish_ended` undoes the rest at the end of a step
        try:
            self.installation.leave(self)
        finally:
            lock.release()
        level = logging.INFO if self.history.steps else logging.WARNING
        _log.log(
            level,
            "a session with a budget of %s has ended because its handle was deleted. Keep the "
            "`session` of `with swapkit.budget(...) as session` as long as you need it",
            format_bytes(self.limit_bytes),
        )

    def _go_inert(self) -> None:
        self.is_closed = True
        self.hooks.packer.is_inert = True
        if self.controller is not None:
            self.controller.give_up()

    def finish(self) -> bool:
        """Undo the parts that this thread may undo; return whether nothing is left.

        Errors are logged, because this step belongs to other code. Interruptions are raised.
        """
        with self._closing:
            is_own, errors = self.is_own, self._undo()
        for error in errors:
            if isinstance(error, Exception):
                _log.error("cleanup failed after a session ended", exc_info=error)
        raise_first([error for error in errors if not isinstance(error, Exception)])
        return is_own and not errors


def _is_kept(module: torch.nn.Module) -> bool:
    part = part_of(module)
    return part is not None and part.judgement.keep


class _Finisher:
    """Undoes a thread's part of ended sessions after its steps. Listens while parts are left."""

    def before_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: nothing is undone in the middle of a step."""

    def after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Undo this thread's part, with no lock held."""
        finish_ended()


_finisher = _Finisher()
# Ended lives with a part that only their own thread can undo.
_ending: list[SessionLife] = []


def finish_ended() -> None:
    """Undo this thread's part of sessions that ended on other threads."""
    ended = list(_ending)
    for life in ended:
        if life.finish():
            with suppress(ValueError):  # another thread removed it first
                _ending.remove(life)
    if ended and not _ending:
        global_hooks.steps.remove(_finisher)
    pop_left()


def _remove(swappers: list[Swapper], swapper: Swapper) -> None:
    """Remove a swapper from a list, if it is there: an undo step may run twice."""
    with suppress(ValueError):
        swappers.remove(swapper)


# ---- bound ---------------------------------------------------------------------------------------
#
# Sessions that end with the call that they belong to.
#
# A library's training loop may end with an exception and tell nobody. A session that a callback
# opened inside such a loop is bound to the call that runs the loop. It is closed when that call is
# no longer on the stack: by the next question about sessions on any thread, or by a thread that
# looks every `PERIOD_SECONDS`.

PERIOD_SECONDS = 0.2


class Closable(Protocol):
    """A session."""

    limit_bytes: int

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""

    def close(self) -> None:
        """End it, on any thread."""


class _BoundSession:
    """A session, and the call that it must not outlive."""

    def __init__(self, session: Closable, frame: FrameType) -> None:
        self.session = weakref.ref(session)
        self._thread = threading.get_ident()
        # Not the frame itself: it would keep the loop's tensors alive. The interpreter keeps a
        # frame object for as long as its call runs.
        self._frame = id(frame)
        self._code = frame.f_code

    def is_running(self) -> bool:
        """Return whether the call runs. Any thread; no lock."""
        if threading.get_ident() != self._thread:
            # A second run of the same function, on yet another thread, hides that this one ended.
            return any(code is self._code for stack in stacks() for code, _ in stack)
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - 0 would hold itself
        while frame is not None and (id(frame) != self._frame or frame.f_code is not self._code):
            frame = frame.f_back
        return frame is not None


_bound: list[_BoundSession] = []
_watchers: list[threading.Thread] = []  # at most one
_lock = make_fork_lock()


def bind(session: Closable, frame: FrameType) -> None:
    """End a session when a call has ended, if it is still active then.

    Args:
        session: an active session of this thread.
        frame: of the call, which runs on this thread.
    """
    with _lock:
        _bound[:] = [each for each in _bound if _is_active(each)]
        _bound.append(_BoundSession(session, frame))
        if not _watchers or not _watchers[0].is_alive():  # after a fork, too
            _watchers[:] = [threading.Thread(target=_watch, name="swapkit-loops", daemon=True)]
            _watchers[0].start()


def close_left() -> None:
    """Close the sessions whose calls have ended. Any thread that holds no lock."""
    for each in tuple(_bound):  # another thread may change the list
        session = each.session()
        if session is not None and session.is_active and not each.is_running():
            _close(session)


def _close(session: Closable) -> None:
    """Close a session; errors are logged, because the code that runs now is not its own."""
    _log.warning(
        "a training loop has ended without its end, most likely by an exception: its budget of %s "
        "is lifted",
        format_bytes(session.limit_bytes),
    )
    try:
        session.close()
    except Exception:  # noqa: BLE001 - of any kind
        _log.exception("cleanup failed after a session ended")


def _watch() -> None:
    """Close sessions on a thread of its own, until none is left."""
    pause = threading.Event()
    while True:
        pause.wait(PERIOD_SECONDS)
        with contextlib.suppress(RuntimeError):  # stacks cannot be read now
            close_left()
        with _lock:
            _bound[:] = [each for each in _bound if _is_active(each)]
            if not _bound:
                _watchers.clear()
                return


def _is_active(bound: _BoundSession) -> bool:
    session = bound.session()
    return session is not None and session.is_active


def _log_rescues(step: int, rescues: int) -> None:
    if rescues:
        _rescue_log.debug("step %d: %d rescues", step, rescues)
