"""Training a Llama-style stack in many ways: time, memory, and the bits of the gradients.

`plain` has no limit; `pool` has swapkit's pool below torch and no session. The others of torch:
recompute of each block, of each block but for matrix products and attention, `save_on_cpu`,
recompute inside it, compiled blocks that may save a share. `X_at_Y`: X with the limit that Y had in
use at most. `swapkit_40`: what is always resident, and 40 % of what plain training needs beyond.
`swap_everything`: all that is saved is swapped, within 1.02 times the peak that `prediction` has.
`overhead`: a session with more room than is needed, in turns with none.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.comparison import (
    COMPILE_SECONDS,
    OUT_OF_TIME,
    Comparison,
    Results,
    Way,
    is_failure,
    with_steps,
)
from benchmarks.gpu.configurations import LIBRARIES, Setup
from benchmarks.gpu.measure import is_cuda
from benchmarks.gpu.report import Check, Value, ratio_of
from benchmarks.gpu.trainer import FINISHED, OUT_OF_MEMORY

if TYPE_CHECKING:
    from benchmarks.gpu.context import Context

SHARES = (20, 40, 60, 80)
COMPILED = (0.5, 0.3)
RIVALS = ("selective", "save_on_cpu", "recompute_in_save_on_cpu")
ROOMY = 2.0  # times what plain training has in use: no pressure
AS_PREDICTED = 0.02
OVERHEAD = 1.01
OVERHEAD_SECONDS = 20.0  # it has many more steps than the others
NO_OVERHEAD = ("8b_32k",)  # whose steps are too long for so many
PREFETCH = 8
STEPS = {"8b_8k": (2, 6), "8b_32k": (1, 4)}  # warm-up and timed; else as a Setup has it


class Ways:
    """The ways to train one shape, and the limits that follow from one another."""

    def __init__(self, context: Context, shape: str) -> None:
        self._context = context
        self._shape = shape
        warmup_steps, timed_steps = STEPS.get(shape, (2, 8))
        base = Setup(
            shape=shape,
            method="plain",
            device=context.device,
            warmup_steps=warmup_steps,
            timed_steps=timed_steps,
        )
        self._base = with_steps(base, context)

    def setup(self, method: str, **options: Any) -> Setup:
        return dataclasses.replace(self._base, method=method, **options)

    def fixed(self, name: str, method: str = "", *, key: bool = False, **options: float) -> Way:
        """Return a way that depends on nothing."""
        setup = self.setup(method or name, **options)
        return Way(name=name, setup=lambda _results: setup, key=key)

    def at(self, name: str, rival: str, *, key: bool = False, native: bool = False) -> Way:
        """Return swapkit with the limit that a rival had in use at most."""

        def make(results: Results) -> Setup | None:
            limit = peak_of(results, rival)
            if limit is None:
                return None
            return self.setup("swapkit", limit_bytes=limit, native=native)

        return Way(name=name, setup=make, key=key)

    def share(self, percent: int) -> Way:
        """Return swapkit with what is resident and a share of what is needed beyond."""

        def make(results: Results) -> Setup | None:
            limit = limit_between(results, percent / 100)
            if limit is None:
                return None
            return self.setup("swapkit", limit_bytes=limit)

        return Way(name=f"swapkit_{percent}", setup=make, key=percent == 40)

    def everything(self) -> Way:
        """Return the swapping of everything, within what is predicted for it."""

        def make(results: Results) -> Setup | None:
            peak = peak_of(results, "prediction")
            if peak is None:
                return None
            limit = int(peak * (1 + AS_PREDICTED))
            return self.setup("swapkit", limit_bytes=limit, offload=True)

        return Way(name="swap_everything", setup=make, key=True)

    def overhead(self) -> Way:
        def make(results: Results) -> Setup | None:
            total = total_bytes(results)
            if total is None:
                return None
            return self.setup("overhead", limit_bytes=int(ROOMY * total))

        seconds = OVERHEAD_SECONDS
        return Way(name="overhead", setup=make, key=True, repeats=False, extra_seconds=seconds)

    def compiled(self, share: float) -> Way:
        way = self.fixed(f"compile_{share}", "compile", share=share)
        return dataclasses.replace(way, repeats=False, extra_seconds=COMPILE_SECONDS)

    def all(self) -> list[Way]:
        """Return every way; those that matter most come first."""
        two_steps = {"digest_steps": 0, "warmup_steps": 1, "timed_steps": 1}
        prediction = dataclasses.replace(
            self.fixed("prediction", "reference", key=True, **two_steps), repeats=False
        )
        ways = [
            self.fixed("plain", key=True),
            self.fixed("pool", "swapkit", key=True),
            self.fixed("recompute", key=True),
            self.at("swapkit_at_recompute", "recompute", key=True),
            self.share(40),
            prediction,
            self.everything(),
            self.overhead(),
        ]
        if self._shape in NO_OVERHEAD:
            ways = [way for way in ways if way.name != "overhead"]
        for rival in RIVALS:
            ways += [self.fixed(rival), self.at(f"swapkit_at_{rival}", rival)]
        if is_cuda(self._context.device):
            ways.append(self.at("native_at_recompute", "recompute", native=True))
        ways += [self.share(percent) for percent in SHARES if percent != 40]
        ways.append(self.fixed("offload_prefetch", "swapkit", offload=True, prefetch=PREFETCH))
        ways += [self.fixed(name) for name in LIBRARIES]
        for share in COMPILED:
            name = f"compile_{share}"
            ways += [self.compiled(share), self.at(f"swapkit_at_{name}", name)]
        return ways


def peak_of(results: Results, name: str) -> int | None:
    """Return the most bytes that a way had in use."""
    return results.most(name, "in_use_peak_bytes")


def total_bytes(results: Results) -> int | None:
    """Return what training without a limit has in use; the CPU's own allocator does not count."""
    return peak_of(results, "plain") or peak_of(results, "pool")


def limit_between(results: Results, share: float) -> int | None:
    """Return what is resident, and a share of what is needed beyond."""
    total = total_bytes(results)
    resident = results.most("plain", "resident_bytes")
    if total is None or resident is None:
        return None
    return int(resident + share * (total - resident))


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


def show(context: Context, shape: str, ways: list[Way], results: Results) -> None:
    """Put the rows of all ways, and the checks, into the report."""
    for way in ways:
        if results.runs.get(way.name):
            context.report.row(title_of(shape), way.name, row_of(results, way.name))
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
    """Train the shape in every way."""
    ways = Ways(context, shape).all()
    Comparison(context, ways, partial(show, context, shape, ways)).run()
    show_missing(context, shape, ways)


def show_missing(context: Context, shape: str, ways: list[Way]) -> None:
    """Say which ways were not run; their rows are there, so that the keys stay the same."""
    nothing = Results()
    title = title_of(shape)
    missing = [way for way in ways if way.name not in context.report.tables.get(title, {})]
    for way in missing:
        context.report.row(title, way.name, row_of(nothing, way.name))
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
