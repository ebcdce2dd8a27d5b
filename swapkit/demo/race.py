"""Running all runs in turns, step by step, so that machine noise affects all equally."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from swapkit.demo.children import Child, RunFailedError
from swapkit.demo.messages import (
    STABLE,
    Command,
    Finished,
    Message,
    OutOfMemory,
    RunAction,
    RunKind,
    RunSpec,
    Stepped,
)
from swapkit.demo.options import DemoOptions
from swapkit.demo.progress import Progress
from swapkit.demo.results import PlainTrial, RaceResult, RunResult
from swapkit.demo.witness import available
from swapkit.units import format_bytes

LEAST_STEPS = 2
"""Before the timed ones: from the second step on optimizer states exist, and the peak shows."""
MOST_STEPS = 16
"""Before the timed ones, whether plans are stable or not."""
BUILD_UNITS, SETTLE_UNITS = 3, 6
"""Lengths on the progress bar, where a step is 1."""


@dataclass(kw_only=True)
class Entrant:
    """A run in the race, with its results so far."""

    child: Child
    budget_bytes: int | None = None
    losses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latest: Stepped | None = None
    out_of_memory: OutOfMemory | None = None
    finished: Finished | None = None
    process_peak_bytes: int | None = None

    @property
    def label(self) -> str:
        """Display name of the run."""
        return self.child.spec.label

    @property
    def goes_on(self) -> bool:
        """Whether the run can train another step."""
        return self.out_of_memory is None and self.finished is None

    @property
    def is_settled(self) -> bool:
        """Whether the next steps will run like the last one: the plan, if any, is stable."""
        if self.latest is None or len(self.losses) < LEAST_STEPS:
            return False
        return self.child.spec.kind != RunKind.SWAPKIT or self.latest.stage == STABLE

    def build(self, budget_bytes: int | None) -> None:
        """Build everything and train the first step with memory watched from outside.

        Args:
            budget_bytes: budget of the session; None: no session.
        """
        self.budget_bytes = budget_bytes
        self.child.ask(Command(action=RunAction.BUILD, limit_bytes=budget_bytes))
        self.step(watched=True)

    def step(self, *, timed: bool = False, watched: bool = False) -> None:
        """Train one step, unless the run is over.

        Args:
            timed: whether the step's time counts.
            watched: whether to poll the kernel for the run's memory.
        """
        if not self.goes_on:
            return
        answer = self.child.ask(Command(action=RunAction.STEP, watched=watched))
        if isinstance(answer, OutOfMemory):
            self.out_of_memory = answer
        elif isinstance(answer, Stepped):
            self.latest = answer
            self.losses.append(answer.loss)
            if timed:
                self.seconds.append(answer.seconds)
        else:
            raise self._unexpected(answer)

    def finish(self) -> None:
        """Collect the run's summary; its process continues."""
        answer = self.child.ask(Command(action=RunAction.FINISH))
        if not isinstance(answer, Finished):
            raise self._unexpected(answer)
        self.finished = answer
        self.process_peak_bytes = self.child.peak_bytes()

    def try_within(self, limit_bytes: int) -> OutOfMemory | None:
        """Train one more step of a finished run on a pool of this size.

        Args:
            limit_bytes: size of the pool.

        Returns:
            The out-of-memory message; None: the step fits.
        """
        answer = self.child.ask(Command(action=RunAction.TRY, limit_bytes=limit_bytes))
        if not isinstance(answer, OutOfMemory | Stepped):
            raise self._unexpected(answer)
        return answer if isinstance(answer, OutOfMemory) else None

    def result(self) -> RunResult:
        """Return the result of the finished run."""
        finished, latest = self.finished, self.latest
        if finished is None:
            msg = f'the run "{self.label}" has not finished'
            raise RunFailedError(msg)
        has_pool = self.child.spec.kind != RunKind.TORCH
        return RunResult(
            spec=self.child.spec,
            budget_bytes=self.budget_bytes,
            losses=tuple(self.losses),
            seconds=tuple(self.seconds),
            state_bytes=latest.state_bytes if latest else 0,
            finished=finished,
            out_of_memory=self.out_of_memory,
            series=latest.series if latest else (),
            series_seconds=latest.seconds if latest else 0.0,
            process_peak_bytes=self.process_peak_bytes,
            witness_peak_bytes=(
                self.child.witness.peak_bytes if has_pool and available() else None
            ),
            witness_looks=self.child.witness.looks,
        )

    def _unexpected(self, answer: Message) -> RunFailedError:
        return RunFailedError(f'the run "{self.label}" answered {type(answer).__name__}')


def unit_count(options: DemoOptions) -> int:
    """Return the length of the progress bar.

    Args:
        options: options of the demo.
    """
    return (3 + len(options.budgets)) * (BUILD_UNITS + SETTLE_UNITS + options.steps)


def race(options: DemoOptions, progress: Progress) -> RaceResult:
    """Run the whole race.

    Args:
        options: options of the demo.
        progress: receives progress messages.

    Raises:
        OptionError: a budget is not between the model's state and the peak without a limit.
        RunFailedError: a run crashed.
    """
    with enter_runs(options) as enter:
        # Start all at once: the other processes import torch while the first one trains.
        plain = enter("plain", RunKind.PLAIN)
        alone = enter("plain, torch's allocator", RunKind.TORCH)
        recompute = enter("recompute every block", RunKind.RECOMPUTE)
        limited = [enter(f"swapkit at {each.text}", RunKind.SWAPKIT) for each in options.budgets]
        entrants = [plain, alone, recompute, *limited]
        progress.say("measuring the memory of plain training")
        peak_bytes, state_bytes = measure(plain, progress)
        budgets = [
            each.resolve(peak_bytes=peak_bytes, least_bytes=state_bytes) for each in options.budgets
        ]
        progress.say(f"plain needs {format_bytes(peak_bytes)}")
        for entrant in (alone, recompute):
            build(entrant, None, progress)
        for entrant, budget_bytes in zip(limited, budgets, strict=True):
            build(entrant, budget_bytes, progress)
            settle(entrant, progress)
            found = "plan found" if entrant.is_settled else "no stable plan"
            progress.say(f"{entrant.label}: {found} after {len(entrant.losses)} steps")
        catch_up(entrants, progress)
        progress.say(f"timing {options.steps} steps of each run, in turns")
        take_turns(entrants, options.steps, progress)
        conclude(entrants, progress)
        trials = [
            PlainTrial(label=f"plain at {asked.text}", budget_bytes=nbytes, out_of_memory=failure)
            for asked, nbytes in zip(options.budgets, budgets, strict=True)
            for failure in [plain.try_within(nbytes)]
        ]
        for entrant in entrants:
            entrant.child.end()
        return RaceResult(
            runs=tuple(entrant.result() for entrant in entrants), trials=tuple(trials)
        )


class Enter(Protocol):
    """Function that starts a run."""

    def __call__(self, label: str, kind: RunKind, policy: str = "auto") -> Entrant:
        """Start the process of a run; it waits for its first command."""


@contextmanager
def enter_runs(options: DemoOptions, *, bytes_per_s: float = 0.0) -> Iterator[Enter]:
    """Yield a function that starts runs; no run outlives this context.

    Args:
        options: options of the demo.
        bytes_per_s: speed of the link to the host; 0: as fast as memory.
    """
    with ExitStack() as stack:

        def enter(label: str, kind: RunKind, policy: str = "auto") -> Entrant:
            spec = RunSpec(
                label=label,
                kind=kind,
                size=options.size,
                seed=options.seed,
                threads=options.threads,
                parent_pid=os.getpid(),
                policy=policy,
                bytes_per_s=bytes_per_s,
            )
            child = Child(spec)
            stack.callback(child.kill)
            return Entrant(child=child)

        yield enter


def build(entrant: Entrant, budget_bytes: int | None, progress: Progress) -> None:
    """Build a run and train its first step.

    Args:
        entrant: the run.
        budget_bytes: budget of its session; None: no session.
        progress: receives progress messages.
    """
    progress.now(f"{entrant.label}: first step")
    entrant.build(budget_bytes)
    progress.done(BUILD_UNITS)


def measure(entrant: Entrant, progress: Progress) -> tuple[int, int]:
    """Build a run without a limit and measure its memory.

    Args:
        entrant: the run.
        progress: receives progress messages.

    Returns:
        Most bytes that the pool reserved; bytes of parameters, gradients and optimizer states.

    Raises:
        RunFailedError: the run ran out of memory.
    """
    build(entrant, None, progress)
    while entrant.goes_on and len(entrant.losses) < LEAST_STEPS:
        entrant.step()
    if entrant.latest is None or entrant.out_of_memory is not None:
        msg = f'the run "{entrant.label}", which has no limit, ran out of memory'
        raise RunFailedError(msg)
    return entrant.latest.reserved_peak_bytes, entrant.latest.state_bytes


def settle(entrant: Entrant, progress: Progress) -> None:
    """Train until the plan is stable, at most `MOST_STEPS` steps.

    Args:
        entrant: a run that was built.
        progress: receives progress messages.
    """
    while entrant.goes_on and not entrant.is_settled and len(entrant.losses) < MOST_STEPS:
        progress.now(f"{entrant.label}: step {len(entrant.losses) + 1}, looking for a plan")
        entrant.step()


def catch_up(entrants: Sequence[Entrant], progress: Progress) -> None:
    """Train until all runs have done as many steps as the run with the most steps.

    Args:
        entrants: runs that were built.
        progress: receives progress messages.
    """
    count = max(len(entrant.losses) for entrant in entrants)
    for entrant in entrants:
        while entrant.goes_on and len(entrant.losses) < count:
            progress.now(f"{entrant.label}: step {len(entrant.losses) + 1}, not timed")
            entrant.step()
        progress.done(SETTLE_UNITS)


def take_turns(entrants: Sequence[Entrant], steps: int, progress: Progress) -> None:
    """Train the timed steps: one step of each run per round, in reverse order every other round.

    Args:
        entrants: settled runs; those that are out of memory do nothing.
        steps: timed steps of each run.
        progress: receives progress messages.
    """
    for index in range(steps):
        for entrant in entrants if index % 2 == 0 else reversed(entrants):
            progress.now(f"{entrant.label}: timed step {index + 1} of {steps}")
            entrant.step(timed=True)
            progress.done(1)


def conclude(entrants: Sequence[Entrant], progress: Progress) -> None:
    """Train one more step of each run with memory watched from outside; then finish the run.

    Args:
        entrants: runs that have trained the timed steps.
        progress: receives progress messages.
    """
    for entrant in entrants:
        progress.now(f"{entrant.label}: last step")
        entrant.step(watched=True)
        entrant.finish()
        progress.say(entrant.result().summary())
