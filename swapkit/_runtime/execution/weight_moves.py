"""What a plan lets happen to weights, at the uses by operators (`shim/cpp/held/planned.cpp`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from swapkit.ir.plans import Action, Plan
from swapkit.ir.traces import Trace
from swapkit.simulation.items import is_weight


@dataclass(slots=True)
class WeightUse:
    """A use of a weight, by its name in the model.

    `comes`: the weights whose copies begin then; `gone`: those that must have left by then.
    """

    name: str
    operator: int
    leaves: bool = False
    comes: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


def list_weight_uses(trace: Trace, plan: Plan) -> list[WeightUse]:
    """Return the uses of weights in a step, in order, with what the plan lets happen.

    Successive uses of one weight count once, as in the shim.
    """
    uses, first, last = _find_uses(trace)
    operators = [use.operator for use in uses]
    swapped = (each for each in plan.decisions if each.action is Action.SWAP)
    for decision in (each for each in swapped if is_weight(trace.storages[each.storage])):
        storage = trace.storages[decision.storage]
        assert storage.continues is not None
        use, former = first[decision.storage], last[storage.continues]
        uses[former].leaves = True
        if decision.release is not None:
            before = bisect_right(operators, decision.release) - 1
            uses[max(before, former)].gone.append(storage.module)
        place = use if decision.prefetch is None else bisect_left(operators, decision.prefetch)
        if place < use or use == 0:
            uses[min(place, use)].comes.append(storage.module)
    return uses


def _find_uses(trace: Trace) -> tuple[list[WeightUse], dict[int, int], dict[int, int]]:
    """Return the uses, and the places of the first and the last use of each storage."""
    uses: list[WeightUse] = []
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, operator in enumerate(trace.operators):
        touched = dict.fromkeys((*operator.reads, *operator.writes))
        for weight in filter(lambda each: is_weight(trace.storages[each]), touched):
            name = trace.storages[weight].module
            if not uses or uses[-1].name != name:
                uses.append(WeightUse(name, number))
            last[weight] = len(uses) - 1
            first.setdefault(weight, last[weight])
    return uses, first, last


def as_rows(
    uses: list[WeightUse], addresses: Mapping[str, int]
) -> list[tuple[int, bool, list[int], list[int]]]:
    """Return uses as `Mover.plan_held` takes them; none if a weight is missing.

    Args:
        uses: as of `list_weight_uses`.
        addresses: of the weights' storages, by name.
    """
    if any(use.name not in addresses for use in uses):
        return []
    return [
        (
            addresses[use.name],
            use.leaves,
            [addresses[each] for each in use.comes],
            [addresses[each] for each in use.gone],
        )
        for use in uses
    ]
