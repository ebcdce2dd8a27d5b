"""Which modules keep their gathered weights from forward to backward: the setting of FSDP2.

Keeping saves the gather in backward, and takes the memory of the gathered weights in between; that
memory is then missing for saved tensors. So the choice is judged by whole plans: for each of a few
settings, the recorded step is rewritten (`gathers.py`) and planned for. Modules that save
the most seconds for the memory and time that they occupy are kept first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Trace
from swapkit.planning.gathers import GatheredModule, find_gathered, rewrite_gathers
from swapkit.planning.placed import make_placed_plan
from swapkit.planning.planner import make_plan

# A setting must be predicted to shorten the step by this share: the step is recorded again then.
WORTH = 0.03
# The share of the budget that other settings leave free: their steps are only predicted.
RESERVE = 0.05
SETTINGS = 8  # that are planned for, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """A choice. `kept` and `freed`: paths of modules, in the order of their forwards."""

    kept: tuple[str, ...]
    freed: tuple[str, ...]
    changes: bool  # whether it differs from the recorded setting
    seconds: float = 0.0  # predicted for the step
    seconds_before: float = 0.0  # predicted with the recorded setting; 0: that has no plan


def choose_kept(
    trace: Trace, paths: Collection[str], machine: Machine, policy: str
) -> KeptWeights | None:
    """Return which modules should keep their gathered weights; None: there is nothing to choose.

    Args:
        trace: a recorded step.
        paths: of the modules whose setting may change.
        machine: with the budget.
        policy: the name of a policy.
    """
    gathered = find_gathered(trace)
    found = [each for each in gathered if each.path in paths]
    if not found:
        return None
    recorded = frozenset(each.path for each in found if each.is_kept)
    fixed = frozenset(each.path for each in gathered if each.is_kept) - recorded
    before = _predict(trace, machine, policy, is_placed=True)
    machine = replace(machine, budget_bytes=int(machine.budget_bytes * (1 - RESERVE)))
    settings = [each for each in _list_settings(found) if each != recorded]
    best = _find_best(trace, settings, fixed, machine, policy)
    if best is None or not _is_worth(trace, before, best[0]):
        return _describe(found, recorded, recorded, before, before)
    return _describe(found, best[1], recorded, best[0], before)


def _find_best(
    trace: Trace,
    settings: Sequence[frozenset[str]],
    fixed: frozenset[str],
    machine: Machine,
    policy: str,
) -> tuple[float, frozenset[str]] | None:
    """Return the fastest setting, with the time of a plan that also fits at addresses.

    `fixed`: modules that keep their weights in any case. None: no setting has a plan.
    """
    steps = {kept: rewrite_gathers(trace, kept | fixed) for kept in settings}
    times = {kept: _predict(step, machine, policy) for kept, step in steps.items()}
    planned = [kept for kept in settings if times[kept]]
    if not planned:
        return None
    best = min(planned, key=lambda kept: times[kept])
    seconds = _predict(steps[best], machine, policy, is_placed=True)
    return (seconds, best) if seconds else None


def _is_worth(trace: Trace, before: float, seconds: float) -> bool:
    """Return whether a setting is clearly faster, or the only one with a plan.

    Streams of an accelerator overlap: a gather beside computing takes less of the step than its own
    time. What the operators take together beyond the step counts as such.
    """
    if not before:
        return True
    is_serial = trace.device == "cpu" or not trace.step_seconds
    hidden = 0.0 if is_serial else max(0.0, trace.seconds - trace.step_seconds)
    return before - seconds - hidden > WORTH * before


def _list_settings(found: Sequence[GatheredModule]) -> Iterator[frozenset[str]]:
    """Yield settings to compare: all modules kept, none, and the best ones of them."""
    order = sorted(found, key=lambda each: -each.seconds / max(each.byte_seconds, 1e-9))
    count, most = len(order), SETTINGS - 1
    sizes = {round(count * part / most) for part in range(most + 1)}
    for size in sorted(sizes, reverse=True):
        yield frozenset(each.path for each in order[:size])


def _predict(trace: Trace, machine: Machine, policy: str, *, is_placed: bool = False) -> float:
    """Return the predicted seconds of a step within the budget; 0: there is no plan."""
    try:
        plan = (make_placed_plan if is_placed else make_plan)(trace, machine, policy)
    except InfeasibleBudget:
        return 0.0
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def _describe(
    found: Sequence[GatheredModule],
    kept: frozenset[str],
    recorded: frozenset[str],
    seconds: float,
    before: float,
) -> KeptWeights:
    return KeptWeights(
        kept=tuple(each.path for each in found if each.path in kept),
        freed=tuple(each.path for each in found if each.path not in kept),
        changes=kept != recorded,
        seconds=seconds,
        seconds_before=before,
    )
