"""The demo's result as JSON: one flat object with stable keys."""

import platform
from collections.abc import Sequence

from swapkit.demo.options import DemoOptions
from swapkit.demo.results import RunResult, problems


def as_record(
    results: Sequence[RunResult], options: DemoOptions, *, seconds: float
) -> dict[str, object]:
    """Put everything into one object; a run's keys begin with its label, as in "e60.ratio".

    Args:
        results: of all runs, the one on torch's own allocator first.
        options: of the demo.
        seconds: that it all took.
    """
    found = problems(results)
    record: dict[str, object] = {
        "ok": not found,
        "problems": found,
        "runs": [result.spec.label for result in results],
        "size": options.size,
        "steps": options.steps,
        "seed": options.seed,
        "threads": options.threads,
        "seconds": seconds,
        "python": platform.python_version(),
        "torch": results[0].finished.torch_version,
        "machine": platform.platform(),
    }
    for result in results:
        fields = _fields(result, results[0])
        record.update({f"{result.spec.label}.{key}": value for key, value in fields.items()})
    return record


def _fields(result: RunResult, reference: RunResult) -> dict[str, object]:
    finished, failure = result.finished, result.out_of_memory
    return {
        "kind": result.spec.kind.value,
        "outcome": "OutOfMemoryError" if failure else "finished",
        "budget_bytes": result.spec.budget_bytes,
        "peak_bytes": result.peak_bytes,
        "allocated_peak_bytes": finished.allocated_peak_bytes or result.peak_bytes,
        "witness_peak_bytes": result.witness_peak_bytes,
        "witness_looks": result.witness_looks,
        "process_peak_bytes": result.process_peak_bytes,
        "median_step_seconds": result.median_seconds,
        "step_seconds": result.seconds,
        "ratio": result.ratio_to(reference),
        "rescues": finished.rescues,
        "swapped_out_bytes": finished.swapped_out_bytes,
        "swapped_in_bytes": finished.swapped_in_bytes,
        "host_peak_bytes": finished.host_peak_bytes,
        "stall_seconds": finished.stall_seconds,
        "final_loss": result.final_loss,
        "losses": result.losses,
        "parameters_sha256": finished.digest,
        "bit_equal": result.equals(reference),
        "failed_step": failure.step + 1 if failure else None,
        "error": failure.text if failure else None,
        "untimed_seconds": result.untimed_seconds,
        "series": result.series,
    }
