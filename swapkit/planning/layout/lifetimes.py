"""Lifetimes and their addresses, and those of a planned step from its schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swapkit._native.layout import MOST_BYTES
from swapkit.errors import InvalidArgument
from swapkit.ir.plans import Action, Plan, Schedule, Transfer
from swapkit.ir.traces import BEFORE, Trace
from swapkit.simulation.items import is_weight
from swapkit.simulation.problems import Problem
from swapkit.simulation.schedules import NEVER, find_event_lives, find_moves
from swapkit.simulation.timeline import lower_for
from swapkit.simulation.validation.gaps import find_tails
from swapkit.units import round_up

Times: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.int64]
Order: TypeAlias = NDArray[np.int32]


# ---- values --------------------------------------------------------------------------------------
#
# Lifetimes, and the addresses given to them.

ROUNDING_BYTES = 512  # of block sizes in the pool: SK_ROUND_BYTES in pool.h
FREE = -1  # an item without a fixed offset


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """N items: when each is in memory, and its size. The arrays are int64 and cannot be written to.

    Item i lives from `starts[i]` until just before `ends[i]`, in any unit of time. An item of
    `fixed` with an offset has been placed and must not move; `FREE` is any other.

    With a `period`, time is a circle: starts lie in it, and an item that ends behind it lives on
    from 0.
    """

    starts: Times
    ends: Times
    nbytes: Bytes
    fixed: Bytes | None = None
    period: int = 0  # 0: time is no circle

    def __post_init__(self) -> None:
        """Take copies of the arrays.

        Raises:
            InvalidArgument: not whole numbers, arrays of different lengths, or an item that ends
                before it starts, has no bytes, or a negative offset; or does not suit the period.
        """
        columns = {"starts": self.starts, "ends": self.ends, "nbytes": self.nbytes}
        if self.fixed is not None:
            columns["fixed"] = self.fixed
        for name, values in columns.items():
            object.__setattr__(self, name, _as_column(name, values))
        lengths = {name: len(getattr(self, name)) for name in columns}
        if len(set(lengths.values())) > 1:
            message = f"expected one value for each item in all arrays, got lengths {lengths}"
            raise InvalidArgument(message)
        self._check("ends", self.ends > self.starts, "is not after its start")
        if self.period:
            is_inside = (self.starts >= 0) & (self.starts < self.period)
            self._check("starts", is_inside, f"is not in the period of {self.period}")
            self._check("ends", self.ends - self.starts <= self.period, "is a period too late")
        self._check("nbytes", self.nbytes > 0, "is not above 0; leave such items out")
        if float(self.nbytes.sum(dtype=np.float64)) > MOST_BYTES:
            message = f"the items have more than {MOST_BYTES} bytes in total"
            raise InvalidArgument(message)
        if self.fixed is not None:
            is_known = (self.fixed >= FREE) & (self.fixed <= MOST_BYTES)
            self._check("fixed", is_known, "is neither an offset nor -1")

    def _check(self, name: str, is_right: NDArray[np.bool_], fault: str) -> None:
        wrong = np.flatnonzero(~is_right)
        if len(wrong):
            first = int(wrong[0])
            value = int(getattr(self, name)[first])
            message = f"{name}[{first}] = {value} {fault} (items wrong in this way: {len(wrong)})"
            raise InvalidArgument(message)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.starts)

    @property
    def has_fixed(self) -> bool:
        """Whether any item must not move."""
        return self.fixed is not None and bool((self.fixed != FREE).any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryLayout:
    """An offset for each item, verified: no two items overlap in time and address."""

    offsets: Bytes
    height: int  # the end of the highest item, in bytes
    lower_bound: int  # no layout is lower
    method: str  # the search that found it, for people
    seconds: float  # it took

    @property
    def excess(self) -> float:
        """The share of the lower bound by which the layout is higher."""
        return self.height / self.lower_bound - 1 if self.lower_bound else 0.0

    def __repr__(self) -> str:
        """Return one line, because there may be many offsets."""
        return (
            f"<MemoryLayout {len(self.offsets)} items, {self.height} bytes, {self.excess:.2%} over "
            f"the bound, by {self.method} in {self.seconds:.3f} s>"
        )


def _as_column(name: str, values: ArrayLike) -> NDArray[Any]:
    """Return a copy as int64 that cannot be written to."""
    given = np.asarray(values)
    is_empty = given.size == 0
    if given.ndim != 1 or not (is_empty or np.issubdtype(given.dtype, np.integer)):
        message = (
            f"expected {name} as an array of whole numbers with one dimension, got shape "
            f"{given.shape} of {given.dtype}"
        )
        raise InvalidArgument(message)
    if given.dtype == np.uint64 and not is_empty and int(given.max()) >= 1 << 63:
        message = f"{name} has {int(given.max())}, which does not fit into 64 bits with a sign"
        raise InvalidArgument(message)
    column = given.astype(np.int64)
    column.flags.writeable = False
    return column


# ---- lifetimes -----------------------------------------------------------------------------------
#
# The lifetimes of a planned step, from its simulated schedule.
#
# Time is the order of what happens to memory. Each operator is a moment for the storages that it
# makes, and the wait before it one for those that are gone by then. Copies fall between these
# moments where the schedule has them. What is freed at a moment is free for what is taken at the
# same moment.

NO_STORAGE = -1  # of memory that an operator takes while it runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLifetimes:
    """The memory of a step: what comes and goes, and what stays.

    Stay i is that of storage `storages[i]` (`NO_STORAGE`: of an operator's workspace, or of what
    recomputing needs in between) and begins at operator `operators[i]`, or in the wait before it.
    A storage that is swapped or recomputed has two stays, in order. A weight's last one may go on
    in the next step.
    """

    lifetimes: Lifetimes
    storages: NDArray[np.int64]
    operators: NDArray[np.int64]
    resident_bytes: int  # in memory throughout the step, rounded; not among the lifetimes


class _Moment(NamedTuple):
    """A point of the step: by window, then by time inside it. Ends come before starts.

    Window 2k is the wait before operator k, window 2k + 1 operator k.
    """

    window: int
    seconds: float = -np.inf


class _Stay(NamedTuple):
    storage: int
    start: _Moment
    end: _Moment
    nbytes: int


def find_lifetimes(
    trace: Trace,
    plan: Plan,
    schedule: Schedule,
    *,
    in_session: bool = False,
    rounding_bytes: int = ROUNDING_BYTES,
) -> StepLifetimes:
    """Return when each storage of a step under a plan is in memory.

    A swapped storage has two stays: until its copy out is done, and from the start of its copy in.
    A recomputed one has two, too: until its last use in forward, and from the operator that needs
    it. By default, sizes are rounded as the pool rounds them.

    Args:
        trace: the step.
        plan: of the step.
        schedule: of the step under the plan: `simulation.timeline.simulate`.
        in_session: whether a swapped storage leaves and comes back where a session that follows the
            plan lets it, at calls of autograd's hooks; else when its copies end and begin.
        rounding_bytes: sizes are rounded up to multiples of it.

    Raises:
        PlanMismatch: the plan is not of this trace.
    """
    finder = _Finder(trace, plan, schedule, in_session=in_session, rounding_bytes=rounding_bytes)
    stays = _join(trace, [*finder.storages(), *finder.workspaces()])
    whole = {stay for stay in stays if _is_throughout(trace, stay)}
    resident = round_up(trace.base_bytes, rounding_bytes) + sum(stay.nbytes for stay in whole)
    return _number(trace, [stay for stay in stays if stay not in whole], resident)


def _number(trace: Trace, stays: list[_Stay], resident_bytes: int) -> StepLifetimes:
    """Return stays as arrays, with their moments numbered in order."""
    moments = sorted({moment for stay in stays for moment in (stay.start, stay.end)})
    numbers = {moment: number for number, moment in enumerate(moments)}
    going_on = _find_going_on(trace, stays)
    period = numbers[moments[-1]] if going_on else 0
    ends_of = {last: numbers[first.end] + period for first, last in going_on.items()}
    rows = [
        (
            numbers[each.start],
            ends_of.get(each, numbers[each.end]),
            each.nbytes,
            each.storage,
            each.start.window // 2,
        )
        for each in stays
        if each not in going_on
    ]
    starts, ends, nbytes, storages, operators = np.array(rows, np.int64).reshape(-1, 5).T
    return StepLifetimes(
        lifetimes=Lifetimes(starts, ends, nbytes, period=period),
        storages=storages,
        operators=operators,
        resident_bytes=resident_bytes,
    )


def _find_going_on(trace: Trace, stays: list[_Stay]) -> dict[_Stay, _Stay]:
    """Return the stays that a step begins with, and those of the step before that go on so.

    A weight that is there at a step's end does not move: the next step finds it at its address.
    """
    weights = [
        (trace.storages[each.storage].module, each)
        for each in stays
        if each.storage != NO_STORAGE and is_weight(trace.storages[each.storage])
    ]
    lasting = {name: each for name, each in weights if _lasts(trace, each)}
    return {
        each: lasting[name]
        for name, each in weights
        if each.start == _operator(BEFORE) and name in lasting
    }


def _lasts(trace: Trace, stay: _Stay) -> bool:
    return stay.end.window >= 2 * len(trace.operators)


def _is_throughout(trace: Trace, stay: _Stay) -> bool:
    return stay.start.window < 0 and _lasts(trace, stay)


def _operator(number: int) -> _Moment:
    """Return the moment at which operator `number` begins; BEFORE: before the step."""
    return _Moment(2 * number + 1)


def _gone(number: int) -> _Moment:
    """Return the moment before operator `number`, which runs without the storage."""
    return _Moment(2 * number)


class _Finder:
    """The stays of a step's storages and operators."""

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        schedule: Schedule,
        *,
        in_session: bool,
        rounding_bytes: int,
    ) -> None:
        self.trace = trace
        self.decisions = {
            each.storage: each for each in plan.decisions if each.action is not Action.KEEP
        }
        self.starts = np.array(schedule.starts)
        self.ends = np.array(schedule.ends)
        self.transfers = {each.storage: each for each in schedule.transfers}
        self.needs = {each.storage: each.operator for each in schedule.recomputations}
        self.rounding_bytes = rounding_bytes
        self.moved_at = self._find_moved() if in_session else {}
        self.problem: Problem = lower_for(trace, plan)
        items = self.problem.item_storages.tolist()
        self.item_of = {storage: item for item, storage in enumerate(items)}

    def storages(self) -> Iterator[_Stay]:
        """Yield the stays of all storages, each storage's in order."""
        ends = self._find_ends()
        for number, storage in enumerate(self.trace.storages):
            nbytes = round_up(storage.nbytes, self.rounding_bytes)
            birth, death = _operator(storage.birth), ends.get(number, _gone(storage.death))
            if number not in self.decisions:
                pieces = [(birth, death)]
            elif self.decisions[number].action is Action.SWAP:
                pieces = self._swapped(number, birth, death)
            else:
                gone = _gone(self._release_of(number))
                pieces = [(birth, gone), (_operator(self.needs[number]), death)]
            for start, end in pieces:
                if nbytes and start < end:
                    yield _Stay(number, start, end, nbytes)

    def _find_ends(self) -> dict[int, _Moment]:
        """Return when weights leave that the next step begins without, by their last parts."""
        tails = find_tails(self.trace, self.decisions)
        ends = {number: _gone(tail + 1) for number, tail in tails.items()}
        for each in self.transfers.values():
            about = self.trace.storages[each.storage]
            if about.birth == BEFORE and about.continues in ends:
                last = self.trace.storages[about.continues]
                leaves = min(self._moment_of(each.released), _gone(last.death))
                ends[about.continues] = max(ends[about.continues], leaves)
        return ends

    def _swapped(
        self, number: int, birth: _Moment, death: _Moment
    ) -> list[tuple[_Moment, _Moment]]:
        transfer: Transfer = self.transfers[number]
        gone, back = self._moment_of(transfer.released), self._moment_of(transfer.in_start)
        goes, comes = self.moved_at.get(number, (NEVER, NEVER))
        if goes != NEVER:
            gone = _gone(goes) if self.trace.events else max(gone, _gone(goes))
        if comes != NEVER:
            back = _gone(comes)
        if is_weight(self.trace.storages[number]) and birth == _operator(BEFORE):
            return [(back, death)]
        # Never before its last use in forward, also where operators take no time.
        gone = max(gone, _gone(self._release_of(number)))
        return [(birth, gone), (back, death)] if gone < back else [(birth, death)]

    def _find_moved(self) -> dict[int, tuple[int, int]]:
        """Return the operators before which a session releases and brings back storages.

        Without recorded events, only the releases that the plan names.
        """
        if not self.trace.events:
            return {
                each.storage: (each.release, NEVER)
                for each in self.decisions.values()
                if each.release is not None
            }
        operators = [event.operator for event in self.trace.events]
        lives = find_event_lives(self.trace)
        found: dict[int, tuple[int, int]] = {}
        for storage, decision in self.decisions.items():
            if decision.action is not Action.SWAP or storage not in lives:
                continue
            goes, comes = find_moves(operators, lives[storage], decision)
            if comes == NEVER:
                comes = lives[storage].first_use
            found[storage] = (
                operators[goes] if goes != NEVER else NEVER,
                operators[comes] if comes < len(operators) else NEVER,
            )
        return found

    def _release_of(self, number: int) -> int:
        """Return the first operator after a storage's last use in forward."""
        slot = int(self.problem.releases[self.item_of[number]])
        return int(self.problem.slot_operators[slot + 1])

    def _moment_of(self, seconds: float) -> _Moment:
        """Return the moment of a time: what happens as an operator starts comes before it."""
        after = int(np.searchsorted(self.starts, seconds, side="left"))
        if after == 0 or seconds >= self.ends[after - 1]:
            return _Moment(2 * after, seconds)
        return _Moment(2 * after - 1, seconds)

    def workspaces(self) -> Iterator[_Stay]:
        """Yield what operators take while they run, and recomputations in between."""
        extra: defaultdict[tuple[int, int], int] = defaultdict(int)
        for storage, need in self.needs.items():
            item = self.item_of[storage]
            key = (need, int(self.problem.own_steps[item]))
            extra[key] = max(extra[key], int(self.problem.chain_bytes[item]))
        held: defaultdict[int, list[int]] = defaultdict(list)
        for (need, _), nbytes in extra.items():
            held[need].append(nbytes)
        for number, operator in enumerate(self.trace.operators):
            for nbytes in (operator.workspace_bytes, *held[number]):
                if nbytes:
                    size = round_up(nbytes, self.rounding_bytes)
                    yield _Stay(NO_STORAGE, _operator(number), _gone(number + 1), size)


def _join(trace: Trace, stays: list[_Stay]) -> list[_Stay]:
    """Return the stays with one stay where a storage goes on as another: it does not move."""
    joined: list[_Stay] = []
    last: dict[int, int] = {}  # of a storage: the place of its last stay
    for stay in stays:
        before = None
        if stay.storage != NO_STORAGE and stay.storage not in last:
            before = trace.storages[stay.storage].continues
        if before in last and _touches(joined[last[before]], stay, trace):
            last[stay.storage] = last[before]
            joined[last[before]] = joined[last[before]]._replace(end=stay.end)
            continue
        if stay.storage != NO_STORAGE:
            last[stay.storage] = len(joined)
        joined.append(stay)
    return joined


def _touches(before: _Stay, stay: _Stay, trace: Trace) -> bool:
    """Whether a stay begins where another ends, at the birth of its storage."""
    birth = trace.storages[stay.storage].birth
    return birth != BEFORE and before.end == _gone(birth) and stay.start == _operator(birth)
