"""A training run inside a budget."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._native.lib import raise_interruption
from swapkit._native.pool import RingKind, set_tag
from swapkit._runtime.allocators import ensure_installation
from swapkit._runtime.choice import Action, Choice
from swapkit._runtime.course import Course
from swapkit._runtime.explaining import explain
from swapkit._runtime.holders import find_outside
from swapkit._runtime.hooks import Hooks
from swapkit._runtime.steering import Steering
from swapkit._runtime.tracking import NO_MODULE
from swapkit.errors import SessionError
from swapkit.ir.codec import write_planned
from swapkit.units import format_bytes

if TYPE_CHECKING:
    import os
    from pathlib import Path
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from swapkit._runtime.installation import Installation
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.planner import Policy
    from swapkit.reporting.text import Holder

_log = logging.getLogger(__name__)
RESCUE = "rescue"  # the policy without a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """What a session has done so far. Peaks are of reserved bytes; counters accumulate.

    `recomputed_regions` counts every time that a part, or a single operator, was recomputed.
    `step_seconds` is the median of the latest steps, each from its first forward on; what is
    predicted is for the plan that is followed: None where there is none. No plan for the budget
    takes less than `bound_step_seconds`; without a budget it would be `unlimited_step_seconds`.
    """

    budget_bytes: int
    peak_bytes: int
    steps: int
    oom_rescues: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    recomputed_regions: int
    stall_seconds: float
    host_peak_bytes: int
    disk_peak_bytes: int
    replans: int = 0
    step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    bound_step_seconds: float | None = None
    unlimited_step_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What a session was asked for. Limits of 0: what the machine has."""

    device: torch.device
    limit_bytes: int
    host_limit_bytes: int
    min_swap_bytes: int
    rescue_multiple: int = 1
    disk: Path | None = None
    disk_limit_bytes: int = 0
    policy: str | Policy = RESCUE
    profile_steps: int = 2
    search_steps: int = 4
    saved_plan: tuple[Trace, Plan] | None = None


class Session:
    """The object that `with swapkit.budget(...)` gives. Entered once."""

    def __init__(
        self,
        config: SessionConfig,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.limit_bytes = config.limit_bytes
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._active: _Active | None = None
        self._final: SessionStats | None = None
        self._course = Course()
        self._outside: list[Holder] = []
        self._advice: list[str] = []
        self._peak_bytes = 0
        self._steps = 0

    @property
    def stage(self) -> str:
        """`"warmup"`, `"search"` or `"stable"`: a session without a plan is always stable."""
        return self._look().stage.value

    @property
    def plan(self) -> Plan | None:
        """What is done with each saved tensor; None while there is no plan."""
        return self._look().plan

    @property
    def trace(self) -> Trace | None:
        """The recorded step that the plan is for; None before one was recorded."""
        return self._look().trace

    @property
    def stats(self) -> SessionStats:
        """What has been done so far; after the block, until its end.

        Raises:
            SessionError: the session was not entered yet.
        """
        if self._final is not None:
            return self._final
        active = self._require()
        self.note_peak()
        moved = active.swapper.scheduler.stats()
        course = self._look()
        plan = course.plan
        predicted = None if plan is None else plan.prediction
        return SessionStats(
            budget_bytes=self.limit_bytes,
            peak_bytes=self._peak_bytes,
            steps=self._steps,
            oom_rescues=active.swapper.rescue.count,
            swapped_out_bytes=moved.copied_out_bytes,
            swapped_in_bytes=moved.copied_in_bytes,
            recomputed_regions=active.swapper.recomputed_regions,
            stall_seconds=moved.stall_ns / 1e9,
            host_peak_bytes=moved.host_peak_bytes,
            disk_peak_bytes=moved.disk_peak_bytes,
            replans=course.replans,
            step_seconds=course.step_seconds,
            predicted_step_seconds=None if predicted is None else predicted.seconds,
            predicted_peak_bytes=None if predicted is None else predicted.peak_bytes,
            bound_step_seconds=None if plan is None else plan.bound_seconds,
            unlimited_step_seconds=(
                None if plan is None or course.trace is None else course.trace.seconds * course.pace
            ),
        )

    def mark_step(self) -> None:
        """End a step by hand, in a loop that has no optimizer or did not name it.

        Raises:
            SessionError: the session is not active.
        """
        raise_interruption()
        active = self._require()
        active.swapper.end_step()
        set_tag(NO_MODULE)  # backward left its last module's
        active.installation.pool.note(RingKind.MARK, self._steps)
        self._steps += 1
        if active.steering is not None:
            active.steering.end_step()

    def explain(self) -> str:
        """Return what the session did, the plan, and what the budget does not cover, for people.

        With a plan: for each place where something is saved what is done and why, how many bytes
        and how much time that is, and what another budget would change.

        Raises:
            SessionError: the session was not entered yet.
        """
        return explain(self.stats, self._look(), self._policy_name, self._outside)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for `swapkit.budget(..., plan=path)`.

        Raises:
            SessionError: there is no plan yet.
            InvalidArgument: `path` is no path.
            DiskError: the file cannot be written. An `OSError`.
        """
        course = self._look()
        if course.plan is None or course.trace is None:
            why = course.why_none or f"the session is at its {course.stage.value}"
            raise SessionError(f"there is no plan to save: {why}")
        write_planned(path, course.trace, course.plan)

    def _look(self) -> Course:
        """Return where the search for a plan stands."""
        active = self._active
        if active is not None and active.steering is not None:
            return active.steering.course()
        return self._course

    @property
    def _policy_name(self) -> str:
        policy = self._config.policy
        return policy if isinstance(policy, str) else type(policy).__name__

    # ---- for the installation ------------------------------------------------------------------

    def rescue(self, needed_bytes: int) -> int:
        """Free bytes of the device; return how many, 0 for none."""
        active = self._active
        if active is None:
            return 0
        begun = time.perf_counter()
        freed_bytes = active.swapper.rescue_bytes(needed_bytes)
        if active.steering is not None:
            active.steering.note_rescue(time.perf_counter() - begun)
        return freed_bytes

    def hints(self) -> list[str]:
        """Return what a user could do when memory is out in this session."""
        active = self._active
        if active is None:  # just being entered or left by another thread
            return []
        hints = list(self._advice)
        if active.swapper.mover.host_is_full:
            limit = self._config.host_limit_bytes
            size = f" ({format_bytes(limit)})" if limit else ""
            hints.append(f"the host has no room for more copies{size}: raise host_limit")
        kept_bytes = active.swapper.resident_bytes()
        hints.append(
            f"{format_bytes(kept_bytes)} of saved tensors are still on the device, held by the "
            "running operator, other references, or below min_swap_bytes"
        )
        hints.append(
            "parameters, gradients, optimizer states and the running operator must fit the budget: "
            "give a larger one, or a smaller batch or sequence"
        )
        return hints

    def add_hint(self, text: str) -> None:
        """Let the message of a step that does not fit say one thing more."""
        self._advice.append(text)

    def note_peak(self) -> None:
        """Count the pool's peak since it was last asked for every session that is active."""
        if self._active is None:  # just being entered or left by another thread
            return
        installation = self._active.installation
        peak_bytes = installation.pool.peak_take()
        for session in installation.sessions:
            session.add_peak(peak_bytes)

    def add_peak(self, peak_bytes: int) -> None:
        """Note that so many bytes were reserved while the session was active."""
        self._peak_bytes = max(self._peak_bytes, peak_bytes)

    # ---- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._active is not None or self._final is not None:
            raise SessionError("a session is entered once: call swapkit.budget(...) again")
        installation = ensure_installation(self._config.device)
        if self._model is not None:
            installation.tracker.add_model(self._model)
        self._outside = find_outside(installation.device, installation.tracker)
        if self._outside:
            total_bytes = sum(holder.nbytes for holder in self._outside)
            _log.info("%s are outside the budget: see explain()", format_bytes(total_bytes))
        self._active = _Active(installation, self._config)
        try:
            self._active.start(self, self._model, self._optimizer)
        except BaseException:
            self._active = None
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        active = self._require()
        active.check_innermost()
        final, self._course = self.stats, self._look()
        active.stop()
        self._final = final
        # From now on only the graphs of the block keep its host copies.
        self._active = self._model = self._optimizer = None
        raise_interruption()

    def _require(self) -> _Active:
        if self._active is None:
            raise SessionError("this session is not active: use `with swapkit.budget(...) as s:`")
        return self._active


class _Active:
    """The parts of a session from its entry to its end."""

    def __init__(self, installation: Installation, config: SessionConfig) -> None:
        self.installation = installation
        device = installation.device
        scheduler = device.new_scheduler(
            host_limit_bytes=config.host_limit_bytes,
            disk=config.disk,
            disk_limit_bytes=config.disk_limit_bytes,
        )
        self.swapper = device.new_swapper(scheduler, limit_bytes=config.limit_bytes)
        self.swapper.rescue.multiple = config.rescue_multiple
        self.swapper.rescue.min_bytes = config.min_swap_bytes
        self.hooks = Hooks(self.swapper, Choice(Action.AUTO, min_bytes=config.min_swap_bytes))
        self.swapper.events = self.hooks.packer
        self.steering: Steering | None = None
        self._config = config
        self._undo = ExitStack()

    def check_innermost(self) -> None:
        """Refuse to end before, or elsewhere than, what autograd's hooks allow.

        Raises:
            SessionError: the session began on another thread, or another began after it there.
        """
        stack = self.installation.runtime.entered.stack
        if not stack or stack[-1] is not self.swapper:
            raise SessionError(
                "a session must end on the thread it began on, and before those that enclose it: "
                "leave the `with` blocks in reverse order, or give each its own thread"
            )

    def start(
        self,
        session: Session,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Apply the limit and begin to see saved tensors and steps; all of it or nothing."""
        installation = self.installation
        with ExitStack() as undo:
            for other in installation.sessions:
                other.note_peak()
            installation.enter(session)
            undo.callback(installation.leave, session)
            installation.pool.peak_take()  # what was reserved before does not count here
            installation.tracker.start()
            undo.callback(installation.tracker.stop)
            if optimizer is not None:
                before = optimizer.register_step_pre_hook(lambda *_: _leave_modules())
                undo.callback(before.remove)
                after = optimizer.register_step_post_hook(lambda *_: session.mark_step())
                undo.callback(after.remove)
            self.hooks.enter()
            undo.callback(self.hooks.leave)
            runtime = installation.runtime
            runtime.entered.stack.append(self.swapper)
            undo.callback(runtime.entered.stack.pop)
            runtime.active.append(self.swapper)
            undo.callback(runtime.active.remove, self.swapper)
            if self._config.policy != RESCUE or self._config.saved_plan is not None:
                self.steering = Steering(installation, self.hooks, model, optimizer, self._config)
                self.steering.start()
                undo.callback(self.steering.stop)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Undo `start`; the graphs recorded so far keep working."""
        self._undo.close()
        self.swapper.scheduler.trim()


def _leave_modules() -> None:
    """What an optimizer step allocates is no module's."""
    set_tag(NO_MODULE)
