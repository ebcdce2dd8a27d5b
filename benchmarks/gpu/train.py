"""Training a Llama-style stack in many ways: time, memory, and the bits of the gradients.

`plain` has no limit; `pool` has swapkit's pool below torch and no session. The others of torch:
recompute of each block, of each block but for matrix products and attention, `save_on_cpu`,
recompute inside it, compiled blocks that may save a share. `X_at_Y`: X with the limit that Y had in
use at most. `swapkit_40`: what is always resident, and 40 % of what plain training needs beyond.
`swap_everything`: all that is saved is swapped, within 1.02 times the peak that `prediction` has.
`overhead`: a session with more room than is needed, in turns with none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu.comparison import OUT_OF_TIME, Comparison, Results, Way, is_failure
from benchmarks.gpu.probe import OF_ALLOCATOR, OF_SESSION
from benchmarks.gpu.report import Check, Value, ratio_of
from benchmarks.gpu.trainer import FINISHED, OUT_OF_MEMORY
from benchmarks.gpu.ways import AS_PREDICTED, list_first, list_ways, peak_of

if TYPE_CHECKING:
    from benchmarks.gpu.context import Context

OVERHEAD = 1.01


def row_of(results: Results, name: str) -> dict[str, Value]:
    """Return the row of a way."""
    step_ms = results.step_ms(name)
    return {
        "outcome": results.outcome(name),
        "step_ms": step_ms,
        "step_ratio": ratio_of(step_ms, results.step_ms("plain")),
        "spread_ratio": results.step_spread(name),
        "limit_bytes": results.most(name, "budget_bytes"),
        "in_use_peak_bytes": peak_of(results, name),
        "reserved_peak_bytes": results.most(name, "reserved_peak_bytes"),
        "device_peak_bytes": results.most(name, "device_peak_bytes"),
        "host_peak_bytes": results.most(name, "host_peak_bytes"),
        "swapped_out_bytes": results.most(name, "swapped_out_bytes"),
        "rescues": results.most(name, "rescues"),
        "bits": results.bits(name, "plain"),
    }


def steps_of(results: Results, name: str) -> dict[str, Value]:
    """Return the row of a way in the table of its stable steps."""
    return step_figures(results, name) | kernel_figures(results, name)


def step_figures(results: Results, name: str) -> dict[str, Value]:
    """Return what a stable step of a way did."""
    keys = (*OF_SESSION, *OF_ALLOCATOR, "planned_bytes", "plan_changes")
    return {key: results.largest(name, key) for key in keys}


def kernel_figures(results: Results, name: str) -> dict[str, Value]:
    """Return what the profiler saw: `repeated_kernels` are those beyond plain training's.

    The recorded times are to be those of plain training's kernels, of forward and backward.
    """
    kernels, plain = results.largest(name, "kernels"), results.largest("plain", "kernels")
    return {
        "kernel_ms": results.largest(name, "kernel_ms"),
        "repeated_kernels": None if kernels is None or plain is None else kernels - plain,
        "recorded_ms": results.largest(name, "recorded_ms"),
        "recorded_ratio": ratio_of(
            results.largest(name, "recorded_ms"), results.largest("plain", "kernel_ms")
        ),
    }


def show_way(context: Context, shape: str, way: Way, results: Results) -> None:
    """Put the rows of a way into the report."""
    context.report.row(title_of(shape), way.name, row_of(results, way.name))
    context.report.row(f"stable steps of {shape}", way.name, steps_of(results, way.name))


def show(context: Context, shape: str, ways: list[Way], results: Results) -> None:
    """Put the rows of all ways, and the checks, into the report."""
    for way in ways:
        if results.runs.get(way.name):
            show_way(context, shape, way, results)
    for check in checks_of(results, ways, dry=context.dry, targets=shape != "1b_4k"):
        context.report.check(check)
    for text in describe_failures(results):
        context.report.note(text)


def checks_of(results: Results, ways: list[Way], *, dry: bool, targets: bool) -> list[Check]:
    """Return what is promised, and unless this is a dry run, what is aimed at."""
    ours = [way.name for way in ways if results.finished(way.name) and is_ours(way.name)]
    checks = [
        Check(
            name="failures",
            text="ways of swapkit that failed, or ran out of memory at 40 % and more",
            value=float(len(find_failures(results, ways, dry=dry))),
            at_most=0,
            promise=True,
        )
    ]
    for name in ours:
        bits = results.bits(name, "plain")
        checks.append(
            Check(
                name=f"bits_{name}",
                text=f"{name}: gradients bit for bit those of plain training",
                value=None if bits in {None, "plain differs"} else float(bits == "equal"),
                at_least=1,
                promise=True,
            )
        )
        peak, budget = results.most(name, "session_peak_bytes"), results.most(name, "budget_bytes")
        if budget is not None:
            checks.append(
                Check(
                    name=f"budget_{name}",
                    text=f"{name}: reserved / budget",
                    value=ratio_of(peak, budget),
                    at_most=1,
                    promise=True,
                )
            )
    return checks if dry else checks + speed_checks(results, targets=targets)


def speed_checks(results: Results, *, targets: bool) -> list[Check]:
    """Return what is aimed at."""
    ratio = ratio_of(results.step_ms("swapkit_at_recompute"), results.step_ms("recompute"))
    measured = results.most("swap_everything", "session_peak_bytes")
    overhead = [run["overhead_ratio"] for run in results.finished("overhead")]
    checks = [
        Check(
            name=f"fits_{name}",
            text=f"{name}: fits",
            value=does_fit(results, name),
            at_least=1,
        )
        for name in ("swapkit_at_recompute", "swap_everything")
        if results.runs.get(name)
    ]
    if targets:
        checks.append(
            Check(
                name="at_recompute",
                text="swapkit at the peak of recompute: step / that of recompute",
                value=ratio,
                at_most=1.0,
            )
        )
    return [
        *checks,
        Check(
            name="prediction",
            text="swapping everything: peak / predicted",
            value=ratio_of(measured, peak_of(results, "prediction")),
            at_least=1 - AS_PREDICTED,
            at_most=1 + AS_PREDICTED,
        ),
        Check(
            name="overhead",
            text="a session without pressure: step / that without a session",
            value=overhead[0] if overhead else None,
            at_most=OVERHEAD,
        ),
    ]


def does_fit(results: Results, name: str) -> float | None:
    """Return 1 if all runs came to their end, 0 if one did not, None if the time was up."""
    outcome = results.outcome(name)
    return None if outcome == OUT_OF_TIME else float(outcome == FINISHED)


def is_ours(name: str) -> bool:
    """Return whether a way is one whose gradients are promised."""
    return name in {"pool", "swap_everything", "offload_prefetch"} or name.startswith(
        ("swapkit_", "native_")
    )


def find_failures(results: Results, ways: list[Way], *, dry: bool) -> list[str]:
    """Return the ways of swapkit that did not do what they must; a tiny model need not fit."""
    must_fit = ("pool", "swapkit_40", "swapkit_60", "swapkit_80", "overhead", "offload_prefetch")
    failed = []
    for way in ways:
        if not results.runs.get(way.name) or not (is_ours(way.name) or way.name == "overhead"):
            continue
        too_much = results.outcome(way.name) == OUT_OF_MEMORY
        if is_failure(results.outcome(way.name)) or (way.name in must_fit and too_much and not dry):
            failed.append(way.name)
    return failed


def run(context: Context, shape: str) -> None:
    """Train the shape in every way, or in those that come first."""
    ways = (list_first if context.first else list_ways)(context, shape)
    Comparison(context, ways, partial(show, context, shape, ways)).run()
    show_missing(context, shape, list_ways(context, shape))


def show_missing(context: Context, shape: str, ways: list[Way]) -> None:
    """Say which ways were not run; their rows are there, so that the keys stay the same."""
    nothing = Results()
    title = title_of(shape)
    missing = [way for way in ways if way.name not in context.report.tables.get(title, {})]
    for way in missing:
        show_way(context, shape, way, nothing)
    if missing:
        context.report.note(
            "not run, for want of time or of a peak that the limit follows from: "
            + ", ".join(way.name for way in missing)
        )


def title_of(shape: str) -> str:
    """Return the title of a shape's table."""
    return f"training {shape}; step ratio: to plain"


def describe_failures(results: Results) -> list[str]:
    """Return how the ways that failed did so, for the notes."""
    return [
        f"{name}: {results.outcome(name)}"
        for name in results.runs
        if is_failure(results.outcome(name))
    ]
