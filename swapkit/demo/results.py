"""The results of the runs, and checks that they meet the demo's claims."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from swapkit.demo.messages import STABLE, Finished, OutOfMemory, RunKind, RunSpec, Series
from swapkit.units import format_bytes

_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run, finished or out of memory.

    Args:
        spec: specification of the run.
        budget_bytes: budget of its session; None: no session.
        losses: losses of all its steps, as `float.hex` formats them.
        seconds: durations of its timed steps.
        state_bytes: parameters, gradients and optimizer states; 0 if memory ran out earlier.
        finished: its summary.
        out_of_memory: its out-of-memory message; None: memory sufficed.
        series: device bytes over its last step.
        series_seconds: duration of its last step.
        process_peak_bytes: most resident bytes of the process; None: the kernel does not report it.
        witness_peak_bytes: most resident bytes of the pool's mapping; None: no pool or no report.
        witness_looks: number of polls of the kernel for these bytes.
    """

    spec: RunSpec
    budget_bytes: int | None
    losses: tuple[str, ...]
    seconds: tuple[float, ...]
    state_bytes: int
    finished: Finished
    out_of_memory: OutOfMemory | None
    series: Series
    series_seconds: float
    process_peak_bytes: int | None
    witness_peak_bytes: int | None
    witness_looks: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the pool reserved; 0 without a pool."""
        return self.finished.reserved_peak_bytes

    @property
    def median_seconds(self) -> float | None:
        """Median duration of a timed step; None: memory ran out earlier."""
        return statistics.median(self.seconds) if self.seconds else None

    def ratio_to(self, reference: "RunResult") -> float | None:
        """Return the median ratio of this run's step time to the reference's in the same round.

        Args:
            reference: the run to compare with.
        """
        if not self.seconds:
            return None
        return statistics.median(
            mine / its for mine, its in zip(self.seconds, reference.seconds, strict=False)
        )

    def equals(self, reference: "RunResult") -> bool:
        """Return whether losses, parameters, buffers and optimizer states are bitwise equal.

        Args:
            reference: the run to compare with.
        """
        return (
            self.out_of_memory is None
            and self.losses == reference.losses
            and self.finished.digest == reference.finished.digest
        )

    def summary(self) -> str:
        """Return the result in one line."""
        if self.out_of_memory is not None:
            return f"{self.spec.label}: out of memory in step {self.out_of_memory.step + 1}"
        peak = f", peak {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
        seconds = self.median_seconds
        time = "" if seconds is None else f", {seconds * _MS:.0f} ms a step"
        return f"{self.spec.label}: {len(self.losses)} steps{peak}{time}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTrial:
    """Plain training on a pool as large as a budget.

    Args:
        label: display name of the trial.
        budget_bytes: size of the pool.
        out_of_memory: the out-of-memory message; None: memory sufficed.
    """

    label: str
    budget_bytes: int
    out_of_memory: OutOfMemory | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """All runs, the plain one first, and plain training within each budget."""

    runs: tuple[RunResult, ...]
    trials: tuple[PlainTrial, ...]

    @property
    def plain(self) -> RunResult:
        """The reference for times and peaks."""
        return self.of(RunKind.PLAIN)[0]

    @property
    def reference(self) -> RunResult:
        """The reference for numerical results: its process does not use swapkit's pool."""
        return self.of(RunKind.TORCH)[0]

    def of(self, kind: RunKind) -> list[RunResult]:
        """Return all runs of one kind.

        Args:
            kind: kind of the runs.
        """
        return [each for each in self.runs if each.spec.kind == kind]


def race_problems(race: RaceResult) -> Iterator[str]:
    """Yield every deviation from the demo's claims.

    Args:
        race: all runs.
    """
    for result in race.runs:
        for what in run_problems(result, race.reference):
            yield f"{result.spec.label} {what}"
    for trial in race.trials:
        if trial.out_of_memory is None:
            yield f"{trial.label} did not run out of memory, though it needs more"


def run_problems(result: RunResult, reference: RunResult) -> Iterator[str]:
    """Yield the problems of one run.

    Args:
        result: result of the run.
        reference: a run with the correct numbers.
    """
    if result.out_of_memory is not None:
        first_line = result.out_of_memory.text.partition("\n")[0]
        yield f"ran out of memory in step {result.out_of_memory.step + 1}: {first_line}"
    elif not result.equals(reference):
        yield f"is not bit-equal to {reference.spec.label}: {_difference(result, reference)}"
    elif result.spec.kind == RunKind.SWAPKIT and result.finished.stage != STABLE:
        yield f"has no stable plan after {len(result.losses)} steps"
    if result.budget_bytes is not None:
        yield from _budget_problems(result, result.budget_bytes)


def _budget_problems(result: RunResult, budget_bytes: int) -> Iterator[str]:
    """Yield the ways in which a run exceeded its budget."""
    budget = f"the budget of {format_bytes(budget_bytes)}"
    if result.peak_bytes > budget_bytes:
        yield f"reserved {format_bytes(result.peak_bytes)}, more than {budget}"
    if result.witness_peak_bytes is None:
        return
    if result.witness_peak_bytes > budget_bytes:
        yield (
            f"had {format_bytes(result.witness_peak_bytes)} of the pool's mapping resident, "
            f"more than {budget}"
        )
    if result.witness_peak_bytes == 0:
        yield f"had nothing of its pool resident in any of {result.witness_looks} readings"


def _difference(result: RunResult, reference: RunResult) -> str:
    """Return where two runs diverge."""
    for step, (mine, its) in enumerate(zip(result.losses, reference.losses, strict=False)):
        if mine != its:
            return f"the losses differ from step {step + 1} on: {mine} instead of {its}"
    if len(result.losses) != len(reference.losses):
        return f"it trained {len(result.losses)} steps instead of {len(reference.losses)}"
    return "the losses are equal, but the final parameters, buffers or optimizer states differ"


def verdict(race: RaceResult) -> str:
    """Return the conclusion of a race without problems.

    Args:
        race: all runs.
    """
    plain = race.plain
    tightest = min(race.of(RunKind.SWAPKIT), key=lambda result: result.budget_bytes or 0)
    (recompute,) = race.of(RunKind.RECOMPUTE)
    return (
        f"swapkit trains within {_share(tightest.budget_bytes or 0, plain)} of the memory that "
        f"plain training needs, at {_times(tightest, plain)} the step time, with the same bits. "
        "Plain training runs out of memory there; recomputing every block needs "
        f"{_share(recompute.peak_bytes, plain)} and {_times(recompute, plain)} the step time."
    )


def _share(nbytes: int, plain: RunResult) -> str:
    return f"{nbytes / plain.peak_bytes:.0%}"


def _times(result: RunResult, plain: RunResult) -> str:
    ratio = result.ratio_to(plain)
    assert ratio is not None  # it has no problem, so it was timed
    return f"{ratio:.2f} times"
