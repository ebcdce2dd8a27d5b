"""Training one shape in many ways: the processes, their order, and what came out.

Every way runs in processes of its own. The ways that matter most run first and then again in
reverse order, before the others do the same; what the time does not suffice for is said to be so.
Some limits depend on what others reached, so they are functions of the results so far.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.context import ROOT
from benchmarks.gpu.measure import median_of, spread_of
from benchmarks.gpu.process import python, run_process
from benchmarks.gpu.report import NOT_RUN
from benchmarks.gpu.trainer import FINISHED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.gpu.configurations import Setup
    from benchmarks.gpu.context import Context
    from benchmarks.gpu.process import Finished

Figures = dict[str, Any]

OUT_OF_TIME = "out of time"
MARGIN_SECONDS = 5.0
LEAST_SECONDS = 60.0  # that a process gets before it is taken to hang
GUESS_SECONDS = 25.0  # of a process, before one has run
SLOWER = 1.5  # a process may take so many times as long as the longest before
COMPILE_SECONDS = 60.0  # more than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of the table: its name, and what is to be run, as soon as that is known."""

    name: str
    setup: Callable[[Results], Setup | None]
    repeats: bool = True
    key: bool = False  # among those that matter most
    extra_seconds: float = 0.0


@dataclass
class Results:
    """What the processes of each way found."""

    runs: dict[str, list[Figures]] = field(default_factory=dict)

    def add(self, name: str, figures: Figures) -> None:
        self.runs.setdefault(name, []).append(figures)

    def outcome(self, name: str) -> str:
        """Return how the runs of a way ended: the worst that was seen."""
        outcomes = [run["outcome"] for run in self.runs.get(name, [])]
        bad = [outcome for outcome in outcomes if outcome != FINISHED]
        return str((bad or outcomes or [NOT_RUN])[0])

    def finished(self, name: str) -> list[Figures]:
        """Return the runs that came to their end."""
        return [run for run in self.runs.get(name, []) if run["outcome"] == FINISHED]

    def most(self, name: str, key: str) -> int | None:
        """Return the largest whole number of a way's runs."""
        found = self.largest(name, key)
        return None if found is None else int(found)

    def largest(self, name: str, key: str) -> float | None:
        """Return the largest figure of a way's runs."""
        found = [run[key] for run in self.finished(name) if run.get(key) is not None]
        return max(found, default=None)

    def step_ms(self, name: str) -> float | None:
        """Return the median over the steps of all runs."""
        return median_of(self.steps(name))

    def step_spread(self, name: str) -> float | None:
        """Return how far the middle half of the steps lies apart, as a share of the median."""
        return spread_of(self.steps(name))

    def steps(self, name: str) -> list[float]:
        return [ms for run in self.finished(name) for ms in run.get("steps_ms", [])]

    def bits(self, name: str, standard: str) -> str | None:
        """Say whether the gradients and losses have the bits of the standard."""
        expected = {identity(run) for run in self.finished(standard)} - {None}
        found = {identity(run) for run in self.finished(name)} - {None}
        if not expected or not found:
            return None
        if len(expected) > 1:
            return "plain differs"
        return "equal" if found == expected else "DIFFERENT"


def identity(run: Figures) -> tuple[str, str] | None:
    """Return what identifies a run's gradients and loss, if that was taken."""
    if "digest" not in run:
        return None
    return run["digest"], run["loss"]


class Comparison:
    """Runs the ways of one shape."""

    def __init__(self, context: Context, ways: list[Way], show: Callable[[Results], None]) -> None:
        self.context = context
        self.results = Results()
        self._ways = ways
        self._show = show
        self._longest = GUESS_SECONDS
        self._measured = False
        self._folder = context.output / "runs" / context.report.part
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> Results:
        """Run all ways, as far as the time suffices; show the results after each."""
        key = [way for way in self._ways if way.key]
        others = [] if self.context.quick else [way for way in self._ways if not way.key]
        for ways in (key, others):
            for way in ways:
                self._run_way(way)
            if not (self.context.quick or self.context.dry):
                for way in reversed([way for way in ways if way.repeats]):
                    self._run_way(way)
        return self.results

    def _run_way(self, way: Way) -> None:
        if self.results.runs.get(way.name) and not self.results.finished(way.name):
            return  # it would end like that again
        setup = way.setup(self.results)
        if setup is None:
            return
        needed = self._longest + way.extra_seconds + MARGIN_SECONDS
        if self.context.seconds_left() < needed:
            return
        self.results.add(way.name, self._run_process(way, setup))
        self._show(self.results)

    def _run_process(self, way: Way, setup: Setup) -> Figures:
        number = len(self.results.runs.get(way.name, []))
        result = self._folder / f"{way.name}-{number}.json"
        result.unlink(missing_ok=True)
        log = self._folder / f"{way.name}.log"
        command = python("-m", "benchmarks.gpu.trainer", setup.dump(), result)
        left = self.context.seconds_left() - MARGIN_SECONDS / 2
        longest = self._longest if self._measured else 4 * GUESS_SECONDS
        limit = max(LEAST_SECONDS, longest * 2 * SLOWER) + way.extra_seconds
        if self.context.dry:  # what simulates the device is slow, and slower beside other programs
            limit = math.inf
        done = run_process(command, seconds=min(left, limit), log=log, cwd=ROOT)
        if done.timed_out and left < limit:
            return {"outcome": OUT_OF_TIME, "seconds": done.seconds}
        figures = figures_of(result, done)
        if not result.exists():
            return figures
        if not way.extra_seconds:
            slower = max(self._longest, done.seconds) if self._measured else done.seconds
            self._longest, self._measured = slower, True
        return figures


def figures_of(result: Path, done: Finished) -> Figures:
    """Return what a process left in its file of results, or how it ended without any."""
    if not result.exists():
        return {"outcome": f"failed: {done.describe()}", "seconds": done.seconds}
    figures: Figures = json.loads(result.read_text(encoding="utf-8"))
    return figures


def with_steps(setup: Setup, context: Context) -> Setup:
    """Return a setup with fewer steps where less is asked for."""
    if context.dry:
        return dataclasses.replace(setup, warmup_steps=1, timed_steps=3, rounds=1)
    if context.quick:
        return dataclasses.replace(setup, warmup_steps=1, timed_steps=4)
    return setup


def is_failure(outcome: str) -> bool:
    """Return whether an outcome is a defect, and not a result."""
    return outcome.startswith("failed")
