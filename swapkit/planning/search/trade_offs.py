"""The time of a step as a function of the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE, Kind
from swapkit.planning.search.solving import PlanFailure, Solution, plan_problem
from swapkit.planning.search.trials import Trials

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace
    from swapkit.planning.search.trials import Trial
    from swapkit.simulation.problems import Problem

SHARES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The best step for one budget."""

    budget_bytes: int
    seconds: float
    bound_seconds: float  # no plan takes less
    peak_bytes: int
    swapped_bytes: int = 0
    recompute_seconds: float = 0.0
    host_peak_bytes: int = 0  # of copies


def measure_trade_offs(
    trace: Trace, problem: Problem, machine: Machine, shares: Sequence[float]
) -> tuple[TradeOff, ...]:
    """Return the trade-off of each share, from the smallest budget to the largest."""
    if not all(share > 0 for share in shares):
        raise InvalidArgument(f"shares={tuple(shares)}: expected all above 0")
    fixed = trace.base_bytes + sum(
        storage.nbytes
        for storage in trace.storages
        if storage.birth == BEFORE and storage.kind is not Kind.INPUT
    )
    whole = Trials(problem, replace(machine, budget_bytes=1 << 60))
    peak = whole.simulate(whole.keep_all()).run.peak_bytes
    return measure_budgets(
        problem, machine, [fixed + round(share * (peak - fixed)) for share in shares]
    )


def measure_budgets(
    problem: Problem, machine: Machine, budgets: Iterable[int]
) -> tuple[TradeOff, ...]:
    """Return the trade-off of each budget in bytes, from the smallest to the largest.

    A budget without a plan gives the smallest one that has a plan.
    """
    best: Trial | None = None
    found: dict[int, TradeOff] = {}
    for budget in sorted(set(budgets)):
        solved, there = _solve(problem, replace(machine, budget_bytes=budget), best)
        if best is None or solved.trial.cost < best.cost:
            best = solved.trial
        found[there.budget_bytes] = TradeOff(
            budget_bytes=there.budget_bytes,
            seconds=best.run.seconds,
            bound_seconds=solved.bound_seconds,
            peak_bytes=best.run.peak_bytes,
            swapped_bytes=best.run.swapped_bytes,
            recompute_seconds=best.run.recompute_seconds,
            host_peak_bytes=best.run.host_peak_bytes,
        )
    return tuple(found[budget] for budget in sorted(found))


def _solve(problem: Problem, machine: Machine, known: Trial | None) -> tuple[Solution, Machine]:
    """Return the solution for a budget, or for the smallest budget that has one."""
    actions = () if known is None else (known.actions,)
    solution = plan_problem(problem, machine, known=actions)
    if isinstance(solution, PlanFailure):
        machine = replace(machine, budget_bytes=solution.least.budget_bytes)
        solution = plan_problem(problem, machine)
    assert isinstance(solution, Solution)
    return solution, machine
