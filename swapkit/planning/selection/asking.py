"""Requests for plans, and plans that the user gave."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from swapkit.errors import InfeasibleBudget
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.beside import ThreadJob, is_at_once
from swapkit.planning.selection.cases import Asked, Case, Request
from swapkit.texts import get_logger

# ---- given ---------------------------------------------------------------------------------------
#
# Plans that the user gave, and the steps that follow them.

_log = get_logger("plan")

SWITCHED = "-"  # in a signature, before the modules whose training mode differs from the model's


class Given:
    """The signature of the given plan, until a step has followed the plan."""

    def __init__(self) -> None:
        """Start without a plan."""
        self._signature: str | None = None
        self._has_told = False  # whether the warning was logged

    def give(self, signature: str) -> None:
        """Set the signature of the given plan."""
        self._signature = signature

    def rename(self, former: str, signature: str) -> None:
        """Change the signature of the given plan, if it is `former`."""
        if self._signature == former:
            self._signature = signature

    def find(self, signature: str) -> str:
        """Return the signature under which a plan is known for a step that begins.

        A plan saved before signatures had a second part is valid for any modules that train. If the
        plan is not for the step, warn once, because the session then makes another plan silently.
        """
        given = self._signature
        if given is None or given == signature:
            return signature
        if signature.partition(SWITCHED)[0] == given:
            return given
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "not following the given plan in these steps: it was made for other inputs or "
                "other trainable modules. Making another plan for them."
            )
        return signature

    def end(self, signature: str) -> None:
        """Forget the plan at the end of a step that followed it."""
        if self._signature == signature:
            self._signature = None


# ---- asking --------------------------------------------------------------------------------------
#
# Requests for plans: the memory to plan for, and the fallback if there is no plan.


class MakePlans(Protocol):
    """A function that makes candidates."""

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        """Return at most `count` plans for a share of the budget, the most promising first.

        Raises:
            InfeasibleBudget: there is no plan.
        """


class MakePlansBeside(Protocol):
    """The same for any thread. It can make a first plan quickly."""

    def __call__(
        self, trace: Trace, *, share: float, count: int, is_quick: bool = False
    ) -> tuple[Plan, ...]:
        """Return plans: see `MakePlans`. `is_quick`: one from a brief search, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a request. Without plans, `why_none` has the reason."""

    share: float
    plans: tuple[Plan, ...] = ()
    why_none: str = ""
    is_last: bool = False  # whether a smaller share has no plan


class Answers(Protocol):
    """The receiver of results."""

    @property
    def make_plans(self) -> MakePlans:
        """The function that makes plans on the requesting thread."""

    def answer(self, asked: Asked, found: Found, seconds: float) -> None:
        """Take a result. `seconds`: time of the background thread; 0: the caller's thread."""

    def fail(self, asked: Asked, error: BaseException) -> None:
        """Handle an error of planning, before the error is raised."""


class Asking:
    """A queue of requests, handled one after another, in the background where possible."""

    def __init__(self, answers: Answers) -> None:
        """Start with an empty queue.

        Args:
            answers: called on the thread that asks and collects; not kept alive.
        """
        # Called on that thread; returns a planner for any other thread. None: no background work.
        self.prepare: Callable[[], MakePlansBeside] | None = None
        self._answers = weakref.ref(answers)
        self._waiting: deque[Asked] = deque()
        self._running: tuple[Asked, ThreadJob[Found]] | None = None
        self._is_over = False

    def ask(self, asked: Asked) -> None:
        """Answer the request at once, or at the end of a later step (`collect`).

        Raises:
            Exception: an error of planning.
        """
        if self._is_over:
            return
        if self.prepare is None or is_at_once():
            self._answer_now(asked)
        else:
            self._waiting.append(asked)
            self._begin_next(self.prepare)

    def collect(self) -> None:
        """Take a finished result, and start the next request. Call at the end of a step.

        Of a request that is not finished, take the first plan, for the steps meanwhile.

        Raises:
            Exception: an error of planning.
        """
        running = self._running  # read once: another thread may end the session
        if running is None or self._is_over or self.prepare is None:
            return
        asked, job = running
        if not job.is_done:
            asked.early = asked.first
            return
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
        """Wait for the plans that are being made for a case, without collecting them.

        Returns:
            The result; None: no plans are being made for the case, or planning has failed.
        """
        running = self._running  # read once, as above
        if running is None or running[0].case is not case:
            return None
        running[1].wait()
        return running[1].result

    def give_up(self) -> None:
        """Accept no more requests, and end the running job soon. Safe also in finalizers."""
        self._is_over = True
        running = self._running
        if running is not None:
            running[1].give_up()

    def stop(self) -> None:
        """Give up, and wait for the background thread. On any thread."""
        self.give_up()
        running, self._running = self._running, None
        self._waiting.clear()
        if running is not None:
            running[1].wait()

    def _begin_next(self, prepare: Callable[[], MakePlansBeside]) -> None:
        while self._waiting and self._running is None and not self._is_over:
            asked = self._waiting.popleft()
            if asked.case.asked is asked:  # the request is still current
                make_plans = prepare()
                self._running = asked, ThreadJob(partial(_find_beside, make_plans, asked))

    def _answer_now(self, asked: Asked) -> None:
        answers = self._answers()
        assert answers is not None
        try:
            found = find_plans(answers.make_plans, asked.request)
        except BaseException as error:  # Ctrl-C, too
            answers.fail(asked, error)
            raise
        answers.answer(asked, found, 0.0)


def _find_beside(make_plans: MakePlansBeside, asked: Asked) -> Found:
    """Return plans; if steps have none yet, publish one that is found quickly beforehand."""
    if asked.is_first:
        share = asked.request.shares[0]
        quick = make_plans(asked.request.trace, share=share, count=1, is_quick=True)
        asked.first = next(iter(quick), None)
    return find_plans(make_plans, asked.request)


def find_plans(make_plans: MakePlans, request: Request) -> Found:
    """Return plans for the first share that has any, or the reason why the last one has none."""
    make_plans = request.make_plans or make_plans
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
    """Return the result for a share, and the least bytes that a plan needs; 0: not known."""
    try:
        plans = make_plans(request.trace, share=share, count=request.count)
    except InfeasibleBudget as error:
        return Found(share=share, why_none=str(error)), error.least_bytes
    return Found(share=share, plans=plans), 0
