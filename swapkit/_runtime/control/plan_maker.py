"""Plans for the recorded steps of a session, for its machine and the budget of ranks alike."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from swapkit._runtime.control.rank_agreement import (
    Ranks,
    describe_step,
    describe_weakly,
    join_ranks,
)
from swapkit._runtime.control.resharding import AUTO, Resharding
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.control.stages import StagePlans
from swapkit._runtime.machine.measured_machine import measure_machine
from swapkit._runtime.model.ranks import count_ranks, name_ranks
from swapkit._runtime.model.sharded_modules import find_sharded
from swapkit._runtime.saved.device import Device
from swapkit.errors import InfeasibleBudget, OverBudget
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.beside import ThreadJob, is_at_once
from swapkit.planning.gathers import find_gathered
from swapkit.planning.lean_plans import make_lean_plans
from swapkit.planning.placed import make_placed_plans
from swapkit.planning.planner import PlanTarget, find_floor, gains_by_weights
from swapkit.planning.selection.asking import MakePlans, MakePlansBeside
from swapkit.planning.selection.cases import Case, Stage
from swapkit.planning.selection.learner import Learner
from swapkit.texts import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger("plan")
# Plans leave this many granules free, if possible. A plan's layout and the memory beside it are
# known to the byte, but each of their ends may lie inside a granule: of weights, states, small
# blocks, and what is requested outside of the layout. If more is lost there between two steps, it
# stays lost during the steps, too: beside it, the layout has two ends.
SPARE_GRANULES, LAYOUT_GRANULES = 4, 2
LEAST_SPARE_BYTES = 128 * 1024  # where granules are small, there are more ends


@runtime_checkable
class _BringsLearner(Protocol):
    """A policy whose plans need a search of its own, as `AdaptiveRecompute`."""

    def make_learner(
        self, make_plans: MakePlans, *, profile_steps: int, **options: float
    ) -> Learner:
        """Return the learner of a session. `options`: the others of `Learner`."""


class PlanMaker:
    """Makes plans. Runs on the thread of the steps, except for `give_up` and `stop`."""

    def __init__(self, device: Device, config: SessionConfig) -> None:
        """Prepare; nothing is measured yet."""
        self._device = device
        self._config = config
        self.machine: Machine | None = None  # the machine to plan for
        self._ranks: Ranks | None = None  # None: there are no other ranks
        self._describe: Callable[[], str] = str  # returns what is trained, for other ranks
        self._has_planned = False  # whether the ranks, or this one alone, could make plans
        self._floor: ThreadJob[int] | None = None  # computes the smallest budget that has a plan
        self._gain: ThreadJob[bool] | None = None  # computes whether weights should leave
        self._is_over = False
        has_lean = isinstance(config.policy, str)  # a user's policy makes one plan for each budget
        self._may_gain = has_lean and config.policy != "recompute"  # whether that is to be asked
        self.stages = StagePlans(self._prepare_lean if has_lean else None)
        self.refused = ""  # why the given plan is not followed
        self.resharding: Resharding | None = None  # None: the user's setting holds

    def make_learner(self) -> Learner:
        """Return the learner that decides for each step; a policy may bring its own."""
        config = self._config
        spare = self.find_spare()
        policy = config.policy
        make = policy.make_learner if isinstance(policy, _BringsLearner) else Learner
        learner = make(
            self._make_plans,
            profile_steps=config.profile_steps,
            search_steps=config.search_steps,
            margin=spare,
            spare=spare,
        )
        if isinstance(policy, str):  # a user's policy may rely on the steps' thread
            learner.plan_beside(self.prepare)
        return learner

    def find_spare(self) -> float:
        """Return the share of the budget that plans leave free, by where blocks lie now."""
        device = self._device
        needed = device.lost_bytes() + LAYOUT_GRANULES * device.backend.granule_bytes
        return min(1.0, max(spare_bytes(device), needed) / self._config.limits.budget_bytes)

    def find_given(self, model: torch.nn.Module | None) -> tuple[Trace, Plan] | None:
        """Return the plan that the user gave; None: there is none, or it is for other steps.

        With another number of ranks, each has other shards; with another setting of FSDP2, weights
        are gathered elsewhere. Other memory is in use then: the plan may free too little, or move
        more than necessary.
        """
        given = self._config.saved_plan
        if given is None:
            return None
        why = _find_other_ranks(given[0]) or _find_other_setting(given[0], model)
        if not why:
            return given
        self.refused = f"the given plan is not followed: {why}. The session plans anew"
        _log.warning("%s", self.refused)
        return None

    def join_ranks(
        self, model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Find the other ranks, if any, that train the same, and what they may change together."""
        self._describe = describe_weakly(model, optimizers)
        self._ranks = join_ranks(self._describe)
        if self._config.reshard == AUTO and isinstance(self._config.policy, str):
            self.resharding = Resharding(model, self._config.policy)

    # ---- agreement of the ranks ----------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether the number to publish to the other ranks is still being computed."""
        return self._floor is not None and not self._floor.is_done

    def agree(self, trace: Trace) -> bool:
        """Return whether plans may be made from a trace now, for the budget of ranks alike."""
        self._join_group()
        if not self._has_agreed(trace):
            return False
        self._has_planned = True
        if self.resharding is not None:
            budget_bytes = self._config.limits.budget_bytes
            if self._ranks is not None:
                budget_bytes = self._ranks.find_smallest_budget(budget_bytes)
            with contextlib.suppress(InfeasibleBudget):
                self.resharding.begin(trace, self._ranks, self._measure(budget_bytes))
        return True

    def end_step(self) -> str:
        """Go on with what ranks change together; return why all steps are other ones now, if so.

        Raises:
            SessionError: the ranks have lost each other: see `rank_switch.py`.
        """
        reason = "" if self.resharding is None else self.resharding.end_step()
        if reason and self._ranks is not None:
            self._ranks.forget_floors()
        if self._join_group() and self._has_planned:
            self._has_planned = False
            return "a process group has come, whose ranks agree on a budget"
        return reason

    def _join_group(self) -> bool:
        """Join the ranks of a process group that is new; return whether there is one."""
        former = self._ranks
        if not self._is_over:
            self._ranks = join_ranks(self._describe, former)
        return self._ranks is not former

    def see_forward(self) -> None:
        """Handle the start of a forward of the model."""
        if self.resharding is not None:
            self.resharding.see_forward()

    @property
    def resharding_text(self) -> str:
        """A line about what ranks have changed together; empty: nothing may change."""
        return "" if self.resharding is None else self.resharding.text

    def _has_agreed(self, trace: Trace) -> bool:
        if self._ranks is None:
            return True
        if self._is_over:
            return False
        config, step, find = self._config, describe_step(trace), self._floor_finder(trace)
        if self._ranks.has_published or not isinstance(config.policy, str) or is_at_once():
            return self._ranks.agree(config.limits.budget_bytes, find, step)
        if self._floor is None:
            self._floor = ThreadJob(find)
            return False
        floor_bytes = self._floor.take()
        self._floor = None
        known = find if floor_bytes is None else lambda: floor_bytes
        return self._ranks.agree(config.limits.budget_bytes, known, step)

    def gains_by_weights(self, case: Case | None) -> bool:
        """Return whether a plan is clearly faster than a case's if weights may leave, too.

        Once, after that has been computed beside the steps that follow the plan.
        """
        if self._may_gain and case is not None and case.stage is Stage.STABLE:
            self._may_gain = False
            self._gain = self._start_gain(case)
        job = self._gain
        if job is not None and is_at_once():
            job.wait()
        if job is None or not job.is_done:
            return False
        self._gain = None
        return bool(job.take())

    def _start_gain(self, case: Case) -> ThreadJob[bool] | None:
        machine, trace, policy = self.machine, case.trace, str(self._config.policy)
        if machine is None or trace is None or self._ranks is not None:
            return None  # with other ranks, weights stay
        prediction = None if case.plan is None else case.plan.prediction
        seconds = math.inf if prediction is None else prediction.seconds
        return ThreadJob(partial(gains_by_weights, trace, seconds, machine, policy))

    def give_up(self) -> None:
        """Cancel the computation for the other ranks. Safe anywhere, also in finalizers."""
        self._is_over = True
        for job in (self._floor, self._gain):
            if job is not None:
                job.give_up()

    def stop(self) -> None:
        """Give up, wait for the thread, and withdraw from the other ranks. Any thread."""
        self.give_up()
        for job in (self._floor, self._gain):
            if job is not None:
                job.wait()
        if self._ranks is not None:
            self._ranks.leave()
        self.stages.leave()
        if self.resharding is not None:
            self.resharding.leave()

    def restore(self) -> None:
        """Undo what ranks have changed together. On the thread of the steps."""
        if self.resharding is not None:
            self.resharding.restore()

    def _floor_finder(self, trace: Trace) -> Callable[[], int]:
        """Return a function for any thread: the smallest budget with a plan; 0: not known."""
        config = self._config
        try:
            machine = self._measure(config.limits.budget_bytes)
        except InfeasibleBudget:
            return int
        return partial(find_floor, trace, machine, config.policy)

    def _measure(self, budget_bytes: int) -> Machine:
        """Return the machine.

        Raises:
            InfeasibleBudget: the budget leaves no room to measure with.
        """
        try:
            machine = measure_machine(self._device, self._config.limits)
        except OverBudget as error:
            raise InfeasibleBudget(f"{error}. Try a larger budget") from error
        return replace(machine, budget_bytes=budget_bytes)

    # ---- plans ---------------------------------------------------------------------------------

    def _make_plans(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        return self.prepare()(trace, share=share, count=count)

    def prepare(self) -> MakePlansBeside:
        """Return a function that makes plans on any thread: it holds plain values only."""
        return self._for_target(make_placed_plans)

    def _prepare_lean(self, most_seconds: float) -> MakePlans:
        """Return a function that makes the plan with the least memory within a time."""
        return self._for_target(make_lean_plans, most_seconds=most_seconds)

    def _for_target(
        self, make_plans: Callable[..., tuple[Plan, ...]], **options: float
    ) -> Callable[..., tuple[Plan, ...]]:
        """Return a function that makes plans for this machine and the budget of ranks alike."""
        try:
            target = self._find_target()
        except InfeasibleBudget as error:
            return partial(_refuse, str(error), error.least_bytes)
        return partial(make_plans, target=target, policy=self._config.policy, **options)

    def _find_target(self) -> PlanTarget:
        """Return what plans are for; raise InfeasibleBudget if there can be none."""
        most_bytes = budget_bytes = self._config.limits.budget_bytes
        self.machine = machine = self._measure(budget_bytes)
        if self._ranks is not None:
            most_bytes = self._ranks.find_budget(budget_bytes)
        tight_bytes = max(0, budget_bytes - spare_bytes(self._device))
        return PlanTarget(machine=machine, most_bytes=most_bytes, tight_bytes=tight_bytes)


def _refuse(
    reason: str, least_bytes: int, trace: Trace, *, is_quick: bool = False, **_: float
) -> tuple[Plan, ...]:
    """Make no plan: there can be none, whatever the step."""
    del trace
    if is_quick:
        return ()
    raise InfeasibleBudget(reason, least_bytes=least_bytes)


def spare_bytes(device: Device) -> int:
    """Return the fewest bytes of a budget that plans leave free on a device, if possible."""
    return max(LEAST_SPARE_BYTES, SPARE_GRANULES * device.backend.granule_bytes)


def _find_other_ranks(trace: Trace) -> str:
    """Return how the ranks of a given plan differ from those here; empty: not at all."""
    made_for, here = trace.ranks, count_ranks()
    if made_for is None or made_for == here:
        return ""
    trains = "trains" if here == 1 else "train"
    return f"it was made for {name_ranks(made_for)}, and {name_ranks(here)} {trains} here"


def _find_other_setting(trace: Trace, model: torch.nn.Module | None) -> str:
    """Return how FSDP2's settings in a given plan differ from those here; empty: not at all."""
    was_kept = {each.path: each.is_kept for each in find_gathered(trace)}
    others = [
        path
        for each in find_sharded(model)
        for path in each.paths
        if was_kept.get(path) is each.frees
    ]
    if not others:
        return ""
    first, more = others[0], len(others) - 1
    named = f"module {first}" + (f" and {more} more" if more else "")
    then, here = ("keep", "free") if was_kept[first] else ("free", "keep")
    return (
        f"it was made for another reshard_after_forward, so that {named} would {then} gathered "
        f"weights after forward, and here would {here} them"
    )
