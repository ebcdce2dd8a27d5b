"""The demo's result as JSON: one flat object with stable keys."""

import platform
from collections.abc import Sequence

from swapkit.demo.options import DemoOptions
from swapkit.demo.results import RunResult
from swapkit.demo.sweep import NO_LIMIT, Point


def as_record(
    results: Sequence[RunResult],
    points: Sequence[Point],
    found: Sequence[str],
    options: DemoOptions,
    *,
    seconds: float,
) -> dict[str, object]:
    """Put everything into one object.

    A run's keys begin with its label, as in "e60.ratio"; those of the sweep with link, budget and
    run, as in "sweep.slow.45.auto.median_step_seconds".

    Args:
        results: of all runs, the one on torch's own allocator first.
        points: of the sweep.
        found: what is not as it should be.
        options: of the demo.
        seconds: that it all took.
    """
    record: dict[str, object] = {
        "ok": not found,
        "problems": list(found),
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
    for point in points:
        link = "slow" if point.bytes_per_s else "fast"
        record.update(
            {
                f"sweep.{link}.{point.share:.0%}".rstrip("%") + f".{key}": value
                for key, value in _point_fields(point).items()
            }
        )
    return record


def _point_fields(point: Point) -> dict[str, object]:
    fields: dict[str, object] = {
        "budget_bytes": point.results["auto"].spec.budget_bytes,
        "bytes_per_s": point.bytes_per_s,
        "recovered": point.recovered("auto"),
        "possible": point.possible(),
    }
    for name, result in point.results.items():
        finished = result.finished
        values = {
            "outcome": "OutOfMemoryError" if result.out_of_memory else "finished",
            "median_step_seconds": result.median_seconds,
            "step_seconds": result.seconds,
            "peak_bytes": result.peak_bytes,
            "bit_equal": result.equals(point.results[NO_LIMIT]),
            "stage": finished.stage,
            "rescues": finished.rescues,
            "late_rescues": finished.late_rescues,
            "predicted_share": finished.predicted_share,
            "bound_share": finished.bound_share,
        }
        fields.update({f"{name}.{key}": value for key, value in values.items()})
    return fields


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
