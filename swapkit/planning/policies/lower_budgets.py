"""A policy that plans below the budget, or moves only a part of the movable storages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit.errors import InfeasibleBudget
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.planner import make_plan, restrict, solve_or_raise
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import as_plan
from swapkit.texts import get_logger
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.policies.stage_swap import StageSwapPolicy

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AimedPolicy:
    """A named policy with additional limits.

    If no plan meets the limits, the plan comes as close as possible, and the log says so. The
    machine's budget always holds.

    Attributes:
        policy: `"auto"`, `"swap"` or `"recompute"`.
        reduction_bytes: distance of the plan's peak below the peak without a plan.
        least_bytes: smallest storage to move; storages too small to matter stay in any case.
        stages: the policy to use if its plan fits.
    """

    policy: str = "swap"
    reduction_bytes: int = 0
    least_bytes: int = 0
    stages: StageSwapPolicy | None = None

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return the plan for a trace.

        Raises:
            InfeasibleBudget: there is no plan for the machine's budget.
        """
        target_bytes = max(1, trace.peak_bytes - self.reduction_bytes)
        aimed = replace(machine, budget_bytes=min(machine.budget_bytes, target_bytes))
        if self.stages is not None:
            try:
                return make_plan(trace, aimed, self.stages)
            except InfeasibleBudget:
                _log.warning(
                    "swapping by stage does not reach a peak of %s: swapping more",
                    format_bytes(aimed.budget_bytes),
                )
        try:
            return self._make(trace, aimed)
        except InfeasibleBudget as error:
            least = replace(machine, budget_bytes=error.least_bytes)
            if least.budget_bytes > machine.budget_bytes:
                raise
        _log.warning(
            "no plan reaches a peak of %s: using %s, the smallest budget with a plan",
            format_bytes(aimed.budget_bytes),
            format_bytes(least.budget_bytes),
        )
        return self._make(trace, least)

    def _make(self, trace: Trace, machine: Machine) -> Plan:
        if not self.least_bytes:
            return make_plan(trace, machine, self.policy)
        # Keep the slots and chains of all items, because the plan is simulated again with them.
        problem = restrict(lower(trace), self.policy, least_bytes=self.least_bytes)
        solution = solve_or_raise(trace, problem, machine, self.policy)
        trial = solution.trial
        plan = as_plan(trace, problem, machine, trial.actions, trial.run, policy=self.policy)
        return replace(plan, bound_seconds=lower_bound(lower(trace), machine))
