"""What a plan lets happen to weights, at the uses by operators (`shim/cpp/held/planned.cpp`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from swapkit.ir.plans import Action, Plan
from swapkit.ir.traces import BEFORE, Trace
from swapkit.simulation.items import is_weight


@dataclass(slots=True)
class WeightUse:
    """A use of a weight, by its name in the model. `comes`: the weights whose copies begin then."""

    name: str
    operator: int
    leaves: bool = False
    comes: list[str] = field(default_factory=list)


def list_weight_uses(trace: Trace, plan: Plan) -> list[WeightUse]:
    """Return the uses of weights in a step, in order, with what the plan lets happen.

    Successive uses of one weight count once, as in the shim.
    """
    uses: list[WeightUse] = []
    first: dict[int, int] = {}  # by storage: the place of its first use, and of its last one
    last: dict[int, int] = {}
    for number, operator in enumerate(trace.operators):
        for read in operator.reads:
            if not is_weight(trace.storages[read]):
                continue
            name = trace.storages[read].module
            if not uses or uses[-1].name != name:
                uses.append(WeightUse(name, number))
            last[read] = len(uses) - 1
            first.setdefault(read, last[read])
    operators = [use.operator for use in uses]
    for decision in plan.decisions:
        storage = trace.storages[decision.storage]
        if not is_weight(storage) or decision.action is not Action.SWAP:
            continue
        assert storage.continues is not None
        use = first[decision.storage]
        if use == last[storage.continues] and storage.birth != BEFORE:
            continue  # nothing else is used in between
        uses[last[storage.continues]].leaves = True
        if decision.prefetch is not None:
            place = bisect_left(operators, decision.prefetch)
            if place < use or use == 0:
                uses[min(place, use)].comes.append(storage.module)
    return uses


def as_rows(
    uses: list[WeightUse], addresses: Mapping[str, int]
) -> list[tuple[int, bool, list[int]]]:
    """Return uses as `Mover.plan_held` takes them; none if a weight is missing.

    Args:
        uses: as of `list_weight_uses`.
        addresses: of the weights' storages, by name.
    """
    if any(use.name not in addresses for use in uses):
        return []
    return [
        (addresses[use.name], use.leaves, [addresses[each] for each in use.comes]) for use in uses
    ]
