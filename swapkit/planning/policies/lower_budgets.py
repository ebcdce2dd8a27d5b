"""A policy that aims lower than the budget, or at less than everything that could be moved."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit.errors import InfeasibleBudget
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.planner import make_plan, restrict, solve_or_raise
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import as_plan
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.policies.stage_swap import StageSwapPolicy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AimedPolicy:
    """Plans as the policy of a name does, within limits of its own.

    Where they cannot be held the plan comes as near as it can, and the log says so; the machine's
    budget always holds.

    Attributes:
        policy: `"auto"`, `"swap"` or `"recompute"`.
        reduction_bytes: how far below the peak without a plan the plan is to stay.
        least_bytes: what is smaller stays where it is, and so does what hardly counts.
        stages: who plans where its plan fits.
    """

    policy: str = "swap"
    reduction_bytes: int = 0
    least_bytes: int = 0
    stages: StageSwapPolicy | None = None

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return what to do with the storages of a trace.

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
                    "what stages may swap is too little for %s: more is swapped",
                    format_bytes(aimed.budget_bytes),
                )
        try:
            return self._make(trace, aimed)
        except InfeasibleBudget as error:
            least = replace(machine, budget_bytes=error.least_bytes)
            if least.budget_bytes > machine.budget_bytes:
                raise
        _log.warning(
            "no plan comes down to %s: %s is the least",
            format_bytes(aimed.budget_bytes),
            format_bytes(least.budget_bytes),
        )
        return self._make(trace, least)

    def _make(self, trace: Trace, machine: Machine) -> Plan:
        if not self.least_bytes:
            return make_plan(trace, machine, self.policy)
        # With the slots and chains of all items: the plan is simulated again with those.
        problem = restrict(lower(trace), self.policy, least_bytes=self.least_bytes)
        solution = solve_or_raise(trace, problem, machine, self.policy)
        trial = solution.trial
        plan = as_plan(trace, problem, machine, trial.actions, trial.run, policy=self.policy)
        return replace(plan, bound_seconds=lower_bound(lower(trace), machine))
