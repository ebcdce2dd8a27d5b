"""The layout planner: orders, placements, pressing the best, exact search where it pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from swapkit._native import layout as native
from swapkit.errors import InvalidArgument
from swapkit.planning.beside import make_way
from swapkit.planning.layout.lifetimes import FREE, Bytes, Lifetimes, MemoryLayout, Order, Times

# ---- lanes ---------------------------------------------------------------------------------------
#
# Searches on threads of their own, which end early when their result is no longer needed.

_T = TypeVar("_T")
LANES = 2  # searches at the same time; a constant, so that results do not depend on the machine
THREAD_NAME = "swapkit-layout"
_POLL_SECONDS = 0.02


class SearchLimits:
    """Until when to search. Only the thread that made it polls."""

    def __init__(self, seconds: float, should_stop: Callable[[], bool] | None) -> None:
        """Start the clock.

        Args:
            seconds: after which searches end.
            should_stop: called now and then on this thread; True, or an error, ends them, too.
        """
        self.flag = native.StopFlag()
        self._begin = time.perf_counter()
        self._seconds = seconds
        self._should_stop = should_stop

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    @property
    def is_over(self) -> bool:
        """Whether searches end."""
        return self.flag.is_set

    def poll(self) -> None:
        """Set the flag if it is time to end.

        Raises:
            BaseException: of `should_stop`; the flag is set then.
        """
        try:
            is_asked = self._should_stop is not None and self._should_stop()
        except BaseException:
            self.flag.set()
            raise
        if is_asked or self.elapsed > self._seconds:
            self.flag.set()


class _Lane(Generic[_T]):
    """One piece of work on a thread. It must look at the flag of its limits."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._results: list[_T] = []
        self._error: BaseException | None = None
        # Not a daemon: the work is native, and ends soon after the flag is set.
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # too many threads, or the interpreter ends
            self._run()

    def _run(self) -> None:
        if threading.current_thread() is self._thread:
            make_way()
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised by `take`, on the other thread
            self._error = error

    def wait(self, seconds: float | None) -> bool:
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def take(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def run_lanes(works: Sequence[Callable[[], _T]], limits: SearchLimits) -> list[_T]:
    """Run pieces of work at the same time, each on a thread; return their results in order.

    Raises:
        BaseException: the first error of the work, or of `should_stop`, after all have ended.
    """
    lanes = [_Lane(work) for work in works]
    try:
        for lane in lanes:
            while not lane.wait(_POLL_SECONDS):
                limits.poll()
    finally:
        for lane in lanes:
            lane.wait(None)
    limits.poll()
    return [lane.take() for lane in lanes]


# ---- orders --------------------------------------------------------------------------------------
#
# Orders in which to place items.
#
# The first ones suit traces of training best: what lives alike lies side by side. Where lifetimes
# are nested or disjoint, as in a plain forward and backward pass, the longest first is optimal.

CRITICAL_SHARE = 0.03  # of the bound: loads closer than this are alike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measures:
    """The values that orders sort by. `lives` and `starts` count starts and ends, not time."""

    starts: Times
    lives: Times
    nbytes: NDArray[np.int64]
    slack: Times  # bytes below the bound at the fullest moment of a life, in steps

    @classmethod
    def of(cls, lifetimes: Lifetimes, bound: int, loads: NDArray[np.int64]) -> Measures:
        """Measure items; `loads` are the most bytes alive during each one's life."""
        laps = lifetimes.ends > (lifetimes.period or lifetimes.ends)  # in the next period
        last = lifetimes.ends - laps * lifetimes.period
        times = np.unique(np.concatenate((lifetimes.starts, last)))
        starts = np.searchsorted(times, lifetimes.starts)
        ends = np.searchsorted(times, last) + laps * len(times)
        step = int(bound * CRITICAL_SHARE) + 1
        return cls(
            starts=starts,
            lives=ends - starts,
            nbytes=lifetimes.nbytes,
            slack=(bound - loads) // step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRule:
    """One placement to try."""

    name: str
    keys: Callable[[Measures], tuple[NDArray[np.int64], ...]]  # the most important first
    fit: int = native.FIRST_FIT

    def order(self, measures: Measures) -> Order:
        """Return the items in the order to place them; equal ones by their number."""
        return np.lexsort(self.keys(measures)[::-1]).astype(np.int32)


def _log(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the power of two at or below each value above 0."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


PLACEMENTS = (
    PlacementRule(name="life class, size", keys=lambda m: (-_log(m.lives), -m.nbytes, m.starts)),
    PlacementRule(name="size, life", keys=lambda m: (-m.nbytes, -m.lives)),
    PlacementRule(
        name="load, life class, size",
        keys=lambda m: (m.slack, -_log(m.lives), -m.nbytes, m.starts),
    ),
    PlacementRule(name="wide life class, start", keys=lambda m: (-(_log(m.lives) // 3), m.starts)),
    PlacementRule(name="life", keys=lambda m: (-m.lives, -m.nbytes)),
    PlacementRule(name="size class, start", keys=lambda m: (-_log(m.nbytes), m.starts, -m.lives)),
    PlacementRule(name="size, start", keys=lambda m: (-m.nbytes, m.starts)),
    PlacementRule(name="life, best fit", keys=lambda m: (-m.lives, -m.nbytes), fit=native.BEST_FIT),
)
SIZE_FIRST = PLACEMENTS[1]

# ---- placing -------------------------------------------------------------------------------------
#
# The layout planner: many placements, improvement of the best, exact search where it pays.

SECONDS = 10.0
TOLERANCE = 0.001
# Items that are pressed first: alive while so much of the bound is, and of such a share of it.
HARD_LOAD, HARD_SIZE = 0.85, 1 / 2000
HARD_WORK = 0.75  # share of the work for these
MOST_PRESSED = 32_768  # items; a step of pressing looks at all of them
MOST_SUNK = 8192  # items; with more, placing them once more takes too long
# Work of a lane's improvement, in visits of list entries: some 1.5 ns each.
IMPROVEMENT, MANY, IMPROVEMENT_OF_MANY = 175_000_000, 20_000, 1_500_000_000
RACE = 0.3  # share of it for pressing every placement, before the lowest go on
SMALL = 1024  # items that an exact search takes without a capacity
SMALL_PLACEMENTS = 1 << 18  # of such a search
MOST_PLACEMENTS = 1 << 26  # of a search for a capacity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placement:
    """Offsets that a search found."""

    order: Order
    offsets: Bytes
    height: int
    method: str


def place(
    lifetimes: Lifetimes,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    capacity: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> MemoryLayout:
    """Return addresses for lifetimes, with a height close to the most bytes alive at any time.

    The same arguments give the same layout: the work is counted, and only ends early if `seconds`
    or `should_stop` say so. The searches run on two threads, whatever the number of cores. A sweep
    over time that shares no code with the searches checks every layout before it is returned.

    Args:
        lifetimes: the items.
        seconds: a backstop, far above the usual time; then the best layout so far is returned. The
            first placements, some seconds for 100,000 items, are always finished.
        seed: of the random choices.
        tolerance: the search ends at a layout that is higher than the lower bound by this share.
        capacity: the search ends at a layout of this height instead, and looks for it longer. The
            layout may still be higher: compare its height.
        should_stop: polled on this thread; True ends the search as `seconds` does. Its errors end
            the search and are raised.

    Raises:
        InvalidArgument: fixed items overlap, or a limit is negative.
        CorruptState: the layout is wrong: a bug of swapkit.
    """
    if not (seconds >= 0 and tolerance >= 0 and (capacity is None or capacity >= 0)):
        message = f"seconds ({seconds}), tolerance ({tolerance}) and capacity must not be negative"
        raise InvalidArgument(message)
    search = partial(_Search, lifetimes, seed, effort=1.0)
    return _run(search, lifetimes, tolerance, capacity, SearchLimits(seconds, should_stop))


def place_quickly(
    lifetimes: Lifetimes,
    *,
    effort: float,
    tolerance: float,
    seconds: float = SECONDS,
    should_stop: Callable[[], bool] | None = None,
) -> MemoryLayout:
    """Return addresses as `place` does, with less improvement and without an exact search.

    Args:
        lifetimes: the items.
        effort: share of the work of improvement, below 1.
        tolerance: as for `place`.
        seconds: as for `place`.
        should_stop: as for `place`.
    """
    search = partial(_Search, lifetimes, 0, effort=effort)
    return _run(search, lifetimes, tolerance, None, SearchLimits(seconds, should_stop))


def _run(
    make_search: Callable[[SearchLimits], _Search],
    lifetimes: Lifetimes,
    tolerance: float,
    capacity: int | None,
    limits: SearchLimits,
) -> MemoryLayout:
    if not len(lifetimes):
        return _finish(lifetimes, np.zeros(0, np.int64), 0, "no items", limits)
    search = make_search(limits)
    search.target = int(search.bound * (1 + tolerance)) if capacity is None else capacity
    best = search.run(has_capacity=capacity is not None)
    return _finish(lifetimes, best.offsets, search.bound, best.method, limits)


def _as_native(lifetimes: Lifetimes) -> native.NativeItems:
    some = lifetimes
    return native.NativeItems(some.starts, some.ends, some.nbytes, some.fixed, some.period)


def _finish(
    lifetimes: Lifetimes, offsets: Bytes, bound: int, method: str, limits: SearchLimits
) -> MemoryLayout:
    """Check a layout and return it."""
    height = _as_native(lifetimes).verify(offsets)
    offsets.flags.writeable = False
    return MemoryLayout(
        offsets=offsets,
        height=height,
        lower_bound=bound,
        method=method,
        seconds=limits.elapsed,
    )


class _Search:
    """One call of `place`."""

    def __init__(
        self, lifetimes: Lifetimes, seed: int, limits: SearchLimits, *, effort: float
    ) -> None:
        self.lifetimes = lifetimes
        self.seed = seed * 1_000_003 % (1 << 63)
        self.limits = limits
        self.effort = effort
        self.target = 0
        self.items = _as_native(lifetimes)
        loads = np.empty(len(lifetimes), np.int64)
        self.bound = self.items.measure(loads)
        self.measures = Measures.of(lifetimes, self.bound, loads)
        self.is_hard = (loads >= HARD_LOAD * self.bound) & (
            lifetimes.nbytes >= HARD_SIZE * self.bound
        )
        self.placements: list[_Placement] = []  # the lowest first

    def run(self, *, has_capacity: bool) -> _Placement:
        """Search until the target is reached or the work is done; return the lowest placement."""
        count = len(self.lifetimes)
        can_be_exact = (
            count <= native.MOST_EXACT
            and not self.lifetimes.has_fixed
            and not self.lifetimes.period
            and self.effort >= 1
        )
        for step in self._steps(has_capacity=has_capacity, can_be_exact=can_be_exact):
            step()
            if self.placements[0].height <= self.target or self.limits.is_over:
                break
        return self.placements[0]

    def _steps(self, *, has_capacity: bool, can_be_exact: bool) -> Iterator[Callable[[], None]]:
        """Yield the searches, the cheapest first."""
        for first in range(0, len(PLACEMENTS), LANES):
            yield partial(self._try, PLACEMENTS[first : first + LANES])
        if can_be_exact and has_capacity:
            yield partial(self._search_exactly, self.target, SMALL_PLACEMENTS)
        placed = self.placements.copy()
        if len(self.lifetimes) <= MOST_PRESSED:
            for first in range(0, len(placed), LANES):  # the lowest need not stay the lowest
                yield partial(self._press_some, placed[first : first + LANES])
            yield self._improve
        if can_be_exact and has_capacity:
            yield partial(self._search_exactly, self.target, MOST_PLACEMENTS)
        elif can_be_exact and len(self.lifetimes) <= SMALL:
            yield partial(self._search_exactly, self.bound, SMALL_PLACEMENTS)

    # ---- placements ------------------------------------------------------------------------------

    def _try(self, rules: tuple[PlacementRule, ...]) -> None:
        self._keep(run_lanes([partial(self._place, rule) for rule in rules], self.limits))

    def _place(self, rule: PlacementRule) -> _Placement:
        order = rule.order(self.measures)
        offsets = np.empty(len(order), np.int64)
        self.items.place(order, rule.fit, offsets)
        return self._as_placement(order, offsets, rule.name)

    def _as_placement(self, order: Order, offsets: Bytes, method: str) -> _Placement:
        height = int((offsets + self.lifetimes.nbytes).max())
        return _Placement(order=order, offsets=offsets, height=height, method=method)

    def _keep(self, found: list[_Placement]) -> None:
        """Keep placements, the lowest first; of equal ones the first that was found."""
        known = [each for each in found if each not in self.placements]
        self.placements = sorted([*self.placements, *known], key=lambda each: each.height)

    # ---- improvement -----------------------------------------------------------------------------

    def _press_some(self, placements: list[_Placement]) -> None:
        """Press placements, each for its share of the work."""
        work = int(self._work * RACE / len(PLACEMENTS) * LANES)
        self._keep(
            run_lanes(
                [partial(self._press_hard_first, each, self.seed, work) for each in placements],
                self.limits,
            )
        )

    def _improve(self) -> None:
        """Press the lowest placements on."""
        work = int(self._work * (1 - RACE))
        works = [
            partial(self._press_hard_first, each, self.seed + 1 + lane, work)
            for lane, each in enumerate(self.placements[:LANES])
        ]
        self._keep(run_lanes(works, self.limits))

    @property
    def _work(self) -> int:
        """The work of one lane."""
        work = IMPROVEMENT_OF_MANY if len(self.lifetimes) > MANY else IMPROVEMENT
        return int(work * self.effort)

    def _press_hard_first(self, begun: _Placement, seed: int, work: int) -> _Placement:
        """Press the items that make the layout high, place the others around them, press all."""
        hard = self.is_hard
        if self.lifetimes.has_fixed or not hard.any():
            return self._press(begun, seed, work)
        some = self.lifetimes
        offsets = begun.offsets[hard]
        items = native.NativeItems(
            some.starts[hard], some.ends[hard], some.nbytes[hard], None, some.period
        )
        items.press(
            offsets,
            most_work=int(work * HARD_WORK),
            target=int(items.measure() / self.bound * self.target),
            seed=seed,
            stop=self.limits.flag,
        )
        fixed = np.full(len(hard), FREE, np.int64)
        fixed[hard] = offsets
        around = np.empty(len(hard), np.int64)
        used = _as_native(replace(some, fixed=fixed)).place(begun.order, native.FIRST_FIT, around)
        found = self._as_improved(begun, begun.order, around)
        lower = found if found.height < begun.height else begun
        return self._press(lower, seed, int(work * (1 - HARD_WORK)) - used)

    def _press(self, begun: _Placement, seed: int, work: int) -> _Placement:
        """Press a placement below lower and lower limits, then let the items sink."""
        offsets = begun.offsets.copy()
        self.items.press(
            offsets, most_work=work, target=self.target, seed=seed, stop=self.limits.flag
        )
        if len(offsets) <= MOST_SUNK:
            upwards = np.argsort(offsets, kind="stable").astype(np.int32)
            self.items.place(upwards, native.FIRST_FIT, offsets)
        return self._as_improved(begun, begun.order, offsets)

    def _as_improved(self, begun: _Placement, order: Order, offsets: Bytes) -> _Placement:
        found = self._as_placement(order, offsets, begun.method)
        if found.height == begun.height:
            return begun
        return replace(found, method=f"{begun.method.removesuffix(', improved')}, improved")

    # ---- exact search ----------------------------------------------------------------------------

    def _search_exactly(self, capacity: int, most_placements: int) -> None:
        """Look for a layout within `capacity` by every rule in turn, each time for longer."""
        placements = 2 * len(self.lifetimes)
        while placements <= most_placements and not self.limits.is_over:
            for first in range(0, native.RULES, LANES):
                rules = range(first, min(first + LANES, native.RULES))
                works = [partial(self._search_by, capacity, rule, placements) for rule in rules]
                outcomes = run_lanes(works, self.limits)
                found = [each for _, each in outcomes if each is not None]
                if found:
                    self._keep(found[:1])
                    return
                if any(outcome == native.IMPOSSIBLE for outcome, _ in outcomes):
                    return
            placements *= 2

    def _search_by(
        self, capacity: int, rule: int, placements: int
    ) -> tuple[int, _Placement | None]:
        offsets = np.zeros(len(self.lifetimes), np.int64)
        outcome = self.items.search(
            capacity, rule, offsets, most_work=placements, stop=self.limits.flag
        )
        if outcome != native.FOUND:
            return outcome, None
        order = np.argsort(offsets, kind="stable").astype(np.int32)
        return outcome, self._as_placement(order, offsets, "exact search")
