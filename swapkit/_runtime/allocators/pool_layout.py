"""Planned addresses for the steps that a pool serves.

The pool notes how long blocks live. Once steps repeat, their lifetimes get addresses, on a thread
beside the training, and the next steps are served there: what is reserved is then what is in use.
A step that differs is served as without a layout, and when steps no longer match, the layout goes
and a new one is made.

Every method runs on the thread whose step ends, with no lock held, except where it says otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from functools import partial

from swapkit._native.layout import LayoutStats, Lives, LivesMode, StepMarks
from swapkit._native.pool import Pool
from swapkit._runtime.torch_compat.isolation import make_fork_lock
from swapkit.errors import SwapkitError
from swapkit.planning.beside import ThreadJob, go_on, is_at_once
from swapkit.planning.layout.lifetimes import Lifetimes, MemoryLayout
from swapkit.planning.layout.placing import place
from swapkit.planning.layout.steps import StepLives, read_step, repeated_share
from swapkit.texts import get_logger
from swapkit.units import format_bytes

_log = get_logger("memory")

QUIET_STEPS = 3  # that a layout waits for: it is made from two that end before it
LEAST_REPEATED = 0.95  # share of bytes that two steps in a row must serve alike
LEAST_HITS = 0.9  # share of bytes that must lie in the layout's memory
FEW_MAPS = 16  # of a step, that a layout may cause,
FEW_MAPPED = 0.05  # and this share of its height: where sizes vary, it fills step by step
MOST_DRIFT = 3  # steps below it, in a row, before the layout goes
TOLERANCE = 0.001  # of a layout's height, above the most bytes in use
MOST_SECONDS = 5.0  # for a layout
SEEDS = 4  # of searches for one, until it is within the tolerance
MOST_WAIT = 64  # steps; the wait for the next layout doubles up to this,
MOST_DRIFTED_WAIT = 1024  # or this if layouts had to go: moving to one takes as long as many steps
IDLE_STEPS = 8  # in the layout's memory alone, after which other free memory goes back
MOVING_STEPS = 2  # after a layout was made or dropped: memory moves there where requests are served


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A layout of one step."""

    lives: StepLives
    layout: MemoryLayout


def _go_on() -> bool:
    go_on()
    return False


def _plan(buffer: bytes, times: StepMarks, *, longest: bool) -> _Planned | None:
    """Place the blocks of the step before the last; None: there are none. Any thread."""
    lives = read_step(buffer, times, longest=longest)
    if lives.placed_bytes < LEAST_HITS * lives.step_bytes:
        return None  # too much lives on, or belongs to other streams
    return _Planned(lives=lives, layout=_place(lives.lifetimes()))


def _place(lifetimes: Lifetimes) -> MemoryLayout:
    """Return the lowest layout of several searches."""
    layouts: list[MemoryLayout] = []
    left = MOST_SECONDS
    for seed in range(SEEDS):
        layout = place(
            lifetimes, tolerance=TOLERANCE, seconds=max(left, 0.0), seed=seed, should_stop=_go_on
        )
        left -= layout.seconds
        layouts.append(layout)
        if layout.height <= (1 + TOLERANCE) * layout.lower_bound or left <= 0:
            break
    return min(layouts, key=lambda each: each.height)


@dataclass(frozen=True, slots=True)
class _Counts:
    """What the pool has counted."""

    height_bytes: int = 0  # of the layout; 0: there is none
    served_bytes: int = 0  # since the layout was set
    planned_bytes: int = 0  # of these, in the layout's memory
    maps: int = 0


class PoolLayout:
    """Makes and keeps the layout of one pool, while it has users."""

    def __init__(self, pool: Pool, backward: int = 0) -> None:
        """Begin without users.

        Args:
            pool: an open pool with virtual memory.
            backward: the address of a function for `Lives.set_backward`; 0: none.
        """
        self._pool = pool
        self._lives = Lives(pool)
        self._lives.set_backward(backward)
        self._users: dict[object, LivesMode] = {}
        self._lock = make_fork_lock()  # guards the users and their era
        self._era = 0  # how often the last user has stopped
        self._ending = threading.Lock()  # guards all below
        self._job: ThreadJob[_Planned | None] | None = None
        self._is_planned = False
        self._moving = 0  # steps left until memory has moved
        self._quiet = 0  # steps in a row that a layout could be made from
        self._wait = QUIET_STEPS
        self._drift = 0  # steps in a row that did not lie as planned
        self._idle = 0  # steps left until memory that was mapped outside of the layout goes back
        self._counts = _Counts()  # at the end of the last step
        self._maps = 0  # of the last step without a layout
        self._has_drifted = False  # whether the last layout had to go

    # ---- users: any thread -----------------------------------------------------------------------

    def start(self, user: object, mode: LivesMode = LivesMode.NOTED) -> None:
        """Begin for a user, until `stop`; the pool separates lives if any user wants it."""
        with self._lock:
            self._users[user] = mode
            self._apply()

    def stop(self, user: object) -> None:
        """Undo `start`. A second call does nothing, unless the first one was interrupted."""
        with self._lock:
            self._users.pop(user, None)
            job = None if self._users else self._job
            self._apply()
            self._wait, self._has_drifted = QUIET_STEPS, False  # other steps follow
        if job is not None:
            job.give_up()
            job.wait()

    def _apply(self) -> None:
        mode = max(self._users.values(), default=LivesMode.OFF)
        self._lives.set_mode(mode)
        if mode is LivesMode.OFF:
            self._reset()

    def _reset(self) -> None:
        self._era += 1
        self._is_planned, self._moving = False, 0
        self._job = None
        self._quiet, self._wait = 0, QUIET_STEPS
        self._has_drifted = False

    @property
    def separates(self) -> bool:
        """Whether a user wants memory that lives unequally long to be apart."""
        return LivesMode.SEPARATE in tuple(self._users.values())

    # ---- steps -----------------------------------------------------------------------------------

    def stats(self) -> LayoutStats:
        """Return the counts of the present layout. Any thread."""
        return self._lives.layout_stats()

    @property
    def is_moving(self) -> bool:
        """Whether memory moved to or from planned addresses in the current step.

        Near the budget the step may need a rescue for that, which tells nothing about its plan.
        """
        return self._moving > 0

    def end_step(self, *, is_settled: bool) -> None:
        """Learn from the step that ended: the pool has its mark.

        Steps of sessions on several threads may end at the same time: one of them counts.

        Args:
            is_settled: whether the next steps are expected to be like this one.
        """
        if not self._ending.acquire(blocking=False):
            return
        try:
            self._learn(is_settled=is_settled)
        finally:
            self._ending.release()

    def _learn(self, *, is_settled: bool) -> None:
        self._moving = max(0, self._moving - 1)
        if not is_settled:
            had_layout = self._is_planned
            self._drop()
            if had_layout:  # another kind of step came between: perhaps again
                self._put_off()
            return
        if self._quiet == 0 and not self._is_planned:
            with self._lock:
                self._apply()  # lives of other steps were longer or shorter
        self._quiet += 1
        before, self._counts = self._counts, self._count()
        if self._is_planned:
            self._watch(before)
            return
        self._maps = self._counts.maps - before.maps
        job = self._job  # another thread's `stop` may remove it at any time
        if job is not None:
            self._adopt(job)
        elif self._quiet >= self._wait:
            self._begin()

    def _count(self) -> _Counts:
        stats = self.stats()
        return _Counts(
            stats.height_bytes, stats.served_bytes, stats.planned_bytes, self._pool.maps()
        )

    def _begin(self) -> None:
        """Plan the addresses of the last steps, if they were alike."""
        era = self._era
        buffer, times = self._lives.read()
        if repeated_share(buffer, times) < LEAST_REPEATED:
            self._put_off()
            return
        job = ThreadJob(partial(_plan, buffer, times, longest=self._has_drifted))
        with self._lock:
            is_wanted = era == self._era
            self._job = job if is_wanted else self._job
        if not is_wanted:  # the last user has stopped meanwhile
            job.give_up()
            job.wait()
        elif is_at_once():
            job.wait()
            self._adopt(job)

    def _adopt(self, job: ThreadJob[_Planned | None]) -> None:
        if not job.is_done:
            return
        with self._lock:
            if self._job is not job:
                return  # the last user has stopped meanwhile
            self._job, era = None, self._era
        try:
            planned = job.take()
        except Exception:  # noqa: BLE001 - training does not depend on it
            _log.exception("no addresses could be planned")
            self._wait = MOST_WAIT
            planned = None
        if planned is None:
            self._put_off()
            return
        places = planned.lives.places(planned.layout.offsets)
        try:
            self._pool.trim()  # the layout takes the place of cached memory
            self._lives.set_layout(places, len(places), planned.layout.height)
        except SwapkitError as error:  # such as a failure of the device: the next call meets it
            _log.debug("no layout: %s", error)
            self._put_off()
            return
        with self._lock:
            if era != self._era:  # the same; perhaps another user has begun
                self._lives.set_layout(None, 0, 0)
                return
            self._is_planned, self._moving = True, MOVING_STEPS
        self._drift, self._counts = 0, self._count()
        _log.info(
            "planned addresses of %d requests: %s, of which %s are in use at the peak",
            len(places),
            format_bytes(planned.layout.height),
            format_bytes(planned.layout.lower_bound),
        )

    def _watch(self, before: _Counts) -> None:
        """Drop the layout after several steps that missed it, or mapped more than without it."""
        now = self._counts
        if now.height_bytes == 0:  # its last user stopped on another thread
            self._is_planned = False
            return
        served = now.served_bytes - before.served_bytes
        hit = now.planned_bytes - before.planned_bytes
        maps = now.maps - before.maps
        self._give_back(is_idle=hit == served and maps == 0)
        few_mapped = int(FEW_MAPPED * now.height_bytes) // self._pool.backend.granule_bytes
        most_maps = max(self._maps, FEW_MAPS, few_mapped)
        misses = hit < LEAST_HITS * served or maps > most_maps
        self._drift = self._drift + 1 if misses else 0
        if self._drift >= MOST_DRIFT:
            _log.debug(
                "steps do not lie as planned any more: %d of %d bytes, %d maps", hit, served, maps
            )
            self._has_drifted = True
            self._drop()
            self._put_off()

    def _give_back(self, *, is_idle: bool) -> None:
        """Give memory back that was in use when the layout was made, such as that of gradients.

        Or that a step which differed needed in addition, some steps ago.
        """
        is_first = self._moving == MOVING_STEPS - 1  # of the layout's steps
        was_idle = self._idle == 1
        self._idle = max(0, self._idle - 1) if is_idle else IDLE_STEPS
        if is_first or (is_idle and was_idle):
            with contextlib.suppress(SwapkitError):  # of the device: its next call meets it
                self._lives.trim_unplanned()

    def _put_off(self) -> None:
        """Wait longer before the next layout, as long as there is none."""
        most = MOST_DRIFTED_WAIT if self._has_drifted else MOST_WAIT
        self._quiet, self._wait = 0, min(2 * self._wait, most)

    def _drop(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.give_up()
        if self._is_planned:
            self._lives.set_layout(None, 0, 0)
            self._is_planned, self._moving = False, MOVING_STEPS
            with contextlib.suppress(SwapkitError):  # of the device: its next call meets it
                self._pool.trim()  # other requests would not use the layout's memory
        self._quiet = 0
