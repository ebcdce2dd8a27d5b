"""Plans for a trace: keep, swap or recompute each saved storage, as fast as the budget allows.

A linear program (bound.py) says how much of each storage would best be moved if it were divisible.
That is rounded in many ways and improved, with the simulator as judge (search.py). What comes out
is mostly within a fraction of a per cent of the bound that the same program gives.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from swapkit.errors import InfeasibleBudget, InvalidArgument, InvalidType, PlanMismatch
from swapkit.ir.plans import Decision, Plan
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.search.feasibility import find_least
from swapkit.planning.search.solving import PlanFailure, Solution, plan_problem
from swapkit.planning.search.trade_offs import SHARES, TradeOff, measure_trade_offs
from swapkit.planning.search.trials import Trials
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import as_plan, set_moments, simulate
from swapkit.simulation.validator import find_violations
from swapkit.units import format_bytes, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace
    from swapkit.planning.search.feasibility import Least
    from swapkit.simulation.problems import Problem

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

POLICIES = ("auto", "swap", "recompute")
NAMED_OPERATORS = 4  # most that an error names
REASONS_SHOWN = 3
# What other plans for a session to try assume: a link at this share of its speed, computing slowed
# down so much by copies, and this share of the budget.
LINK_SHARE, INTERFERENCE, BUDGET_SHARE = 0.75, 0.1, 0.97
WORTH = 1.3  # times the best prediction: what a candidate may come to


class Policy(Protocol):
    """Makes plans in place of those that have a name."""

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return what to do with the storages of a trace.

        If no decision names a `release` or a `prefetch`, each copy back starts as early as there is
        room for it.

        Args:
            trace: a recorded step.
            machine: its budget holds at every instant; if the plan names a lower one, that does.
        """
        ...


def make_plan(
    trace: Trace, machine: Machine, policy: str | Policy = "auto", *, optimizer_states: bool = False
) -> Plan:
    """Return the fastest plan that is found; an empty one where everything fits.

    The same arguments give the same plan.

    Args:
        trace: the step.
        machine: what it may use.
        policy: "auto", "swap" or "recompute" (nothing else is done then), or one that makes plans.
        optimizer_states: whether they may be swapped, too.

    Raises:
        InfeasibleBudget: there is none; the error names the smallest budget that has one, or that
            the plan of the given policy needs.
        InvalidArgument: an unknown policy, or its plan is not legal.
    """
    check_policy(policy)
    if not isinstance(policy, str):
        return _ask_own(trace, machine, policy)
    problem = restrict(lower(trace, optimizer_states=optimizer_states), policy)
    solution = solve_or_raise(trace, problem, machine, policy)
    plan = as_plan(
        trace, problem, machine, solution.trial.actions, solution.trial.run, policy=policy
    )
    bound = solution.bound_seconds
    if policy != "auto" and plan.decisions:  # others may be faster than this policy can be
        bound = lower_bound(lower(trace, optimizer_states=optimizer_states), machine)
    return replace(plan, bound_seconds=bound)


def make_candidates(
    trace: Trace,
    machine: Machine,
    policy: str = "auto",
    count: int = 4,
    *,
    tight_bytes: int = 0,
) -> tuple[Plan, ...]:
    """Return different plans for a session to try, the one with the best prediction first.

    All hold the machine's budget. The others are made for a machine that may be nearer to the real
    one: with slower links, more interference or less memory; or by a simpler policy, which may have
    plans for a larger budget only: these come last.

    Args:
        trace: the step.
        machine: as measured.
        policy: "auto", "swap" or "recompute".
        count: most plans; there are fewer where there is little to choose.
        tight_bytes: that a simpler policy may plan for if it has no plan for the budget.

    Raises:
        InfeasibleBudget: there is no plan at all.
        InvalidArgument: an unknown policy.
    """
    plain = make_plan(trace, machine, policy)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """What a session's plans are made for."""

    machine: Machine  # as measured; its budget is the whole
    most_bytes: int | InfeasibleBudget  # that may be planned for in any case, or why nothing may
    tight_bytes: int = 0  # of the whole: that a simpler policy than "auto" may plan for if it must


def make_plans(
    trace: Trace, *, share: float, count: int, target: PlanTarget, policy: str | Policy
) -> tuple[Plan, ...]:
    """Return plans for a share of a machine's budget: see `asking.MakePlans`.

    Args:
        trace: the step.
        share: of the budget.
        count: most plans, if the policy can make several.
        target: the machine and the budget that the plans are for.
        policy: "auto", "swap" or "recompute", or one that makes plans.

    Raises:
        InfeasibleBudget: there is none.
    """
    most_bytes = target.most_bytes
    if isinstance(most_bytes, InfeasibleBudget):
        raise most_bytes
    budget_bytes = min(max(1, int(target.machine.budget_bytes * share)), most_bytes)
    machine = replace(target.machine, budget_bytes=budget_bytes)
    if isinstance(policy, str):
        tight_bytes = min(target.tight_bytes, most_bytes)
        return make_candidates(trace, machine, policy, count, tight_bytes=tight_bytes)
    return (make_plan(trace, machine, policy),)


def trade_offs(
    trace: Trace, machine: Machine, shares: Sequence[float] = SHARES, *, policy: str = "auto"
) -> tuple[TradeOff, ...]:
    """Return how time depends on the budget, from the smallest budget to the largest.

    More memory never makes it slower: a plan for less is a plan for more.

    Args:
        trace: the step.
        machine: all but its budget counts.
        shares: of what the step takes above what is there before and after it. Where there is no
            plan for so little, the smallest budget that has one stands instead.
        policy: "auto", "swap" or "recompute".

    Raises:
        InvalidArgument: an unknown policy, or a share that is not above 0.
    """
    return measure_trade_offs(trace, restrict(lower(trace), policy), machine, shares)


def find_floor(trace: Trace, machine: Machine, policy: str | Policy) -> int:
    """Return the smallest budget that is found to have a plan; 0: only the given policy knows.

    Args:
        trace: the step.
        machine: if there is a plan for its budget, no more than that is returned.
        policy: "auto", "swap" or "recompute", or one that makes plans.

    Raises:
        InvalidArgument: an unknown policy.
    """
    check_policy(policy)
    if not isinstance(policy, str):
        return 0
    problem = restrict(lower(trace), policy)
    floor_bytes = find_least(problem, machine).budget_bytes
    # A search that minds the time, too, may still find one where this has found none.
    if floor_bytes > machine.budget_bytes and isinstance(plan_problem(problem, machine), Solution):
        return machine.budget_bytes
    return floor_bytes


def restrict(problem: Problem, policy: str, *, least_bytes: int = 0) -> Problem:
    """Return the problem with the actions of a policy only, for items of at least so many bytes.

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
        InvalidArgument: neither holds.
    """
    is_one = policy in names if isinstance(policy, str) else _makes_plans(policy)
    if not is_one:
        raise _unknown(policy, names)


def _makes_plans(policy: object) -> bool:
    """Tell whether there is a plan() that takes a trace and a machine; a class has none itself."""
    method = getattr(policy, "plan", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def _unknown(policy: object, names: Sequence[str]) -> InvalidArgument:
    expected = ", ".join(map(repr, names))
    return InvalidArgument(
        f"policy={show(policy)}: expected {expected}, or an object with plan(trace, machine)"
    )


def solve_or_raise(trace: Trace, problem: Problem, machine: Machine, policy: str) -> Solution:
    """Return the solution of a problem of a trace.

    Raises:
        InfeasibleBudget: there is none.
    """
    solution = plan_problem(problem, machine, host=trace.host)
    if isinstance(solution, PlanFailure):
        raise _explain_failure(trace, problem, machine, solution.least, policy)
    return solution


def _explain_failure(
    trace: Trace, problem: Problem, machine: Machine, least: Least, policy: str
) -> InfeasibleBudget:
    names: dict[str, None] = {}
    for slot in least.slots:
        operators = range(int(problem.slot_operators[slot]), int(problem.slot_operators[slot + 1]))
        largest = max(operators, key=lambda number: trace.operators[number].workspace_bytes)
        operator = trace.operators[largest]
        names[f"{operator.name} in {operator.module}" if operator.module else operator.name] = None
    shown = ", ".join(list(names)[:NAMED_OPERATORS])
    hints = ["a smaller batch or shorter sequences"]
    if policy != "auto":
        hints.append('policy="auto"')
    if machine.host_bytes is not None:
        hints.append("a larger host_limit")
    message = (
        f"no plan of policy {policy!r} fits {format_bytes(machine.budget_bytes)}: the smallest "
        f"budget that has one is {format_bytes(least.budget_bytes)} ({least.budget_bytes} bytes), "
        f"which {shown} need{'s' if len(names) == 1 else ''}; try that, {', or '.join(hints)}"
    )
    return InfeasibleBudget(message, least_bytes=least.budget_bytes, operators=tuple(names))


def _ask_own(trace: Trace, machine: Machine, policy: Policy) -> Plan:
    """Return a user's plan, with what it comes to, if nothing is wrong with it."""
    plan: object = policy.plan(trace, machine)
    if not isinstance(plan, Plan):
        who, what = type(policy).__name__, f"expected a Plan, of {Plan.__module__}"
        raise InvalidType(f"plan() of the policy {who} returned {show(plan)}: {what}")
    _refuse_illegal(find_violations(trace, plan, machine))
    if 0 < plan.budget_bytes < machine.budget_bytes:
        machine = replace(machine, budget_bytes=plan.budget_bytes)
    try:
        if not any(_has_moment(each) for each in plan.decisions):
            plan = set_moments(trace, plan, machine)
        schedule = simulate(trace, plan, machine)
    except PlanMismatch as error:  # legal, but nothing that is ever done
        raise InvalidArgument(f"the policy's plan is not possible: {error}") from None
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
        raise InvalidArgument(f"the policy's plan is not legal: {reasons}{rest}")


def _assume(machine: Machine, policy: str) -> Iterator[tuple[Machine, str]]:
    """Yield machines that the real one may be like, and policies for them."""
    slower = replace(
        machine,
        out_bytes_per_second=machine.out_bytes_per_second * LINK_SHARE,
        in_bytes_per_second=machine.in_bytes_per_second * LINK_SHARE,
    )
    yield slower, policy
    if policy == "auto":  # in case only one of them costs more than was measured
        yield machine, "recompute"
        yield machine, "swap"
    yield replace(machine, budget_bytes=int(machine.budget_bytes * BUDGET_SHARE)), policy
    yield replace(slower, interference=machine.interference + INTERFERENCE), policy


def _make_other(
    trace: Trace, problem: Problem, assumed: Machine, machine: Machine, policy: str
) -> Plan | None:
    """Return a plan for a machine that was made for another; None: there is none that runs here."""
    solution = plan_problem(problem, assumed, host=trace.host)
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
