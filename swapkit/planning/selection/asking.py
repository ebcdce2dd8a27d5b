"""Asking for plans: for how much memory, and what to do if there are none."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from swapkit.errors import InfeasibleBudget
from swapkit.planning.beside import ThreadJob, is_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.cases import Asked, Case, Request


class MakePlans(Protocol):
    """Makes candidates."""

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        """Return at most `count` plans for a share of the budget, the most promising first.

        Raises:
            InfeasibleBudget: there is none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found. No plans: `why_none` says why."""

    share: float
    plans: tuple[Plan, ...] = ()
    why_none: str = ""
    is_last: bool = False  # whether there are none for less


class Answers(Protocol):
    """Who asks."""

    @property
    def make_plans(self) -> MakePlans:
        """What makes plans on the thread that asks."""

    def answer(self, asked: Asked, found: Found, seconds: float) -> None:
        """Take what was found, which took so many seconds of a thread of its own."""

    def fail(self, asked: Asked, error: BaseException) -> None:
        """Note that plans could not be made, before the error is raised."""


class Asking:
    """Has plans made one after the other, on one thread. Beside the training where that can be."""

    def __init__(self, answers: Answers) -> None:
        """Begin with nothing asked.

        Args:
            answers: is told on the thread that asks and collects; not kept alive.
        """
        # Returns, on that thread, what makes the same plans on any other; None: nothing does.
        self.prepare: Callable[[], MakePlans] | None = None
        self._answers = weakref.ref(answers)
        self._waiting: deque[Asked] = deque()
        self._running: tuple[Asked, ThreadJob[Found]] | None = None
        self._is_over = False

    def ask(self, asked: Asked) -> None:
        """Answer at once, or when a step ends after there is an answer (`collect`).

        Raises:
            Exception: of what makes plans.
        """
        if self._is_over:
            return
        if self.prepare is None or is_at_once():
            self._answer_now(asked)
        else:
            self._waiting.append(asked)
            self._begin_next(self.prepare)

    def collect(self) -> None:
        """Take what is done, and go on with what is asked for next. As a step ends.

        Raises:
            Exception: of what makes plans.
        """
        running = self._running  # one look: the session may be ended on another thread
        if running is None or self._is_over or self.prepare is None or not running[1].is_done:
            return
        asked, job = running
        self._running = None
        self._begin_next(self.prepare)
        answers = self._answers()
        assert answers is not None
        try:
            found = job.take()
        except BaseException as error:
            answers.fail(asked, error)
            raise
        if found is None:  # the program's main thread has ended, or this is a forked child
            self._answer_now(asked)
        else:
            answers.answer(asked, found, job.seconds)

    def wait_for(self, case: Case) -> Found | None:
        """Wait for the plans that are made for a case, which are still to be collected.

        Returns:
            What was found; None: nothing is made for it, or that has failed.
        """
        running = self._running  # one look, as above
        if running is None or running[0].case is not case:
            return None
        running[1].wait()
        return running[1].result

    def give_up(self) -> None:
        """Ask for nothing more, and let what is made end soon. Anywhere, in finalizers too."""
        self._is_over = True
        running = self._running
        if running is not None:
            running[1].give_up()

    def stop(self) -> None:
        """Likewise, and wait for the thread. Any thread."""
        self.give_up()
        running, self._running = self._running, None
        self._waiting.clear()
        if running is not None:
            running[1].wait()

    def _begin_next(self, prepare: Callable[[], MakePlans]) -> None:
        while self._waiting and self._running is None and not self._is_over:
            asked = self._waiting.popleft()
            if asked.case.asked is asked:  # nobody has forgotten it meanwhile
                make_plans = prepare()
                self._running = asked, ThreadJob(partial(find_plans, make_plans, asked.request))

    def _answer_now(self, asked: Asked) -> None:
        answers = self._answers()
        assert answers is not None
        try:
            found = find_plans(answers.make_plans, asked.request)
        except BaseException as error:  # Ctrl-C, too
            answers.fail(asked, error)
            raise
        answers.answer(asked, found, 0.0)


def find_plans(make_plans: MakePlans, request: Request) -> Found:
    """Return plans for the first share that has any, or why the last one has none."""
    for share in request.shares:
        found, least_bytes = _try_share(make_plans, request, share)
        if found.plans:
            return found
    if not 0 < least_bytes < request.failed_bytes:
        return found
    share = (least_bytes + 1) / request.failed_bytes * request.failed_share
    found, _ = _try_share(make_plans, request, share)
    return replace(found, is_last=True)


def _try_share(make_plans: MakePlans, request: Request, share: float) -> tuple[Found, int]:
    """Return what is found for a share, and the bytes that a plan needs at least; 0: not known."""
    try:
        plans = make_plans(request.trace, share=share, count=request.count)
    except InfeasibleBudget as error:
        return Found(share=share, why_none=str(error)), error.least_bytes
    return Found(share=share, plans=plans), 0
