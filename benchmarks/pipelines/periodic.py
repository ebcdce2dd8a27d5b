"""Estimated curves of the stages of long pipelines, each from one microbatch.

Composing and planning the whole step of a stage takes too long where hundreds of microbatches are
in flight. But they are all alike, so one of them is planned: its forward, the time until its
backward, and its backward. While it waits, the others take the memory, so only the bytes that it
holds then count. A stage holds as many times these bytes as microbatches are in flight, and more
for those that run or move. That is an upper bound of what a plan of the whole step needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pipelines.composing import PipelineRecordings
from benchmarks.pipelines.curves import WORTH, bounds_of, cut_jobs
from benchmarks.pipelines.early import find_early
from benchmarks.pipelines.orders import BackwardPart, Job, JobOrder, count_in_flight
from benchmarks.pipelines.ways import Cost, StageWays, Way
from swapkit.ir.traces import BEFORE, Kind, Phase, Trace
from swapkit.planning.lean_plans import QUICK
from swapkit.planning.planner import restrict
from swapkit.planning.search.solving import Solution, plan_problem
from swapkit.simulation.items import find_levels
from swapkit.simulation.lowering import lower
from swapkit.simulation.schedules import make_schedule
from swapkit.simulation.timeline import predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pipelines.microbatches import MicrobatchRecording
    from swapkit.ir.machines import Machine
    from swapkit.planning.search.moves import Actions, Trial
    from swapkit.simulation.problems import Problem

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)  # of the bytes that are held
MOVING = 3  # microbatches that may have all their bytes: one runs, one leaves, one returns
_WHOLE = (Phase.FORWARD, Phase.BACKWARD)  # the jobs of a microbatch that is not split
_WAITING = 3  # idle operators between forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One way to run a microbatch of a chunk."""

    held_bytes: int  # from its forward to its backward
    running_bytes: int  # most, while it runs or moves
    costs: dict[tuple[Phase, BackwardPart], Cost]
    swapped_bytes: int
    recompute_seconds: float


def estimate_curves(
    recordings: PipelineRecordings,
    machine: Machine,
    *,
    policy: str = "auto",
    shares: Sequence[float] = SHARES,
) -> list[StageWays]:
    """Return the ways of each stage; each stage's chunks run in the way of the same share.

    The microbatches of a chunk are taken to be like its first one.

    Args:
        recordings: the recorded microbatches of the stages, and the order of their jobs.
        machine: its links; its budget is ignored.
        policy: "auto", "swap" or "recompute".
        shares: of the bytes that a microbatch holds while it waits for its backward.
    """
    known: dict[tuple[int, bool], list[Held]] = {}
    curves, slack = [], recordings.find_slack(WORTH)
    for stage, chunks in enumerate(recordings.stages):
        jobs = recordings.order.jobs[stage]
        split = {job.chunk for job in jobs if job.part is not BackwardPart.WHOLE}
        helds = []
        for chunk, microbatches in enumerate(chunks):
            key = id(microbatches[0].trace), chunk in split
            if key not in known:
                known[key] = _hold(microbatches[0], machine, policy, shares, is_split=key[1])
            helds.append(known[key])
        curves.append(_EstimatedStage(jobs, chunks, slack[stage]).combine(helds))
    return curves


class _EstimatedStage:
    """A stage whose microbatches run alike, except those that the pipeline waits for.

    These, such as the last ones in the first stages, may keep all their bytes.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        chunks: Sequence[Sequence[MicrobatchRecording]],
        slack: Sequence[float],
    ) -> None:
        self._jobs, self._flying = jobs, count_in_flight(jobs)
        self._microbatches = len(chunks[0])
        self._fixed_bytes = sum(_fixed_bytes(own[0].trace) for own in chunks)
        # In use on the device outside of all chunks.
        self._fixed_bytes -= sum(own[0].trace.base_bytes for own in chunks[1:])
        backward, pairs = Phase.BACKWARD, zip(jobs, slack, strict=True)
        tight = {
            (job.chunk, job.microbatch)
            for job, own in pairs
            if job.phase is backward and own <= 0 and job.part is not BackwardPart.WEIGHT
        }
        self._tight = tight if len(tight) < sum(self._flying) else set()

    def combine(self, helds: Sequence[Sequence[Held]]) -> StageWays:
        """Return the ways of the stage from those of its chunks' microbatches."""
        fast = [own[0] for own in helds]
        keys = [(chunk, key) for chunk, own in enumerate(fast) for key in own.costs]
        numbers = {key: number for number, key in enumerate(keys)}
        kinds = []
        for job in self._jobs:
            number = numbers[job.chunk, (job.phase, job.part)]
            is_tight = (job.chunk, job.microbatch) in self._tight
            kinds.append(number + len(keys) * is_tight)
        ways = []
        for several in zip(*helds, strict=True):
            ways.append(self._make_way(several, several, keys))
            if self._tight and several != tuple(fast):
                ways.append(self._make_way(several, fast, keys))
        return StageWays(ways=tuple(ways), kinds=kinds)

    def _make_way(
        self,
        several: Sequence[Held],
        tight: Sequence[Held],
        keys: Sequence[tuple[int, tuple[Phase, BackwardPart]]],
    ) -> Way:
        """`tight`: how the microbatches run that the pipeline waits for, in each chunk."""
        flying = self._flying
        moving = min(sum(flying), MOVING if any(each.swapped_bytes for each in several) else 1)
        waiting = sum(n * each.held_bytes for n, each in zip(flying, several, strict=True))
        waiting += sum(
            max(0, tight[chunk].held_bytes - several[chunk].held_bytes) for chunk, _ in self._tight
        )
        more = max(each.running_bytes - each.held_bytes for each in (*several, *tight))
        return Way(
            peak_bytes=self._fixed_bytes + waiting + moving * max(0, more),
            costs=(
                *(several[chunk].costs[key] for chunk, key in keys),
                *(tight[chunk].costs[key] for chunk, key in keys),
            ),
            swapped_bytes=self._microbatches * sum(each.swapped_bytes for each in several),
            recompute_seconds=self._microbatches * sum(each.recompute_seconds for each in several),
        )


def _fixed_bytes(trace: Trace) -> int:
    """Return the bytes that stay on the device: states, gradients and those of no storage."""
    return trace.base_bytes + sum(
        each.nbytes
        for each in trace.storages
        if each.kind is Kind.GRADIENT or (each.birth == BEFORE and each.kind is not Kind.INPUT)
    )


def _hold(
    recorded: MicrobatchRecording,
    machine: Machine,
    policy: str,
    shares: Sequence[float],
    *,
    is_split: bool,
) -> list[Held]:
    """Return the ways of a microbatch, the one that holds the most bytes first.

    A share that no plan reaches gives the way before it.
    """
    step = _WaitingStep(recorded, is_split=is_split)
    problem = restrict(step.problem, policy)
    helds: list[Held] = []
    known: list[Actions] = []
    for share in sorted(shares):
        budget_bytes = step.least_bytes + round(share * step.held_bytes)
        within = replace(machine, budget_bytes=budget_bytes)
        solution = plan_problem(problem, within, effort=QUICK, known=known)
        if isinstance(solution, Solution):
            known = [solution.trial.actions]
            helds.append(step.measure(problem, solution.trial))
        elif share == max(shares):
            raise AssertionError("a microbatch cannot hold what its recording held")
    helds.reverse()
    return helds + helds[-1:] * (len(shares) - len(helds))


class _WaitingStep:
    """A microbatch whose backward waits, while others use the memory.

    Copies out may run until the stage's next forward, and copies back from the end of a forward on:
    the links then have a forward and a backward of time for each microbatch and direction.
    """

    def __init__(self, recorded: MicrobatchRecording, *, is_split: bool) -> None:
        parts = (BackwardPart.INPUT, BackwardPart.WEIGHT) if is_split else (BackwardPart.WHOLE,)
        jobs = (Job(Phase.FORWARD, 0), *(Job(Phase.BACKWARD, 0, 0, part) for part in parts))
        order = JobOrder(jobs=(jobs,), places=((0,),), microbatches=1)
        seconds = [recorded.seconds_of(job) for job in jobs]
        plain = PipelineRecordings(order, [[[recorded]]]).compose(
            0, [0.0] * (len(jobs) + 1), keeps_empty=True
        )
        self._keys = [(job.phase, job.part) for job in jobs]
        others_bytes = plain.peak_bytes
        bounds = bounds_of(plain)
        self.trace = _stretch(plain, bounds[1], (sum(seconds[1:]), 0.0, seconds[0]), others_bytes)
        more = _WAITING - 1
        self._wait = bounds[1] + 1
        self._bounds = [bounds[0], *(each + more for each in bounds[1:])]
        self.problem = lower(self.trace, boundaries=(self._wait, self._wait + 1))
        fixed = [each.birth == BEFORE and each.kind is not Kind.INPUT for each in plain.storages]
        self._fixed_bytes = plain.base_bytes + sum(
            each.nbytes for each, is_there in zip(plain.storages, fixed, strict=True) if is_there
        )
        self.least_bytes = self._fixed_bytes + others_bytes
        self.held_bytes = self.trace.memory()[self._wait] - self.least_bytes

    def measure(self, problem: Problem, trial: Trial) -> Held:
        """Return what a trial holds and takes."""
        run, actions = trial.run, trial.actions
        levels = find_levels(problem, run, actions)
        slot = int(np.searchsorted(problem.slot_operators[:-1], self._wait))
        held = int(levels[slot]) - self.least_bytes
        levels[slot] = 0
        most = int(levels.max())
        schedule = make_schedule(self.trace, problem, actions, run, predict(run))
        seconds, _ = cut_jobs(self.trace, schedule, self._bounds)
        early = find_early(problem, run, actions, self._bounds[:-1], most)
        costs = list(map(Cost, seconds, map(min, seconds, early)))
        found = dict(zip(self._keys, costs, strict=True))
        if len(costs) > len(_WHOLE):  # some microbatches of a schedule may run it whole
            whole = Cost(sum(each.seconds for each in costs[1:]), costs[1].early_seconds)
            found[Phase.BACKWARD, BackwardPart.WHOLE] = whole
        return Held(
            held_bytes=max(0, held),
            running_bytes=max(0, most - self._fixed_bytes),
            costs=found,
            swapped_bytes=run.swapped_bytes,
            recompute_seconds=run.recompute_seconds,
        )


def _stretch(trace: Trace, at: int, seconds: Sequence[float], others_bytes: int) -> Trace:
    """Return a trace with several idle operators instead of one; the second has `others_bytes`."""
    idle = trace.operators[at]
    more = len(seconds) - 1

    def moved(operator: int) -> int:
        return operator + more if operator > at else operator

    between = [replace(idle, seconds=each) for each in seconds]
    between[1] = replace(between[1], workspace_bytes=others_bytes)
    return replace(
        trace,
        operators=(*trace.operators[:at], *between, *trace.operators[at + 1 :]),
        storages=tuple(
            replace(each, birth=moved(each.birth), death=moved(each.death), held=moved(each.held))
            for each in trace.storages
        ),
        events=tuple(replace(each, operator=moved(each.operator)) for each in trace.events),
    )
