"""A run as a schedule of operators, and the events at which a session moves storages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swapkit.ir.plans import Decision, Prediction, Recomputation, Schedule, Stall, Transfer
from swapkit.ir.traces import EventKind, Trace
from swapkit.simulation.problems import Floats, Problem
from swapkit.simulation.running import RECOMPUTE, SWAP, SWAP_TO_DISK, Run

# ---- schedules -----------------------------------------------------------------------------------
#
# Conversion of a run, with times of slots, to a schedule with times of operators.


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


# ---- event moves ---------------------------------------------------------------------------------
#
# When a session carries out the moves of a plan: at which calls of autograd's hooks.
#
# An *event* is one call of the hooks, and `Event.operator` says which operators run between two
# events. A plan names operators, but moves are carried out at events: a release that has to be done
# before an operator is due at the last event before it; a prefetch that may start at an operator is
# due at the first event that is not earlier.

NEVER = -1


class EventLife(NamedTuple):
    """The events of one storage."""

    # If it continues another storage, the first event after the end of that one counts as a save.
    first_save: int
    last_save: int  # before its first use
    first_use: int  # the number of events if it is never used
    first_event: int


def find_event_lives(trace: Trace) -> dict[int, EventLife]:
    """Return the events of each saved storage."""
    saves: dict[int, list[int]] = {}
    uses: dict[int, int] = {}
    for number, event in enumerate(trace.events):
        if event.storage is None:
            continue
        if event.kind is EventKind.USE:
            uses.setdefault(event.storage, number)
        else:
            saves.setdefault(event.storage, []).append(number)
    lives: dict[int, EventLife] = {}
    operators = [event.operator for event in trace.events]
    for storage in {**saves, **uses}:
        numbers = saves.get(storage, [])
        first_use = uses.get(storage, len(trace.events))
        first_event = min([first_use, *numbers[:1]])
        if trace.storages[storage].continues is not None:
            numbers = [bisect_left(operators, trace.storages[storage].birth), *numbers]
        if numbers:
            last = max((each for each in numbers if each < first_use), default=numbers[0])
            lives[storage] = EventLife(numbers[0], last, first_use, first_event)
    return lives


class EventMoves(NamedTuple):
    """The events at which a storage is released and prefetched; -1: not set."""

    goes: int
    comes: int


def find_moves(operators: Sequence[int], life: EventLife, decision: Decision) -> EventMoves:
    """Return the events at which a swapped storage is released and prefetched."""
    goes = comes = NEVER
    if decision.release is not None:
        goes = max(bisect_right(operators, decision.release) - 1, life.last_save)
    if decision.prefetch is None:
        return EventMoves(goes, comes)
    # A prefetch that is not due before the operator of the first use is left to that use: at the
    # event before, the operators in between still need the memory.
    if life.first_use == len(operators) or decision.prefetch < operators[life.first_use]:
        comes = min(_event_before(operators, decision.prefetch), life.first_use - 1)
    return EventMoves(goes, comes)


def _event_before(operators: Sequence[int], operator: int) -> int:
    """Return the last event right before an operator, or else the first event after it."""
    after = bisect_right(operators, operator)
    is_right_before = after > 0 and operators[after - 1] == operator
    return after - 1 if is_right_before else after
