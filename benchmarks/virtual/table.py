"""The rows of a virtual GPU's tables, and what is aimed at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.gpu.comparison import Results, is_failure
from benchmarks.gpu.llama import SHAPES
from benchmarks.gpu.report import Check, Value, ratio_of
from benchmarks.gpu.trainer import OUT_OF_MEMORY
from benchmarks.gpu.ways import peak_of
from benchmarks.virtual.ways import BUDGETS, CARD, LIMITED, OF_WEIGHTS, POLICIES, plain_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of `auto` at each budget: the step beside that of which way, at most; where the host takes no
# time, and where it does. A plan minds the host that it runs with, so those are two runs.
FREE = {"at_recompute": ("recompute", 0.98), "40": ("plain", 1.08), "20": ("plain", 1.15)}
STEP = {"at_recompute": ("recompute", 0.9), "40": ("plain", 1.15), "20": ("plain", 1.3)}
BEST_POLICY = 1.02
# Of `auto` where frozen weights leave: the step beside plain's, or, where the link is too slow for
# that, beside what no plan takes less than; and beside its prediction.
LORA, PREDICTED = 1.05, (0.97, 1.03)
LORA_CHECKS = ("rescues", "replans", "changes", "recorded")  # others: a full device, clean weights
RECORDED = (0.95, 1.1)
LINK_LIMIT = 1.08
# What no stable step does: the figures, and what they are.
NEVER = {
    "maps": ("maps and unmaps", ("step_maps", "step_unmaps")),
    "rescues": ("rescues", ("step_rescues",)),
    "replans": ("replans", ("step_replans",)),
    "changes": ("plan changes", ("plan_changes",)),
}
COUNTED = (
    *("step_out_bytes", "step_in_bytes", "planned_bytes"),
    *("repeated_kernels", "step_repeated", "step_maps", "step_unmaps"),
    *("step_rescues", "step_replans", "plan_changes", "recorded_ratio"),
    *("limit_bytes", "in_use_peak_bytes", "reserved_peak_bytes"),
)


def times_of(results: Results, name: str) -> dict[str, Value]:
    """Return the row of a way in the table of times."""
    step_ms, plain = results.step_ms(name), plain_of(name)
    free_ms = results.largest(name, "host_free_ms")
    return {
        "outcome": results.outcome(name),
        "step_ms": step_ms,
        "step_ratio": ratio_of(step_ms, results.step_ms(plain)),
        **{key: results.largest(name, key) for key in ("predicted_ms", "bound_ms")},
        "spread_ratio": results.step_spread(name),
        "busy_ratio": ratio_of(
            results.largest(name, "busy_ms"), results.largest(name, "mean_step_ms")
        ),
        **{key: results.largest(name, key) for key in ("host_gap_ms", "copy_wait_ms", "sync_ms")},
        "host_free_ms": free_ms,
        "host_free_ratio": ratio_of(free_ms, results.largest(plain, "host_free_ms")),
    }


def counts_of(results: Results, name: str) -> dict[str, Value]:
    """Return the row of a way in the table of what a stable step did.

    `repeated_kernels` are those beyond plain training's; `step_repeated` the session counts.
    """
    kernels, plain = results.largest(name, "kernels"), results.largest(plain_of(name), "kernels")
    found: dict[str, Value] = {
        "limit_bytes": results.most(name, "budget_bytes"),
        "in_use_peak_bytes": peak_of(results, name),
        "repeated_kernels": None if kernels is None or plain is None else kernels - plain,
        "recorded_ratio": recorded_ratio(results, name),
    }
    return {key: found.get(key, results.largest(name, key)) for key in COUNTED}


def recorded_ratio(results: Results, name: str) -> float | None:
    """Return how long operators were recorded to be, beside what their kernels took."""
    return ratio_of(results.largest(name, "recorded_ms"), results.largest(name, "true_ms"))


def checks_of(
    results: Results, names: Iterable[str], *, has_host: bool, shape: str = ""
) -> list[Check]:
    """Return everything that is aimed at, whether or not it was measured.

    `has_host`: whether the host takes time. `shape`: what is trained, if that has aims of its own.
    """
    failed = [name for name in names if is_ours(name) and has_failed(results, name)]
    checks = [
        Check(
            name="failures",
            text="ways of swapkit that failed",
            value=float(len(failed)),
            at_most=0,
            promise=True,
        )
    ]
    if shape in SHAPES and SHAPES[shape].rank:
        return checks + [
            check for budget in (CARD, *OF_WEIGHTS) for check in lora_checks(results, budget)
        ]
    for budget in BUDGETS:
        checks += stable_checks(results, f"auto_{budget}")
        checks += speed_checks(results, budget, has_host=has_host)
    checks.append(
        Check(
            name="offload",
            text="offload: step / what the link takes for its bytes",
            value=link_ratio(results, "offload"),
            at_most=LINK_LIMIT,
        )
    )
    return checks


def lora_checks(results: Results, budget: str) -> list[Check]:
    """Return what is aimed at where frozen weights leave the device."""
    name = f"auto_{budget}"
    step, low, high = results.step_ms(name), *PREDICTED
    least = max(results.step_ms("plain") or 0.0, results.largest(name, "bound_ms") or 0.0)
    never = [
        check for check in stable_checks(results, name) if check.name.split("_")[0] in LORA_CHECKS
    ]
    return [
        *never,
        Check(
            name=f"step_{name}",
            text=f"{name}: step / that of plain with unlimited memory, or the bound of all plans",
            value=ratio_of(step, least),
            at_most=LORA,
        ),
        Check(
            name=f"predicted_{name}",
            text=f"{name}: step / what the plan predicts",
            value=ratio_of(step, results.largest(name, "predicted_ms")),
            at_least=low,
            at_most=high,
        ),
    ]


def is_ours(name: str) -> bool:
    """Return whether a way is one of swapkit's."""
    return name == "offload" or LIMITED.fullmatch(name) is not None


def has_failed(results: Results, name: str) -> bool:
    """Return whether a way was run and did not come to its end."""
    outcome = results.outcome(name)
    return is_failure(outcome) or outcome == OUT_OF_MEMORY


def stable_checks(results: Results, name: str) -> list[Check]:
    """Return what is aimed at in the stable steps of a session."""
    checks = [
        Check(
            name=f"{what}_{name}",
            text=f"{name}: {text} in a stable step",
            value=total_of(results, name, keys),
            at_most=0,
        )
        for what, (text, keys) in NEVER.items()
    ]
    low, high = RECORDED
    return [
        *checks,
        Check(
            name=f"bytes_{name}",
            text=f"{name}: bytes copied in a stable step that are not as planned",
            value=unplanned_bytes(results, name),
            at_most=0,
        ),
        Check(
            name=f"recorded_{name}",
            text=f"{name}: recorded / true seconds of operators",
            value=recorded_ratio(results, name),
            at_least=low,
            at_most=high,
        ),
    ]


def speed_checks(results: Results, budget: str, *, has_host: bool) -> list[Check]:
    """Return what is aimed at for the step at one budget, with a host and without."""
    name = f"auto_{budget}"
    ours = results.step_ms(name)
    others = [results.step_ms(f"{policy}_{budget}") for policy in POLICIES[1:]]
    best = min((other for other in others if other is not None), default=None)
    free, step = FREE[budget], STEP[budget]
    return [
        Check(
            name=f"free_{name}",
            text=f"{name}: step / that of {free[0]}, with a host that takes no time",
            value=None if has_host else ratio_of(ours, results.step_ms(free[0])),
            at_most=free[1],
        ),
        Check(
            name=f"best_{name}",
            text=f"{name}: step / that of the best other policy, with such a host",
            value=None if has_host else ratio_of(ours, best),
            at_most=BEST_POLICY,
        ),
        Check(
            name=f"step_{name}",
            text=f"{name}: step / that of {step[0]}, with the host",
            value=ratio_of(ours, results.step_ms(step[0])) if has_host else None,
            at_most=step[1],
        ),
    ]


def total_of(results: Results, name: str, keys: Iterable[str]) -> float | None:
    """Return the sum of some figures, or None if one of them was not measured."""
    found = [results.largest(name, key) for key in keys]
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None


def unplanned_bytes(results: Results, name: str) -> float | None:
    """Return how many bytes of a step's copies, out and back, are not as the plan says."""
    planned = results.largest(name, "planned_bytes")
    copied = [results.largest(name, key) for key in ("step_out_bytes", "step_in_bytes")]
    if planned is None:
        return None
    return sum(abs(each - planned) for each in copied if each is not None)


def link_ratio(results: Results, name: str) -> float | None:
    """Return a step beside the time of its copies: out in forward, and then back."""
    limit_ms = 0.0
    for way in ("out", "in"):
        nbytes = results.largest(name, f"step_{way}_bytes")
        rate = results.largest(name, f"link_{way}_gb_per_s")
        if nbytes is None or rate is None:
            return None
        limit_ms += nbytes / rate / 1e6
    return ratio_of(results.step_ms(name), limit_ms)
