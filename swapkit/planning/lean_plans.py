"""The plan with the least memory whose step takes no longer than a given time.

A stage that waits for others anyway can spend that time on less memory. In a session, it knows only
the step of each other stage (`_runtime/control/stages.py`), and tries the plan before it
follows it (`selection/lean_trials.py`).
"""

from __future__ import annotations

from dataclasses import replace

from swapkit.ir.machines import Machine
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.placed import predict_reserved
from swapkit.planning.planner import PlanTarget, restrict
from swapkit.planning.search.feasibility import find_least
from swapkit.planning.search.local_search import Effort
from swapkit.planning.search.moves import Actions
from swapkit.planning.search.solving import Solution, plan_problem
from swapkit.simulation.lowering import lower
from swapkit.simulation.problems import Problem
from swapkit.simulation.timeline import as_plan

QUICK = Effort(starts=40, changes=400)
HALVINGS = 7  # of the range of budgets
ROUNDING = 1e-9  # of a time


def make_lean_plans(
    trace: Trace, *, share: float, count: int, most_seconds: float, target: PlanTarget, policy: str
) -> tuple[Plan, ...]:
    """Return the plan of `make_lean_plan` for a session, or none: see `asking.MakePlans`.

    Args:
        trace: the step.
        share: of the budget.
        count: not used: there is one such plan.
        most_seconds: limit of the predicted step.
        target: the machine and the budget that the plan is for.
        policy: "auto", "swap" or "recompute".
    """
    del count
    budget_bytes = min(int(target.machine.budget_bytes * share), target.most_bytes)
    machine = replace(target.machine, budget_bytes=max(1, budget_bytes))
    plan = make_lean_plan(trace, machine, policy, most_seconds)
    return () if plan is None else (plan,)


def make_lean_plan(trace: Trace, machine: Machine, policy: str, most_seconds: float) -> Plan | None:
    """Return the plan with the least memory, within a time and a budget; None: none was found.

    The same arguments give the same plan.

    Args:
        trace: the step.
        machine: no plan takes more than its budget.
        policy: "auto", "swap" or "recompute".
        most_seconds: limit of the predicted step.
    """
    search = _LeanSearch(trace, machine, policy, most_seconds * (1 + ROUNDING))
    low = find_least(search.problem, replace(machine, budget_bytes=1)).budget_bytes
    high = min(machine.budget_bytes, trace.peak_bytes)
    if low > high:
        return None
    if not search.try_budget(low) and search.try_budget(high):
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            if search.try_budget(middle):
                high = middle
            else:
                low = middle
    return search.finish()


class _LeanSearch:
    """The smallest budget so far that has a plan within the time, and its plan."""

    def __init__(self, trace: Trace, machine: Machine, policy: str, most_seconds: float) -> None:
        self.problem: Problem = restrict(lower(trace), policy)
        self._trace, self._machine, self._policy = trace, machine, policy
        self._most_seconds = most_seconds
        self._best: Plan | None = None
        self._actions: list[Actions] = []  # of the best plan

    def try_budget(self, budget_bytes: int, effort: Effort | None = QUICK) -> bool:
        """Return whether a budget has a plan within the time."""
        machine = replace(self._machine, budget_bytes=budget_bytes)
        found = plan_problem(
            self.problem, machine, effort=effort, known=self._actions, host=self._trace.host
        )
        if not isinstance(found, Solution):
            return False
        actions, run = found.trial.actions, found.trial.run
        plan = as_plan(self._trace, self.problem, machine, actions, run, policy=self._policy)
        assert plan.prediction is not None
        if plan.prediction.step_seconds > self._most_seconds:
            return False
        bound_seconds = found.bound_seconds
        self._best, self._actions = replace(plan, bound_seconds=bound_seconds), [actions]
        return True

    def finish(self) -> Plan | None:
        """Return the plan, made once more with the usual effort and placed at addresses."""
        if self._best is None:
            return None
        self.try_budget(self._best.budget_bytes, effort=None)
        return predict_reserved(self._trace, self._best, self._machine)
