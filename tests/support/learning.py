"""Learners without steps: what comes of each is said, and so are the plans."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from swapkit.errors import InfeasibleBudget
from swapkit.ir.plans import Plan, Prediction
from swapkit.ir.traces import Trace
from swapkit.planning.selection.cases import Outcome
from swapkit.planning.selection.learner import Learner

if TYPE_CHECKING:
    from swapkit.planning.selection.asking import MakePlans

SHAPE, OTHER_SHAPE = "8x16", "8x32"
RECORDED = Outcome(seconds=1.0, trace=Trace(operators=(), storages=()))
DEVIATING = Outcome(seconds=1.0, deviation="another")
BUDGET = 1000
LEAN = "lean"  # the policy of lean plans


@dataclass
class Plans:
    """Makes numbered plans, and notes for which share of the budget."""

    count: int = 3
    least_share: float = 0.0
    knows_least: bool = False  # and says so
    shares: list[float] = field(default_factory=list)

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        assert trace is RECORDED.trace
        if share < self.least_share:
            least_bytes = int(BUDGET * self.least_share) if self.knows_least else BUDGET
            raise InfeasibleBudget("too little", least_bytes=least_bytes)
        self.shares.append(share)
        return tuple(
            Plan(decisions=(), budget_bytes=int(BUDGET * share), policy=f"{len(self.shares)}.{at}")
            for at in range(min(count, self.count))
        )


class LeanPlans:
    """Makes lean plans, and notes for which times."""

    def __init__(self, peak_bytes: int = 10, *, error: type[BaseException] | None = None) -> None:
        self.peak_bytes = peak_bytes
        self.error = error
        self.asked: list[float] = []

    def __call__(self, most_seconds: float) -> partial[tuple[Plan, ...]]:
        self.asked.append(most_seconds)
        return partial(self.make, most_seconds)

    def make(
        self,
        most_seconds: float,
        trace: Trace,  # noqa: ARG002 - of every planner
        *,
        share: float,  # noqa: ARG002
        count: int,  # noqa: ARG002
    ) -> tuple[Plan, ...]:
        if self.error is not None:
            raise self.error
        prediction = Prediction(seconds=most_seconds, peak_bytes=self.peak_bytes)
        return (Plan(decisions=(), budget_bytes=900, policy=LEAN, prediction=prediction),)


@dataclass
class Gated:
    """Makes plans on another thread, one request at a time, when it is let."""

    plans: MakePlans
    gates: list[threading.Semaphore] = field(default_factory=lambda: [threading.Semaphore(0)])
    threads: list[threading.Thread] = field(default_factory=list)
    first: Plan | None = None  # of a quick search

    def __call__(
        self, trace: Trace, *, share: float, count: int, is_quick: bool = False
    ) -> tuple[Plan, ...]:
        if is_quick:
            return () if self.first is None else (self.first,)
        self.threads.append(threading.current_thread())
        assert self.gates[0].acquire(timeout=20)
        return self.plans(trace, share=share, count=count)

    def finish(self, made: Learner) -> None:
        """Let it make plans, and wait for them."""
        self.gates[0].release()
        running = made._asking._running
        assert running is not None
        running[1].wait()


def learner(plans: Plans, *, profile_steps: int = 2, search_steps: int = 4) -> Learner:
    return Learner(plans, profile_steps=profile_steps, search_steps=search_steps)


def run(made: Learner, outcomes: list[Outcome], signature: str = SHAPE) -> list[str]:
    """Run steps; return what was done in each: a mode, or the plan followed."""
    done = []
    for outcome in outcomes:
        instruction = made.begin(signature)
        done.append(instruction.plan.policy if instruction.plan else instruction.mode.value)
        made.end(outcome)
    return done


def seconds(*values: float) -> list[Outcome]:
    return [Outcome(seconds=value) for value in values]


def warm_up(made: Learner, signature: str = SHAPE) -> None:
    assert run(made, [*seconds(1.0), RECORDED], signature) == ["rescue", "record"]
