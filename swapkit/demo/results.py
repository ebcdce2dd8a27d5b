"""What the runs came to, and whether it is what the demo is to show."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swapkit.demo.messages import Finished, OutOfMemory, RunKind, RunSpec, Series
from swapkit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run, finished or out of memory.

    Args:
        spec: what was run.
        losses: of all its steps, as `float.hex` writes them.
        seconds: of its timed steps.
        peak_bytes: tensor bytes on torch's own allocator, else bytes reserved by the pool.
        state_bytes: parameters, gradients and optimizer states; 0 if memory ran out before.
        finished: what it summed up; None if it ran out of memory.
        out_of_memory: how it ran out of memory; None if it did not.
        series: device bytes over its last untimed step, or over the step that failed.
        untimed_seconds: of its untimed steps; none if one of them failed.
        process_peak_bytes: most bytes of the process resident; None where the kernel tells not.
        witness_peak_bytes: most bytes of the pool's mapping resident; None for no pool, no kernel.
        witness_looks: how often the kernel was asked for that.
    """

    spec: RunSpec
    losses: tuple[str, ...]
    seconds: tuple[float, ...]
    peak_bytes: int
    state_bytes: int
    finished: Finished
    out_of_memory: OutOfMemory | None
    series: Series
    untimed_seconds: tuple[float, ...]
    process_peak_bytes: int | None
    witness_peak_bytes: int | None
    witness_looks: int

    @property
    def median_seconds(self) -> float | None:
        """Of a timed step."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def final_loss(self) -> float | None:
        """Of the last step, unless the run ran out of memory."""
        return None if self.out_of_memory else float.fromhex(self.losses[-1])

    def ratio_to(self, reference: "RunResult") -> float | None:
        """Median over the rounds of this run's step time by the other's in the same round.

        Args:
            reference: the run to compare with.
        """
        if not self.seconds:
            return None
        return statistics.median(
            mine / its for mine, its in zip(self.seconds, reference.seconds, strict=True)
        )

    def equals(self, reference: "RunResult") -> bool:
        """Whether all losses and the final parameters are the same, bit for bit.

        Args:
            reference: the run to compare with.
        """
        return (
            self.out_of_memory is None
            and self.losses == reference.losses
            and self.finished.digest == reference.finished.digest
        )


def problems(results: Sequence[RunResult]) -> tuple[str, ...]:
    """Say everything that is not as it should be.

    Args:
        results: of all runs, the one on torch's own allocator first.
    """
    reference = results[0]
    return tuple(
        f"{result.spec.label} {what}"
        for result in results
        for what in _run_problems(result, reference)
    )


def _run_problems(result: RunResult, reference: RunResult) -> Iterator[str]:
    """What is wrong with one run."""
    kind = result.spec.kind
    if kind == RunKind.CAPPED:
        if result.out_of_memory is None:
            yield "did not run out of memory, though its budget is below what it needs"
    elif result.out_of_memory is not None:
        first_line = result.out_of_memory.text.partition("\n")[0]
        yield f"ran out of memory in step {result.out_of_memory.step + 1}: {first_line}"
    elif kind in (RunKind.POOL, RunKind.BUDGETED) and not result.equals(reference):
        yield f"is not bit-equal to {reference.spec.label}: {_difference(result, reference)}"
    if result.spec.budget_bytes is not None:
        yield from _limit_problems(result, result.spec.budget_bytes)


def _limit_problems(result: RunResult, budget_bytes: int) -> Iterator[str]:
    """Where a run passed its budget."""
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
        yield f"was looked at {result.witness_looks} times, and nothing of its pool was resident"


def _difference(result: RunResult, reference: RunResult) -> str:
    """Where two runs part."""
    for step, (mine, its) in enumerate(zip(result.losses, reference.losses, strict=False)):
        if mine != its:
            return f"the losses differ from step {step + 1} on, {mine} there instead of {its}"
    return "the losses are equal, the final parameters differ"
