"""Lets the runs take turns: step by step, one after another, so that all meet the same noise."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from swapkit.demo.children import Child, RunFailedError
from swapkit.demo.messages import (
    Action,
    Finished,
    Message,
    OutOfMemory,
    RunKind,
    RunSpec,
    Stepped,
    Warmed,
)
from swapkit.demo.options import DemoOptions
from swapkit.demo.results import RunResult
from swapkit.demo.sizes import UNTIMED_STEPS
from swapkit.demo.witness import available

WARM_UNITS = 1 + UNTIMED_STEPS
"""Length of a run's start on the progress bar, where a timed step is 1."""

Progress = Callable[[str, int], None]
"""Told what is done next, and how many units were done just before."""


@dataclass(kw_only=True)
class Entrant:
    """A run that takes part, and what it has come to so far."""

    child: Child
    losses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    warmed: Warmed | None = None
    out_of_memory: OutOfMemory | None = None
    finished: Finished | None = None
    process_peak_bytes: int | None = None

    def warm(self) -> None:
        """Build everything and train the untimed steps."""
        answer = self.child.ask(Action.WARM)
        if isinstance(answer, Warmed):
            self.warmed = answer
            self.losses.extend(answer.losses)
        else:
            self._take(answer)

    def step(self) -> None:
        """Train one timed step."""
        witness = self.child.witness
        stopped_before = witness.stopped_seconds
        answer = self.child.ask(Action.STEP)
        if isinstance(answer, Stepped):
            self.losses.append(answer.loss)
            self.seconds.append(answer.seconds - (witness.stopped_seconds - stopped_before))
        else:
            self._take(answer)

    def finish(self) -> None:
        """Sum the run up and end its process."""
        answer = self.child.ask(Action.FINISH)
        if not isinstance(answer, Finished):
            msg = f"run {self.child.spec.label} answered {type(answer).__name__} when it finished"
            raise RunFailedError(msg)
        self.finished = answer
        self.process_peak_bytes = self.child.peak_bytes()
        self.child.end()

    def result(self) -> RunResult:
        """What the run came to, once it is finished."""
        finished, warmed, failure = self.finished, self.warmed, self.out_of_memory
        if finished is None:
            msg = f"run {self.child.spec.label} has not finished"
            raise RunFailedError(msg)
        counted_bytes = warmed.peak_bytes if warmed else 0
        witness = self.child.witness
        witnessed = self.child.spec.kind != RunKind.PLAIN and available()
        return RunResult(
            spec=self.child.spec,
            losses=tuple(self.losses),
            seconds=tuple(self.seconds),
            peak_bytes=counted_bytes or finished.reserved_peak_bytes,
            state_bytes=warmed.state_bytes if warmed else 0,
            finished=finished,
            out_of_memory=failure,
            series=warmed.series if warmed else failure.series if failure else (),
            untimed_seconds=warmed.step_seconds if warmed else (),
            process_peak_bytes=self.process_peak_bytes,
            witness_peak_bytes=witness.peak_bytes if witnessed else None,
            witness_looks=witness.looks,
        )

    def _take(self, answer: Message) -> None:
        """Accept that there was too little memory; nothing else is left to answer."""
        if not isinstance(answer, OutOfMemory):
            msg = f"run {self.child.spec.label} answered {type(answer).__name__}"
            raise RunFailedError(msg)
        self.out_of_memory = answer


def unit_count(options: DemoOptions) -> int:
    """Length of the progress bar.

    Args:
        options: of the demo.
    """
    budgets = len(options.budgets)
    return WARM_UNITS * (3 + 2 * budgets) + options.steps * (3 + budgets)


def race(options: DemoOptions, progress: Progress) -> tuple[RunResult, ...]:
    """Run everything.

    Args:
        options: of the demo.
        progress: told how it goes.

    Returns:
        The results: a, b, c, then d and e of every budget.

    Raises:
        OptionError: a budget is not between what is possible and what is needed.
        RunFailedError: a run crashed.
    """
    with enter_runs(options, size=options.size) as enter:
        reference = enter("a", RunKind.PLAIN, None)
        _warm(reference, progress)
        if reference.warmed is None:
            msg = "run a, which has no limit, ran out of memory"
            raise RunFailedError(msg)
        budgets = [
            (
                budget.label,
                budget.resolve(
                    peak_bytes=reference.warmed.peak_bytes,
                    least_bytes=reference.warmed.state_bytes,
                ),
            )
            for budget in options.budgets
        ]
        entrants = [reference]
        for label, kind, budget_bytes in _others(budgets):
            entrants.append(enter(label, kind, budget_bytes))
            _warm(entrants[-1], progress)
            if kind == RunKind.CAPPED:
                entrants[-1].finish()
        take_turns(entrants, options.steps, progress)
        for entrant in entrants:
            if entrant.finished is None:
                entrant.finish()
        return tuple(entrant.result() for entrant in entrants)


def _others(budgets: Sequence[tuple[str, int]]) -> Iterator[tuple[str, RunKind, int | None]]:
    """All runs but the first."""
    yield "b", RunKind.POOL, None
    yield "c", RunKind.RECOMPUTE, None
    for label, budget_bytes in budgets:
        yield f"d{label}", RunKind.CAPPED, budget_bytes
        yield f"e{label}", RunKind.BUDGETED, budget_bytes


class Enter(Protocol):
    """Starts a run."""

    def __call__(
        self, label: str, kind: RunKind, budget_bytes: int | None, policy: str = "rescue"
    ) -> Entrant:
        """Start the process of a run, which waits for its first command."""


@contextmanager
def enter_runs(
    options: DemoOptions, *, size: str, untimed: int = UNTIMED_STEPS, bytes_per_s: float = 0.0
) -> Iterator[Enter]:
    """A function that starts runs; whatever happens, none outlives this context.

    Args:
        options: of the demo.
        size: of the model.
        untimed: steps at the beginning that are not timed.
        bytes_per_s: of the link to the host; 0: as fast as memory.
    """
    with ExitStack() as stack:

        def enter(
            label: str, kind: RunKind, budget_bytes: int | None, policy: str = "rescue"
        ) -> Entrant:
            spec = RunSpec(
                label=label,
                kind=kind,
                budget_bytes=budget_bytes,
                size=size,
                seed=options.seed,
                threads=options.threads,
                parent_pid=os.getpid(),
                policy=policy,
                bytes_per_s=bytes_per_s,
                untimed=untimed,
            )
            child = Child(spec)
            stack.callback(child.kill)
            return Entrant(child=child)

        yield enter


def _warm(entrant: Entrant, progress: Progress) -> None:
    progress(f"{entrant.child.spec.label}: first steps", 0)
    entrant.warm()
    progress(f"{entrant.child.spec.label}: first steps", WARM_UNITS)


def take_turns(entrants: Sequence[Entrant], steps: int, progress: Progress) -> None:
    """Train the timed steps: every round one of each, every other round in reverse.

    Args:
        entrants: that were warmed; those that are finished or out of memory do nothing.
        steps: of each.
        progress: told how it goes.
    """
    for index in range(steps):
        for entrant in entrants if index % 2 == 0 else reversed(entrants):
            if entrant.finished is None and entrant.out_of_memory is None:
                progress(f"{entrant.child.spec.label}: timed step {index + 1} of {steps}", 0)
                entrant.step()
                progress(f"{entrant.child.spec.label}: timed step {index + 1} of {steps}", 1)
