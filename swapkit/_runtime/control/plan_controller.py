"""Controls a session's plans: it records steps, tries plans, and follows the best one.

The mode of a step is decided when its first forward begins, by the shapes of the model's inputs
(`planning/selection/learner.py`). Tensors saved before that belong to no plan. If the model is not
called as a whole, all steps count as the same kind, and each begins with its first event
(`steps.py`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import replace

import torch

from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.control.plan_following import Following
from swapkit._runtime.control.plan_maker import PlanMaker
from swapkit._runtime.control.plan_status import PlanStatus, describe_learner
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.control.steps import (
    FirstEvent,
    ForwardBypass,
    Forwards,
    StepClock,
    StepRecording,
    StepTimes,
    find_setting,
    take_trace,
)
from swapkit._runtime.execution.plan_compiler import check_fit, find_form, is_heavier, pace, sign
from swapkit._runtime.execution.plan_executor import NO_REPORT, PlanExecutor
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.tracker import find_called, find_weakly
from swapkit._runtime.process.undo import Undo, raise_first
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.saved.hooks import Hooks, Lending
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.dispatch_modes import can_stay, drop_left
from swapkit._runtime.torch_compat.internals import tracing_state
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.selection.cases import Instruction, Outcome, Stage, StepMode, Timing
from swapkit.planning.selection.learner import STRANGE
from swapkit.texts import get_logger

_log = get_logger("plan")
ANY = ""  # the signature of all steps without a model


class PlanController:
    """Learns what the steps of one session do, and has the best plan for them followed."""

    may_bypass = True  # it starts the bypass itself (`ForwardBypass`)

    def __init__(
        self,
        installation: Installation,
        hooks: Hooks,
        model: torch.nn.Module | None,
        optimizers: tuple[torch.optim.Optimizer, ...],
        config: SessionConfig,
    ) -> None:
        """Prepare; it has no effect before `start`."""
        self._installation = installation
        self._hooks = hooks
        self._swapper = hooks.swapper
        # Weak references: the session holds these objects, and `stop` does not need them.
        self._find_model = find_weakly(model)
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._config = config
        self._plans = PlanMaker(installation.device, config)
        self._learner = self._plans.make_learner()
        self._undo = Undo()
        self._signature = ANY
        self._form = "", 0  # the form of the step's inputs, and their number of elements
        self._is_unbound = False  # whether the plan is for the first inputs that come
        self._is_begun = False  # whether the step's first forward was seen
        self._is_training = False  # whether that forward was in training mode
        self._forwards = Forwards()
        self._bypass = ForwardBypass(installation.tracker)
        self._first = FirstEvent(hooks.packer, self._find_model, lambda: self._is_innermost)
        self._is_late = False  # whether a recorder's mode could not stay where the last step ended
        self._stepping = 0  # the thread of the step's first forward; 0: none yet
        self._calls_model = model is not None  # whether the latest step called the model
        self._instruction: Instruction | None = None
        self._following = Following(self._swapper, self._find_model)
        self._recording = StepRecording(hooks.packer)
        self._clock = StepClock(installation.device.name)
        self._began_bytes = 0
        self._moving_before = 0.0
        self._rescues_before = 0
        self._times = StepTimes()

    @property
    def stage(self) -> Stage:
        """The stage of the search for a plan; stable: the next step is expected to be alike."""
        return self._learner.stage

    def note_progress(self, steps: int) -> bool:
        """Return whether the last of these steps changed how far the search for a plan is."""
        case = self._learner.case
        return case is not None and case.note_progress(steps)

    def status(self) -> PlanStatus:
        """Return the status for the current kind of steps."""
        return PlanStatus(
            machine=self._plans.machine,
            refused=self._plans.refused,
            resharding=self._plans.resharding_text,
            step_seconds=self._times.median(self._learner.kind),
            other_step_seconds=self._times.others(self._learner.kind),
            stalls=self._swapper.longest_stalls(),
            pipeline=self._plans.stages.describe(self._learner.case),
            **describe_learner(self._learner),
        )

    def status_to_save(self) -> PlanStatus:
        """Return the status with the best plan so far; wait for a plan in the making."""
        status = self.status()
        if status.plan is not None:
            return status
        found = self._learner.find_plan()
        best = next(iter(found.plans), None)
        plan = None if best is None else pace(best, status.pace)
        return replace(status, plan=plan, why_none=found.why_none)

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with the next step. If it fails or is interrupted, `stop` undoes it.

        Raises:
            PlanMismatch: the saved plan does not fit this model or budget.
        """
        given = self._plans.find_given(self._find_model())
        if given is not None:
            self._adopt(*given)
        undo = self._undo  # added before each part starts: an interruption may come between
        undo.add(self._plans.restore)
        model = self._find_model()
        self._plans.join_ranks(model, self._find_optimizers())
        if model is not None:
            lending = Lending(self._hooks, model)
            undo.add(lending.stop)
            lending.start()
        undo.add(self._stop_planning)
        undo.add(functools.partial(global_hooks.calls.remove, self))
        global_hooks.calls.add(self)
        undo.add(self._leave_step)
        self._enter_step(self._signature)
        if self._calls_model:  # not known before the first step: perhaps only parts are called
            self._is_late = True
            self._first.wait(self._begin_step)

    def stop(self) -> None:
        """Undo `start`, also in the middle of a step. A second call retries what failed."""
        raise_first(self._undo.run())

    def give_up(self) -> None:
        """Stop making plans. Safe anywhere, also in finalizers."""
        self._learner.give_up()
        self._plans.give_up()

    def drop(self) -> None:
        """Drop the recording, which refers to the model, before `stop`. Any thread."""
        self._recording.drop()
        self._stop_planning()

    def _stop_planning(self) -> None:
        self._learner.stop()
        self._plans.stop()

    def _adopt(self, trace: Trace, plan: Plan) -> None:
        """Follow a saved plan.

        Raises:
            PlanMismatch: the plan does not fit this model or budget.
        """
        check_fit(trace, plan, self._find_model(), self._config.limits.budget_bytes)
        self._learner.adopt(trace.signature, trace, plan)
        self._signature = trace.signature
        self._is_unbound = plan.trace is not None  # the trace was recorded outside of a session

    # ---- the beginning of a step ---------------------------------------------------------------

    @property
    def _executor(self) -> PlanExecutor | None:
        return self._following.executor

    @property
    def _is_innermost(self) -> bool:
        """Whether this session is the innermost one of this thread.

        On a thread without a session: whether its forward began the step (`saved/hooks.py`).
        """
        stack = thread_state.sessions
        innermost = stack[-1:]  # one read: another thread may end a session meanwhile
        if not innermost:
            return self._stepping == threading.get_ident()
        return innermost == [self._swapper]

    def enter(self, module: torch.nn.Module) -> None:
        """Handle the begin of a module's forward, on any thread (`global_hooks.CallListener`)."""
        model = self._find_model()
        called = find_called(module, model)
        if model is not None and called is not None:
            self._plans.see_forward()
            self._see_forward(model, called)
            if self._is_innermost:
                self._bypass.begin(self._executor)
        elif self._first.is_call(module) and self._may_begin():
            self._begin_step(module)

    def _may_begin(self) -> bool:
        """Return whether a step may begin here; else the next module call may begin it."""
        return tracing_state() is None and (not self._is_late or can_stay())

    def leave(self, module: torch.nn.Module) -> None:
        """Handle the end of a module's forward."""
        is_in_step = self._is_begun and self._is_innermost
        if is_in_step and find_called(module, self._find_model()) is not None:
            self._forwards.leave()

    def _see_forward(self, model: torch.nn.Module, module: torch.nn.Module) -> None:
        """Begin a step if this forward, of the model or a part of it, is the first of a step."""
        if not torch.is_grad_enabled() or not self._is_innermost or tracing_state() is not None:
            return
        is_again = self._begins_again()
        # A training forward begins the step anew if only evaluation forwards ran in it so far.
        if not is_again and self._is_begun and (self._is_training or not module.training):
            return
        drop_left()  # a recorder's mode left over from backward would slow down this step
        self._forwards.begin()
        self._is_begun, self._is_training = True, module.training
        self._stepping = threading.get_ident()
        inputs = global_hooks.find_inputs()
        signature = sign(model, inputs)
        if self._is_unbound:
            self._is_unbound = False
            self._learner.rename(self._signature, signature)
        if signature != self._signature:
            self._recording.stop()
            self._enter_step(signature, *find_form(inputs, signature))
            is_again = False  # the forward that raised belonged to another plan
        self._begin_step(module, is_again=is_again)

    def _begins_again(self) -> bool:
        is_again = self._forwards.begins_again(self._has_used)
        if is_again:
            self._recording.stop()
        return is_again

    def _has_used(self) -> bool:
        executor = self._executor
        return self._recording.has_used() or (executor is not None and executor.has_used())

    def _enter_step(self, signature: str, form: str = "", length: int = 0) -> None:
        """Prepare the next step as the learner instructs: see `Learner.begin`."""
        self._signature, self._form = signature, (form, length)
        instruction = self._learner.begin(signature, form, length)
        if instruction.mode is StepMode.RECORD and self._plans.is_busy:
            instruction = Instruction(mode=StepMode.RESCUE)  # no plan could be made from it yet
        self._instruction = instruction
        if instruction.mode is StepMode.FOLLOW:
            self._following.follow(instruction)
        else:
            self._following.stop()
        if not self._calls_model:
            self._await_step(instruction)

    def _await_step(self, instruction: Instruction) -> None:
        """Begin the step with its first event, wherever that is."""
        self._is_late = not can_stay()
        if instruction.mode is StepMode.RECORD and not self._is_late:
            self._recording.prepare(self._find_setting())
        self._set_standby()
        self._first.wait(self._begin_step)

    def _set_standby(self) -> None:
        # A settled plan needs no rescue, unless sizes or the step differ (`PlanExecutor.deviated`).
        is_settled = self._following.is_exact and self._learner.stage is Stage.STABLE
        self._swapper.evictor.set_standby(is_on=not is_settled)

    def _begin_step(self, root: torch.nn.Module | None = None, *, is_again: bool = False) -> None:
        """Start the step's recording, counts and clock; if again, keep the counts so far.

        `root`: a module whose forward already runs. None: a tensor is being saved, the first event.
        """
        assert self._instruction is not None
        self._first.end()
        executor = self._executor
        if root is not None and executor is not None and executor.now() != 0:
            executor.end_step()  # tensors saved before the first forward are in no plan
        if root is not None and executor is not None:
            executor.begin_weights()
        self._set_standby()
        if self._instruction.mode is StepMode.RECORD:
            self._record(root)
        if not is_again:
            self._rescues_before = self._swapper.evictor.count
            self._began_bytes = self._installation.device.in_use_bytes()
            self._moving_before = self._installation.device.moving_seconds()
        self._clock.begin(self._instruction.timing)

    # ---- recording -----------------------------------------------------------------------------

    def _record(self, root: torch.nn.Module | None) -> None:
        """Start recording, unless the recorder runs, or its mode could not stay here."""
        if root is not None and self._recording.recorder is None:
            self._recording.prepare(self._find_setting())
        if self._recording.is_waiting:
            self._recording.begin(root)

    def _find_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(each for ref in self._optimizers if (each := ref()))

    def _find_setting(self) -> Setting:
        mover = self._swapper.mover
        return find_setting(self._installation, self._find_model(), self._find_optimizers(), mover)

    def _stop_recording(self, *, is_wanted: bool) -> Trace | None:
        recorder, case = self._recording.stop(), self._learner.case
        if recorder is None or not recorder.has_seen or not is_wanted or case is None:
            return None  # there is nothing to plan yet
        seconds = self._times.latest(self._learner.kind)
        limit_bytes = self._config.limits.budget_bytes
        return take_trace(recorder, case, self._signature, seconds, limit_bytes)

    def _leave_step(self) -> None:
        """Stop recording and following, without learning from the step."""
        self._first.end()
        self._recording.stop()
        self._following.stop()
        self._instruction = None

    # ---- the end of a step ---------------------------------------------------------------------

    def end_step(self) -> None:
        """Learn from the step that ends, and prepare the next one."""
        instruction = self._instruction
        if instruction is None or not self._is_innermost:
            return
        self._calls_model = self._is_begun
        taken = self._clock.end()
        executor = self._executor
        report = NO_REPORT if executor is None else executor.end_step()
        is_more = executor is not None and is_heavier(
            self._began_bytes, executor.bytes_before, self._config.limits.budget_bytes
        )
        is_recorded = self._recording.is_recording
        trace = self._stop_recording(is_wanted=self._forwards.end())
        if instruction.mode is not StepMode.RECORD:
            self._times.add(self._learner.kind, taken.seconds)
        self._bypass.end_step(executor, report)
        device = self._installation.device
        # Once steps lie at planned addresses, they no longer move free memory together.
        moving = device.moving_seconds() - self._moving_before
        is_moving = self._installation.is_moving  # then rescues tell nothing about the plan
        is_waited_for = taken.timing is Timing.HOST
        outcome = Outcome(
            seconds=max(0.0, taken.seconds - moving) if is_waited_for else taken.seconds,
            timing=taken.timing,
            is_host_bound=taken.is_host_bound,
            rescues=0 if is_moving else self._swapper.evictor.count - self._rescues_before,
            deviation=report.deviation or "",
            resized_bytes=report.resized_bytes,
            trace=trace,
            is_lost=is_recorded and trace is None,
            is_heavier=is_more,
        )
        try:
            self._learn(outcome)
        finally:
            self._start_next()

    def _start_next(self) -> None:
        self._is_begun = False
        try:
            weights = self._swapper.weights
            if not weights.do_leave and self._plans.gains_by_weights(self._learner.case):
                weights.adopt_more()
            have_more = weights.have_more_left()
            if reason := self._plans.end_step() or have_more * "weights leave from now on":
                self._learner.restart(reason)
        finally:
            # The next length is not known yet: follow the plan for any length until it is.
            is_any = self._learner.is_general
            self._enter_step(STRANGE if is_any else self._signature, *self._form)

    def _learn(self, outcome: Outcome) -> None:
        """Pass a step's outcome to the learner, and log what changes."""
        if outcome.trace is not None:
            if self._plans.agree(outcome.trace):
                self._learner.leave_free(self._plans.find_spare())
            else:
                outcome = replace(outcome, trace=None, is_lost=True)  # the next one is recorded
        former, replans = self._learner.stage, self._learner.replans
        self._learner.end(outcome)
        self._plans.stages.end_step(self._learner)
        if self._learner.replans > replans:
            _log.info("replanning: %s", self._learner.reason)
        elif outcome.deviation or (outcome.rescues and former is Stage.STABLE):
            what = outcome.deviation or f"{outcome.rescues} rescues"
            _log.debug("keeping the plan after a step that deviated from it: %s", what)
