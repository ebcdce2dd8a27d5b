"""Conversion of a run, with times of slots, to a schedule with times of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swapkit.ir.plans import Recomputation, Schedule, Stall, Transfer
from swapkit.simulation.running import RECOMPUTE, SWAP, SWAP_TO_DISK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swapkit.ir.plans import Prediction
    from swapkit.ir.traces import Trace
    from swapkit.simulation.problems import Floats, Problem
    from swapkit.simulation.running import Run


def make_schedule(
    trace: Trace,
    problem: Problem,
    actions: NDArray[np.int8],
    run: Run,
    prediction: Prediction,
) -> Schedule:
    """Return the schedule of a run that did not get stuck."""
    starts, ends = _spread(trace, problem, actions, run)
    return Schedule(
        starts=tuple(starts.tolist()),
        ends=tuple(ends.tolist()),
        transfers=_list_transfers(problem, actions, run),
        recomputations=_list_recomputations(problem, actions, run),
        stalls=_list_stalls(problem, run),
        prediction=prediction,
    )


def _spread(
    trace: Trace, problem: Problem, actions: NDArray[np.int8], run: Run
) -> tuple[Floats, Floats]:
    """Return the start and end of each operator: its share of its slot's time."""
    firsts = problem.slot_operators[:-1]
    work = np.array([operator.seconds for operator in trace.operators], np.float64)
    work[firsts] += _recompute_seconds(problem, actions, run)
    totals = np.add.reduceat(work, firsts)
    spans = run.slot_ends - run.slot_starts
    rates = np.divide(spans, totals, out=np.zeros_like(spans), where=totals > 0)
    counts = np.diff(problem.slot_operators)
    done = np.cumsum(work)
    before = np.repeat(done[firsts] - work[firsts], counts)
    slot_starts, rates = np.repeat(run.slot_starts, counts), np.repeat(rates, counts)
    starts: Floats = slot_starts + (done - work - before) * rates
    ends: Floats = slot_starts + (done - before) * rates
    # Avoid rounding gaps: neighbours touch, and slots keep their exact times.
    starts[firsts] = run.slot_starts
    ends[problem.slot_operators[1:] - 1] = run.slot_ends
    inner = np.ones(len(starts), np.bool_)
    inner[firsts] = False
    starts[inner] = ends[np.flatnonzero(inner) - 1]
    return starts, ends


def _recompute_seconds(problem: Problem, actions: NDArray[np.int8], run: Run) -> Floats:
    """Return the seconds of recomputing before each slot, where a step runs only once."""
    seconds = np.zeros(len(problem.slot_seconds), np.float64)
    ran = {
        (int(run.needs[item]), step)
        for item in np.flatnonzero(actions == RECOMPUTE)
        for step in problem.steps_of(int(item))
    }
    for slot, step in sorted(ran):
        seconds[slot] += problem.step_seconds[step]
    return seconds


def _list_transfers(problem: Problem, actions: NDArray[np.int8], run: Run) -> tuple[Transfer, ...]:
    """Return the transfers, in the order of copies out."""
    swapped = np.flatnonzero((actions == SWAP) | (actions == SWAP_TO_DISK))
    return tuple(
        Transfer(
            storage=int(problem.item_storages[item]),
            out_start=float(run.out_starts[item]),
            out_end=float(run.out_ends[item]),
            released=float(run.released[item]),
            in_start=float(run.in_starts[item]),
            in_end=float(run.in_ends[item]),
        )
        for item in swapped[np.argsort(run.out_starts[swapped], kind="stable")]
    )


def _list_recomputations(
    problem: Problem, actions: NDArray[np.int8], run: Run
) -> tuple[Recomputation, ...]:
    """Return the recomputations, ordered by need, then by birth."""
    recomputed = np.flatnonzero(actions == RECOMPUTE)
    order = np.lexsort((problem.births[recomputed], run.needs[recomputed]))
    ran: set[tuple[int, int]] = set()
    made = []
    for item in recomputed[order]:
        slot = int(run.needs[item])
        new = {(slot, step) for step in problem.steps_of(int(item))} - ran
        ran |= new
        made.append(
            Recomputation(
                storage=int(problem.item_storages[item]),
                operator=int(problem.slot_operators[slot]),
                seconds=sum(float(problem.step_seconds[step]) for _, step in sorted(new)),
            )
        )
    return tuple(made)


def _list_stalls(problem: Problem, run: Run) -> tuple[Stall, ...]:
    """Return the stalls; a stall ends at the same time as the copy that it waits for."""
    ended = {
        float(end): int(problem.item_storages[item])
        for ends in (run.out_ends, run.in_ends)
        for item, end in enumerate(ends)
    }
    return tuple(
        Stall(
            operator=int(problem.slot_operators[slot]),
            storage=ended[float(run.slot_starts[slot])],
            seconds=float(run.slot_stalls[slot]),
        )
        for slot in np.flatnonzero(run.slot_stalls > 0)
    )
