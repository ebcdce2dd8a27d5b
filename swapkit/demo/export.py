"""The demo's result as JSON."""

import platform
from collections.abc import Sequence

from swapkit.demo.options import DemoOptions
from swapkit.demo.results import RaceResult, RunResult
from swapkit.demo.sweep import Point


def as_record(
    race: RaceResult,
    points: Sequence[Point],
    problems: Sequence[str],
    options: DemoOptions,
    *,
    seconds: float,
) -> dict[str, object]:
    """Return the whole result as one JSON object.

    Args:
        race: all runs.
        points: points of the sweep.
        problems: all problems found.
        options: options of the demo.
        seconds: duration of the demo.
    """
    return {
        "ok": not problems,
        "problems": list(problems),
        "runs": {each.spec.label: _fields(each, race.plain, race.reference) for each in race.runs},
        "trials": {
            trial.label: {
                "budget_bytes": trial.budget_bytes,
                "error": trial.out_of_memory.text if trial.out_of_memory else None,
            }
            for trial in race.trials
        },
        "sweep": [_point_fields(point) for point in points],
        "size": options.size,
        "steps": options.steps,
        "seed": options.seed,
        "threads": options.threads,
        "seconds": seconds,
        "python": platform.python_version(),
        "torch": race.plain.finished.torch_version,
        "machine": platform.platform(),
    }


def _point_fields(point: Point) -> dict[str, object]:
    free = point.free
    return {
        "share": point.share,
        "bytes_per_s": point.bytes_per_s,
        "budget_bytes": point.results["auto"].budget_bytes,
        "recovered": point.recovered("auto"),
        "possible": point.possible(),
        "runs": {name: _fields(result, free, free) for name, result in point.results.items()},
    }


def _fields(result: RunResult, plain: RunResult, reference: RunResult) -> dict[str, object]:
    finished, failure = result.finished, result.out_of_memory
    return {
        "kind": result.spec.kind.value,
        "error": failure.text if failure else None,
        "failed_step": failure.step + 1 if failure else None,
        "budget_bytes": result.budget_bytes,
        "peak_bytes": result.peak_bytes,
        "allocated_peak_bytes": finished.allocated_peak_bytes,
        "witness_peak_bytes": result.witness_peak_bytes,
        "witness_looks": result.witness_looks,
        "process_peak_bytes": result.process_peak_bytes,
        "median_step_seconds": result.median_seconds,
        "step_seconds": result.seconds,
        "ratio": result.ratio_to(plain),
        "stage": finished.stage,
        "rescues": finished.rescues,
        "late_rescues": finished.late_rescues,
        "swapped_out_bytes": finished.swapped_out_bytes,
        "swapped_in_bytes": finished.swapped_in_bytes,
        "recomputed_regions": finished.recomputed_regions,
        "host_peak_bytes": finished.host_peak_bytes,
        "stall_seconds": finished.stall_seconds,
        "predicted_share": finished.predicted_share,
        "bound_share": finished.bound_share,
        "losses": result.losses,
        "state_sha256": finished.digest,
        "bit_equal": result.equals(reference),
        "series": result.series,
        "series_seconds": result.series_seconds,
    }
