"""Plans for a trace: keep, swap or recompute each saved storage, as fast as the budget allows.

A linear program (`bounds/`) computes the best share of each storage to move, as if storages were
divisible. A search (`search/`) rounds these shares in many ways and improves the result, judged by
the simulator. Most plans are within a fraction of a percent of the program's lower bound.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swapkit.errors import InfeasibleBudget, InvalidArgument, InvalidType, PlanMismatch
from swapkit.ir.machines import Machine
from swapkit.ir.passes import divide_weights
from swapkit.ir.plans import Decision, Plan
from swapkit.ir.traces import Trace
from swapkit.planning import POLICIES
from swapkit.planning.bounds.bound import Program, lower_bound
from swapkit.planning.search.feasibility import (
    OPTIMIZER_STEP,
    Least,
    find_least,
    name_operators,
)
from swapkit.planning.search.moves import Trials
from swapkit.planning.search.solving import (
    SHARES,
    PlanFailure,
    Solution,
    TradeOff,
    choose_effort,
    measure_trade_offs,
    plan_problem,
)
from swapkit.simulation.lowering import lower
from swapkit.simulation.problems import Problem
from swapkit.simulation.timeline import as_plan, set_moments, simulate
from swapkit.simulation.validator import find_violations
from swapkit.units import format_bytes, show

__all__ = [
    "POLICIES",
    "PlanTarget",
    "Policy",
    "TradeOff",
    "check_policy",
    "find_floor",
    "make_candidates",
    "make_plan",
    "make_plans",
    "trade_offs",
]

LEAST_GAIN = 0.05  # of a step's time, for which weights begin to leave
NAMED_OPERATORS = 4  # most that an error names
REASONS_SHOWN = 3
# Assumptions of alternative candidates: links at this share of their speed, this much additional
# interference, and this share of the budget.
LINK_SHARE, INTERFERENCE, BUDGET_SHARE = 0.75, 0.1, 0.97
OTHERS_PART = 4  # of the search for the best plan: the effort for each of them
WORTH = 1.3  # times the best prediction: limit for a candidate's predicted time


class Policy(Protocol):
    """A custom policy, used instead of a named one."""

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return the plan for a trace.

        If no decision names a `release` or a `prefetch`, each copy back starts as early as there is
        room for it.

        Args:
            trace: a recorded step.
            machine: its budget holds at every instant; a lower budget of the plan takes precedence.
        """
        ...


class Instance:
    """A step to plan for several budgets: its linear program starts from its last solution."""

    def __init__(
        self, trace: Trace, machine: Machine, policy: str, *, optimizer_states: bool
    ) -> None:
        """Prepare plans of a policy for any budget of a machine.

        Raises:
            InvalidArgument: an unknown policy.
        """
        self.problem = restrict(lower(trace, optimizer_states=optimizer_states), policy)
        self._machine, self._host = machine, trace.host
        self._program: Program | None = None

    def program(self) -> Program:
        """Return its linear program."""
        if self._program is None:
            self._program = Program(self.problem, self._machine, host=self._host)
        return self._program


def make_plan(
    trace: Trace,
    machine: Machine,
    policy: str | Policy = "auto",
    *,
    optimizer_states: bool = False,
    instance: Instance | None = None,
) -> Plan:
    """Return the fastest plan that the search finds; an empty plan if everything fits.

    The same arguments give the same plan.

    Args:
        trace: the step.
        machine: the machine that the step runs on.
        policy: "auto", "swap" or "recompute" (the only action then), or a custom policy.
        optimizer_states: whether optimizer states may be swapped, too.
        instance: of the other arguments but the budget, if plans for other budgets were made.

    Raises:
        InfeasibleBudget: there is no plan; the error names the smallest budget that has one, or
            that the custom policy's plan needs.
        InvalidArgument: an unknown policy, or its plan is not legal.
    """
    check_policy(policy)
    if not isinstance(policy, str):
        return _ask_own(trace, machine, policy)
    instance = instance or Instance(trace, machine, policy, optimizer_states=optimizer_states)
    problem = instance.problem
    solution = solve_or_raise(trace, problem, machine, policy, instance.program)
    plan = as_plan(
        trace, problem, machine, solution.trial.actions, solution.trial.run, policy=policy
    )
    bound = solution.bound_seconds
    if policy != "auto" and plan.decisions:  # another policy may be faster than this bound
        bound = lower_bound(lower(trace, optimizer_states=optimizer_states), machine)
    return replace(plan, bound_seconds=bound)


def make_candidates(
    trace: Trace,
    machine: Machine,
    policy: str = "auto",
    count: int = 4,
    *,
    tight_bytes: int = 0,
    plain: Plan | None = None,
) -> tuple[Plan, ...]:
    """Return different plans for a session to try, the one with the best prediction first.

    The alternatives assume a machine that may be closer to the real one, with slower links, more
    interference or less memory; or they use a simpler policy. All stay within the machine's budget,
    except those of a simpler policy that needs `tight_bytes`: these come last.

    Args:
        trace: the step.
        machine: as measured.
        policy: "auto", "swap" or "recompute".
        count: most plans; fewer where there are few alternatives.
        tight_bytes: budget of a simpler policy that has no plan for the machine's budget.
        plain: the plan of `make_plan`, if it was made before.

    Raises:
        InfeasibleBudget: there is no plan.
        InvalidArgument: an unknown policy.
    """
    plain = _or_make(plain, trace, machine, policy)
    if not plain.decisions or count < 2:
        return (plain,)
    problem = lower(trace)
    plans = {plain.outline(): plain}
    for assumed, restricted in _assume(machine, policy):
        if len(plans) >= count:
            break
        allowed = restrict(problem, restricted)
        other = _make_other(trace, allowed, assumed, machine, policy)
        if other is None and restricted != policy and tight_bytes > machine.budget_bytes:
            tight = replace(machine, budget_bytes=tight_bytes)
            other = _make_other(trace, allowed, tight, tight, policy)
        if other is not None and _predicted_seconds(other) <= WORTH * _predicted_seconds(plain):
            plans.setdefault(other.outline(), replace(other, bound_seconds=plain.bound_seconds))
    return tuple(
        sorted(plans.values(), key=lambda each: (each.budget_bytes, _predicted_seconds(each)))
    )


def _or_make(plain: Plan | None, trace: Trace, machine: Machine, policy: str) -> Plan:
    return make_plan(trace, machine, policy) if plain is None else plain


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The machine and the limits for a session's plans."""

    machine: Machine  # as measured, with the whole budget
    most_bytes: int  # upper limit of a plan's budget
    tight_bytes: int = 0  # budget of a simpler policy than "auto" that has no plan for less


def make_plans(
    trace: Trace,
    *,
    share: float,
    count: int,
    target: PlanTarget,
    policy: str | Policy,
    plain: Plan | None = None,
) -> tuple[Plan, ...]:
    """Return plans for a share of a machine's budget: see `asking.MakePlans`.

    Args:
        trace: the step.
        share: of the budget.
        count: most plans, if the policy can make several.
        target: the machine and the budget that the plans are for.
        policy: "auto", "swap" or "recompute", or a custom policy.
        plain: the plan for this share, if it was made before: others are made beside it.

    Raises:
        InfeasibleBudget: there is no plan.
    """
    budget_bytes = min(max(1, int(target.machine.budget_bytes * share)), target.most_bytes)
    machine = replace(target.machine, budget_bytes=budget_bytes)
    if isinstance(policy, str):
        tight_bytes = min(target.tight_bytes, target.most_bytes)
        return make_candidates(trace, machine, policy, count, tight_bytes=tight_bytes, plain=plain)
    return (make_plan(trace, machine, policy),)


def gains_by_weights(trace: Trace, seconds: float, machine: Machine, policy: str) -> bool:
    """Return whether a plan is clearly faster than so many seconds if weights may leave, too."""
    most_seconds = seconds * (1 - LEAST_GAIN)
    divided = divide_weights(trace)
    if divided == trace or trace.seconds > most_seconds:
        return False
    if lower_bound(restrict(lower(divided), policy), machine) > most_seconds:
        return False
    try:
        prediction = make_plan(divided, machine, policy).prediction
    except InfeasibleBudget:
        return False
    return prediction is not None and prediction.seconds <= most_seconds


def trade_offs(
    trace: Trace, machine: Machine, shares: Sequence[float] = SHARES, *, policy: str = "auto"
) -> tuple[TradeOff, ...]:
    """Return the step time at several budgets, from the smallest budget to the largest.

    More memory never makes the step slower: a plan for a smaller budget fits a larger one.

    Args:
        trace: the step.
        machine: its budget is ignored.
        shares: budgets, as shares of the memory that the step takes above the memory in use before
            and after it. A share without a plan gives the smallest budget that has one.
        policy: "auto", "swap" or "recompute".

    Raises:
        InvalidArgument: an unknown policy, or a share that is not above 0.
    """
    return measure_trade_offs(trace, restrict(lower(trace), policy), machine, shares)


def find_floor(trace: Trace, machine: Machine, policy: str | Policy) -> int:
    """Return the smallest budget found that has a plan; 0: only the custom policy knows.

    Args:
        trace: the step.
        machine: if its budget has a plan, the result is not larger.
        policy: "auto", "swap" or "recompute", or a custom policy.

    Raises:
        InvalidArgument: an unknown policy.
    """
    check_policy(policy)
    if not isinstance(policy, str):
        return 0
    problem = restrict(lower(trace), policy)
    floor_bytes = find_least(problem, machine).budget_bytes
    # The full search, which also minimizes time, may find a plan that `find_least` did not.
    if floor_bytes > machine.budget_bytes and isinstance(plan_problem(problem, machine), Solution):
        return machine.budget_bytes
    return floor_bytes


def restrict(problem: Problem, policy: str, *, least_bytes: int = 0) -> Problem:
    """Return the problem with only the policy's actions, for items of at least `least_bytes`.

    Raises:
        InvalidArgument: an unknown policy.
    """
    if policy not in POLICIES:
        raise _unknown(policy, POLICIES)
    is_large = problem.item_bytes >= least_bytes
    return replace(
        problem,
        can_swap=problem.can_swap & is_large & (policy != "recompute"),
        can_recompute=problem.can_recompute & is_large & (policy != "swap"),
    )


def check_policy(policy: object, names: Sequence[str] = POLICIES) -> None:
    """Check that a policy has one of these names, or can make plans.

    Raises:
        InvalidArgument: neither is true.
    """
    is_one = policy in names if isinstance(policy, str) else _makes_plans(policy)
    if not is_one:
        raise _unknown(policy, names)


def _makes_plans(policy: object) -> bool:
    """Return whether a policy has plan(trace, machine); False for a class without an instance."""
    method = getattr(policy, "plan", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None, None)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # no signature available
    return True


def _unknown(policy: object, names: Sequence[str]) -> InvalidArgument:
    expected = ", ".join(map(repr, names))
    return InvalidArgument(
        f"policy={show(policy)}: expected {expected}, or an object with plan(trace, machine)"
    )


def solve_or_raise(
    trace: Trace,
    problem: Problem,
    machine: Machine,
    policy: str,
    make_program: Callable[[], Program] | None = None,
) -> Solution:
    """Return the solution of a trace's problem; `make_program`: as for `plan_problem`.

    Raises:
        InfeasibleBudget: there is no solution.
    """
    if machine.host_bytes is not None:  # frozen weights that leave have copies all the time
        machine = replace(machine, host_bytes=max(0, machine.host_bytes - problem.frozen_bytes))
    solution = plan_problem(problem, machine, host=trace.host, make_program=make_program)
    if isinstance(solution, PlanFailure):
        raise _explain_failure(trace, problem, machine, solution.least, policy)
    return solution


def _explain_failure(
    trace: Trace, problem: Problem, machine: Machine, least: Least, policy: str
) -> InfeasibleBudget:
    names = name_operators(trace, problem, least)
    shown = ", ".join(names[:NAMED_OPERATORS])
    hints = ["a smaller batch or shorter sequences"]
    if all(each.endswith(OPTIMIZER_STEP) for each in names):
        hints = ["an optimizer with foreach=False or fused=True"]
    if policy != "auto":
        hints.append('policy="auto"')
    if machine.host_bytes is not None:
        hints.append("a larger host_limit")
    message = (
        f"no plan of policy {policy!r} fits {format_bytes(machine.budget_bytes)}: the smallest "
        f"budget with a plan is {format_bytes(least.budget_bytes)} ({least.budget_bytes} bytes), "
        f"which {shown} need{'s' if len(names) == 1 else ''}; try that budget, "
        f"{', or '.join(hints)}"
    )
    return InfeasibleBudget(message, least_bytes=least.budget_bytes, operators=names)


def _ask_own(trace: Trace, machine: Machine, policy: Policy) -> Plan:
    """Return the plan of a custom policy, checked, simulated and with its prediction."""
    plan: object = policy.plan(trace, machine)
    if not isinstance(plan, Plan):
        who, what = type(policy).__name__, f"expected a {Plan.__module__}.Plan"
        raise InvalidType(f"{who}.plan() returned {show(plan)}: {what}")
    _refuse_illegal(find_violations(trace, plan, machine))
    if 0 < plan.budget_bytes < machine.budget_bytes:
        machine = replace(machine, budget_bytes=plan.budget_bytes)
    try:
        if not any(_has_moment(each) for each in plan.decisions):
            plan = set_moments(trace, plan, machine)
        schedule = simulate(trace, plan, machine)
    except PlanMismatch as error:  # legal, but not among the decisions that swapkit supports
        raise InvalidArgument(f"swapkit cannot follow the policy's plan: {error}") from None
    plan = replace(
        plan, budget_bytes=machine.budget_bytes, prediction=schedule.prediction, trace=trace
    )
    _refuse_illegal(find_violations(trace, plan, machine, schedule))
    return plan


def _has_moment(decision: Decision) -> bool:
    return decision.release is not None or decision.prefetch is not None


def _refuse_illegal(violations: Sequence[str]) -> None:
    if violations:
        more = len(violations) - REASONS_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        reasons = "; ".join(violations[:REASONS_SHOWN])
        raise InvalidArgument(f"the policy's plan is invalid: {reasons}{rest}")


def _assume(machine: Machine, policy: str) -> Iterator[tuple[Machine, str]]:
    """Yield machines that may be closer to the real one, each with a policy."""
    slower = replace(
        machine,
        out_bytes_per_second=machine.out_bytes_per_second * LINK_SHARE,
        in_bytes_per_second=machine.in_bytes_per_second * LINK_SHARE,
    )
    yield slower, policy
    if policy == "auto":  # in case recomputing or swapping costs more than measured
        yield machine, "recompute"
        yield machine, "swap"
    yield replace(machine, budget_bytes=int(machine.budget_bytes * BUDGET_SHARE)), policy
    yield replace(slower, interference=machine.interference + INTERFERENCE), policy


def _make_other(
    trace: Trace, problem: Problem, assumed: Machine, machine: Machine, policy: str
) -> Plan | None:
    """Return a plan for `machine` that was made for `assumed`; None: there is none that runs."""
    effort = choose_effort(problem, part=OTHERS_PART)
    solution = plan_problem(problem, assumed, effort=effort, host=trace.host)
    if isinstance(solution, PlanFailure):
        return None
    actions = solution.trial.actions
    trial = Trials(problem, machine).simulate(actions, solution.trial.window)
    if not trial.is_possible:
        return None
    return as_plan(trace, problem, machine, actions, trial.run, policy=policy)


def _predicted_seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_seconds
