"""The plans of all stages of a pipeline, made together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.pipelines.choice import LEAST_GAIN, choose_ways
from benchmarks.pipelines.curves import SHARES, WORTH, cut_jobs, measure_curve
from benchmarks.pipelines.ways import Cost
from swapkit.errors import InfeasibleBudget
from swapkit.planning.planner import check_policy, make_plan
from swapkit.simulation.timeline import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pipelines.composing import PipelineRecordings
    from benchmarks.pipelines.ways import StageWays, Way
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan, Schedule
    from swapkit.ir.traces import Trace

ROUNDS = 8  # of simulations; bubbles and stalls depend on each other
CHOICES = 8  # of ways; the costs of one choice are known only once it is simulated
SETTLED = 1e-6  # change of the step's time between rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The plan of one stage in a pipeline, simulated with the bubbles that it really has."""

    plan: Plan
    trace: Trace  # the stage's step, with an idle operator of the bubble's time before each job
    schedule: Schedule
    budget_bytes: int  # of the stage's machine; the plan may take less
    busy_seconds: float  # jobs, recomputing and waiting for copies
    idle_seconds: float  # until the last stage is done
    early_seconds: float  # of recomputing that runs in bubbles

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use."""
        return self.schedule.prediction.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The plans of all stages, and the time of the step."""

    seconds: float
    stages: tuple[StagePlan, ...]
    is_settled: bool = True  # False: the stages' simulations did not agree on the bubbles


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlans:
    """Plans made together, and plans that each stage makes for itself within the same budget."""

    joint: PipelinePlan
    separate: PipelinePlan
    free_seconds: float  # without a limit


def plan_pipeline(
    recordings: PipelineRecordings,
    machines: Sequence[Machine],
    *,
    policy: str = "auto",
    shares: Sequence[float] = SHARES,
    tolerance: float = 0.0,
) -> PipelinePlans:
    """Return plans for all stages: the shortest step, and no more memory than that takes.

    The step is as long as the slowest stage makes it that cannot be made faster. The others spend
    the time that they would idle on less memory, on copies and on recomputing in their bubbles. The
    joint plan is never slower than separate ones, but for the tolerance.

    Args:
        recordings: the recorded microbatches of the stages, and the order of their jobs.
        machines: for each stage; its budget holds.
        policy: "auto", "swap" or "recompute".
        shares: see `measure_curve`.
        tolerance: share of its time that the step may take more if that saves memory.

    Raises:
        InfeasibleBudget: a stage has no plan within its budget; the message names the stage.
        InvalidArgument: an unknown policy.
    """
    check_policy(policy)
    traces, curves = _measure_curves(recordings, machines, policy, shares)
    settler = _Settler(recordings, machines)
    budgets = [each.budget_bytes for each in machines]
    plans: list[PipelinePlan] = []
    for _ in range(CHOICES):
        choice = choose_ways(recordings.timing, curves, budgets, tolerance=tolerance)
        assert choice is not None  # each way fits its machine
        if not plans:
            plans.append(settler.settle(_pick(curves, choice.separate))[0])
        plan, costs = settler.settle(_pick(curves, choice.ways))
        plans.append(plan)
        if plan.seconds <= choice.seconds * (1 + SETTLED):
            break
        # Copies stalled where a bubble was too short for them: the ways cost more than thought.
        pairs = zip(curves, choice.ways, costs, strict=True)
        curves = [own.with_costs(way, each) for own, way, each in pairs]
    return PipelinePlans(
        joint=_find_best(plans, tolerance),
        separate=plans[0],
        free_seconds=max(trace.seconds for trace in traces),
    )


def _measure_curves(
    recordings: PipelineRecordings,
    machines: Sequence[Machine],
    policy: str,
    shares: Sequence[float],
) -> tuple[list[Trace], list[StageWays]]:
    """Return the step of each stage without a limit, and its ways.

    Raises:
        InfeasibleBudget: a stage has no way.
    """
    traces, curves = [], []
    bubbles, slack = recordings.find_bubbles(), recordings.find_slack(WORTH)
    for stage, machine in enumerate(machines):
        trace = recordings.compose(stage, bubbles[stage], keeps_empty=True)
        room = list(map(max, slack[stage], bubbles[stage]))
        curve = measure_curve(trace, machine, room=room, policy=policy, shares=shares)
        if not curve.ways:
            _explain(stage, trace, machine, policy)
        traces.append(trace)
        curves.append(curve)
    return traces, curves


def _find_best(plans: Sequence[PipelinePlan], tolerance: float) -> PipelinePlan:
    """Return the plan with the least memory among those that are as fast as the fastest."""
    most = min(plan.seconds for plan in plans) * (1 + LEAST_GAIN + tolerance)
    return min(
        (plan for plan in plans if plan.seconds <= most),
        key=lambda plan: sum(stage.peak_bytes for stage in plan.stages),
    )


def _pick(curves: Sequence[StageWays], numbers: Sequence[int]) -> list[Way]:
    return [curve.ways[number] for curve, number in zip(curves, numbers, strict=True)]


def _explain(stage: int, trace: Trace, machine: Machine, policy: str) -> None:
    """Raise the error of a stage without a plan."""
    try:
        make_plan(trace, machine, policy)
    except InfeasibleBudget as error:
        raise InfeasibleBudget(
            f"stage {stage} of the pipeline: {error}",
            least_bytes=error.least_bytes,
            operators=error.operators,
        ) from None


class _Settler:
    """Finds the bubbles and the stalls that fit each other.

    A bubble is shorter under a plan if the stage takes longer for its jobs, longer if others do.
    Copies may then have to wait, or no longer have to. So the stages are simulated in turns with
    the pipeline until the times agree.
    """

    def __init__(self, recordings: PipelineRecordings, machines: Sequence[Machine]) -> None:
        self._recordings, self._machines = recordings, machines

    def settle(self, ways: Sequence[Way]) -> tuple[PipelinePlan, list[tuple[Cost, ...]]]:
        """Return the plans of the stages' ways, and what their jobs cost in the end."""
        plans = [_plan_of(way) for way in ways]
        costs = [way.costs for way in ways]
        before, is_settled = 0.0, False
        for _ in range(ROUNDS):
            traces = self._compose(costs)
            schedules = list(map(self._simulate, traces, plans, self._machines))
            cuts = list(map(cut_jobs, traces, schedules))
            costs = [
                tuple(map(_shift, own, way.costs)) for (own, _), way in zip(cuts, ways, strict=True)
            ]
            ends = self._time(costs)
            seconds = max(ends) + max(tail for _, tail in cuts)
            is_settled = abs(seconds - before) <= SETTLED * seconds
            if is_settled:
                break
            before = seconds
        stages = tuple(
            StagePlan(
                plan=replace(plan, prediction=schedule.prediction, trace=trace),
                trace=trace,
                schedule=schedule,
                budget_bytes=self._machines[stage].budget_bytes,
                busy_seconds=_sum(costs[stage]),
                idle_seconds=max(ends) - _sum(costs[stage]),
                early_seconds=self._sum_early(stage, costs[stage], ends),
            )
            for stage, (plan, trace, schedule) in enumerate(
                zip(plans, traces, schedules, strict=True)
            )
        )
        return PipelinePlan(seconds=seconds, stages=stages, is_settled=is_settled), costs

    @staticmethod
    def _simulate(trace: Trace, plan: Plan, machine: Machine) -> Schedule:
        return simulate(trace, plan, replace(machine, budget_bytes=plan.budget_bytes))

    def _compose(self, costs: Sequence[Sequence[Cost]]) -> list[Trace]:
        """Return the stages' steps with the bubbles between jobs of these costs."""
        bubbles = self._recordings.find_bubbles(*_flatten(costs))
        return [
            self._recordings.compose(stage, own, keeps_empty=True)
            for stage, own in enumerate(bubbles)
        ]

    def _time(self, costs: Sequence[Sequence[Cost]]) -> list[float]:
        return self._recordings.timing.run(*_flatten(costs))

    def _sum_early(self, stage: int, costs: Sequence[Cost], ends: Sequence[float]) -> float:
        """Return the seconds of the stage's recomputing that run before a job's input arrives."""
        timing = self._recordings.timing
        first = timing.firsts[stage]
        ahead = (
            timing.arrival(first + number, ends) - (ends[first + number] - cost.seconds)
            for number, cost in enumerate(costs)
        )
        pairs = zip(ahead, costs, strict=True)
        return sum(max(0.0, min(each, cost.early_seconds)) for each, cost in pairs)


def _plan_of(way: Way) -> Plan:
    assert way.plan is not None  # of a curve of traces
    return way.plan


def _sum(costs: Sequence[Cost]) -> float:
    return sum(each.seconds for each in costs)


def _shift(seconds: float, cost: Cost) -> Cost:
    """Return a cost of another duration; as much of it may run early."""
    return Cost(seconds, min(seconds, cost.early_seconds))


def _flatten(costs: Sequence[Sequence[Cost]]) -> tuple[list[float], list[float]]:
    """Return the durations of all stages' jobs, and the parts that may run early."""
    every = [each for own in costs for each in own]
    return [each.seconds for each in every], [each.early_seconds for each in every]
