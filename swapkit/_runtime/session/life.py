"""A session from its entry to its end.

A `SessionLife` acts: it limits the pool, sees saved tensors and steps, and ends. The `Session` that
users hold refers to its life, never the other way round, so that a handle that is lost ends the
session.

What a life has done is taken back in two parts. The limit and everything else that belongs to the
process goes at once, on whichever thread the session is ended. Hooks of autograd, dispatch modes
and the plan that is being followed belong to the thread that entered: it takes them back itself, at
the end of its step or when it next enters or leaves a session. Until then the hooks pass through.
"""

from __future__ import annotations

import functools
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from swapkit._native.pool import RingKind, set_tag
from swapkit._runtime.control.plan_controller import PlanController
from swapkit._runtime.control.plan_status import PlanStatus
from swapkit._runtime.control.step_counter import StepCounter
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.device_mesh import is_fsdp
from swapkit._runtime.model.tracker import NO_MODULE, Need
from swapkit._runtime.process.captures import see_everything
from swapkit._runtime.process.undo import Undo
from swapkit._runtime.saved.hooks import Hooks, pop_left
from swapkit._runtime.session.stats import SessionStats, predictions
from swapkit._runtime.shim.placement import Placement
from swapkit._runtime.thread_state import thread_state
from swapkit.ir.plans import Action
from swapkit.units import format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit._runtime.saved.swapper import Swapper

_log = logging.getLogger(__name__)
OPTIMIZER_STEP = "an optimizer's step"  # the name of what is allocated there


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
            device, device.new_scheduler(config.limits), limit_bytes=self.limit_bytes
        )
        self.swapper.train(model, *optimizers)
        self.swapper.rescue.multiple = config.rescue_multiple
        self.swapper.rescue.min_bytes = config.min_swap_bytes
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
            tag=installation.tracker.tag_named(OPTIMIZER_STEP),
        )
        self._thread = threading.current_thread()
        self._entered = thread_state.sessions  # this thread's
        self._of_process = Undo()
        self._of_thread = Undo()
        self._closing = threading.RLock()
        self._steps = 0
        self._peak_bytes = 0
        self.advice: list[Callable[[int], str]] = []  # the user's own, given the bytes needed

    # ---- what it has done ------------------------------------------------------------------------

    def status(self) -> PlanStatus:
        """Return where the search for a plan stands."""
        return PlanStatus() if self.controller is None else self.controller.status()

    def status_to_save(self) -> PlanStatus:
        """Likewise, with the best plan so far: waits for one that is being made."""
        return PlanStatus() if self.controller is None else self.controller.status_to_save()

    def stats(self) -> SessionStats:
        """Return what has been done so far."""
        self.note_peak()
        moved = self.swapper.scheduler.stats()
        status = self.status()
        return SessionStats(
            budget_bytes=self.limit_bytes,
            peak_bytes=self._peak_bytes,
            steps=self._steps,
            oom_rescues=self.swapper.rescue.count,
            swapped_out_bytes=moved.copied_out_bytes,
            swapped_in_bytes=moved.copied_in_bytes,
            recomputed_regions=self.swapper.recomputed_regions,
            stall_seconds=moved.stall_ns / 1e9,
            host_peak_bytes=moved.host_peak_bytes,
            disk_peak_bytes=moved.disk_peak_bytes,
            replans=status.replans,
            step_seconds=status.step_seconds,
            **predictions(status),  # type: ignore[arg-type]
        )

    def mark_step(self) -> None:
        """End a step, because the user says so."""
        if self._counter.mark():
            self._end_step()

    def _end_step(self) -> None:
        """End a step, on the thread that took it."""
        self.swapper.end_step()
        set_tag(NO_MODULE)  # backward left its last module's
        self.installation.pool.note(RingKind.MARK, self._steps)
        self._steps += 1
        if self.controller is not None:
            self.controller.end_step()
        finish_ended()

    # ---- for the installation: any thread --------------------------------------------------------

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device; return how many, 0 for none."""
        return self.swapper.rescue_bytes(needed_bytes)

    def hints(self, needed_bytes: int) -> list[str]:
        """Return what a user could do when memory is out in this session.

        Args:
            needed_bytes: of the device, for the request that failed beside what is in use.
        """
        hints = [advise(needed_bytes) for advise in self.advice]
        kept_bytes = self.swapper.resident_bytes()
        if self.swapper.mover.host_is_full:
            hints.append(self._advise_host(kept_bytes))
        if kept_bytes:
            hints.append(
                f"{format_bytes(kept_bytes)} of saved tensors are still on the device, held by the "
                "running operator, other references, or below min_swap_bytes"
            )
        larger = "a larger one"
        if needed_bytes > self.limit_bytes:
            larger = f"at least {format_limit(needed_bytes)}, if nothing else can be freed"
        hints.append(
            "parameters, gradients, optimizer states and the running operator must fit the budget: "
            f"give {larger}, or a smaller batch or sequence"
        )
        return hints

    def _advise_host(self, kept_bytes: int) -> str:
        limit = self._config.limits.host_bytes
        if limit is None:
            return "the host has no room for more copies: give a folder as disk="
        return (
            f"the host has no room for more copies ({format_bytes(limit)}): raise host_limit; the "
            f"next to try is {format_limit(limit + kept_bytes)}"
        )

    def note_peak(self) -> None:
        """Count the pool's peak since it was last asked for every session that is active."""
        if self.is_closed:
            return
        peak_bytes = self.installation.pool.peak_take()
        for session in self.installation.sessions:
            session.add_peak(peak_bytes)

    def add_peak(self, peak_bytes: int) -> None:
        """Note that so many bytes were reserved while the session was active."""
        self._peak_bytes = max(self._peak_bytes, peak_bytes)

    # ---- beginning -------------------------------------------------------------------------------

    def start(self) -> None:
        """Apply the limit and begin to see saved tensors and steps; all of it or nothing."""
        finish_ended()
        try:
            self._start_process()
            self._start_thread()
        except BaseException:
            for undo in (self._of_thread, self._of_process):
                for error in undo.run():
                    _log.error("while a session that could not begin was undone", exc_info=error)
            raise

    def _start_process(self) -> None:
        installation, undo = self.installation, self._of_process
        for other in installation.sessions:
            other.note_peak()
        undo.add(self.swapper.scheduler.trim)
        undo.add(lambda: installation.leave(self))
        installation.enter(self)
        installation.pool.peak_take()  # what was reserved before does not count here
        undo.add(self._counter.stop)  # which lets go of this life
        self._counter.start()
        for swappers in (self._entered, installation.runtime.active):
            undo.add(functools.partial(_remove, swappers, self.swapper))
            swappers.append(self.swapper)

    def _start_thread(self) -> None:
        installation, undo = self.installation, self._of_thread
        tracker = installation.tracker
        user = object()
        undo.add(functools.partial(tracker.stop, user))
        tracker.start(user, Need.NAMES)
        undo.add(self.hooks.leave)
        self.hooks.enter()
        model = self._model
        if self._config.is_host_scarce and not (model and is_fsdp(model)):
            rescue = self.swapper.rescue
            see_everything()
            self._of_process.add(rescue.end_standby)
            rescue.prepare_standby()
        if self._config.plans:
            controller = PlanController(
                installation, self.hooks, self._model, self._optimizers, self._config
            )
            undo.add(controller.stop)
            self.controller = controller
            controller.start()
        self._model, self._optimizers = None, ()  # the session holds them while it is active

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def is_own(self) -> bool:
        """Whether this thread may take back what the one that entered has: nobody else would."""
        return threading.current_thread() is self._thread or not self._thread.is_alive()

    def close(self) -> list[BaseException]:
        """End, from any thread; the graphs recorded so far keep working. Again: what failed.

        Returns:
            What was raised on the way. All that could be taken back was.
        """
        with self._closing:
            is_own = self.is_own
            if not is_own and self not in _ending:  # before anything that may raise
                _ending.append(self)
                global_hooks.steps.add(_finisher)
            self.note_peak()
            self._go_inert()
            errors = self._of_thread.run() if is_own else []
            errors += self._of_process.run()
            if not is_own and self.controller is not None:
                self.controller.drop()
        return errors

    def abandon(self) -> None:
        """End because the session's handle is gone.

        The interpreter calls this anywhere, on any thread: nothing here waits for a lock.
        """
        self._go_inert()
        _ending.append(self)
        lock = self.installation.lock
        if lock.is_owned() or not lock.acquire(blocking=False):
            return  # in the middle of something that must not change; whoever ends a step goes on
        try:
            self.installation.leave(self)
        finally:
            lock.release()
        level = logging.INFO if self._steps else logging.WARNING
        _log.log(
            level,
            "a session with a budget of %s has ended: its handle is gone. Keep what "
            "`with swapkit.budget(...) as session` gives for as long as it is to hold",
            format_bytes(self.limit_bytes),
        )

    def _go_inert(self) -> None:
        self.is_closed = True
        self.hooks.packer.is_inert = True
        if self.controller is not None:
            self.controller.give_up()

    def finish(self) -> bool:
        """Take back what this thread may; return whether nothing is left."""
        with self._closing:
            is_own = self.is_own
            errors = self._of_thread.run() if is_own else []
            errors += self._of_process.run()
        for error in errors:
            _log.error("while a session that has ended was undone", exc_info=error)
        return is_own


class _Finisher:
    """Lets each thread that steps take back what is its own. A listener while something is left."""

    def before_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Nothing is taken back in the middle of a step."""

    def after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """On the thread that steps, with no lock held."""
        finish_ended()


_finisher = _Finisher()
# Lives that have ended and left something behind that only their own thread takes back.
_ending: list[SessionLife] = []


def finish_ended() -> None:
    """Take back what lives that have ended elsewhere have left on this thread."""
    ended = list(_ending)
    for life in ended:
        if life.finish():
            with suppress(ValueError):  # another thread was faster
                _ending.remove(life)
    if ended and not _ending:
        global_hooks.steps.remove(_finisher)
    pop_left()


def _remove(swappers: list[Swapper], swapper: Swapper) -> None:
    """Take a swapper out of a list, if it is there: a step of undoing may run twice."""
    with suppress(ValueError):
        swappers.remove(swapper)
