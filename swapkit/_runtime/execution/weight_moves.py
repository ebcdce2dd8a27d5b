"""What a plan lets happen to weights, at the uses by operators (`shim/cpp/held/planned.cpp`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from swapkit._runtime.shim.types import HeldUse
from swapkit.ir.plans import Action, Plan
from swapkit.ir.traces import Trace
from swapkit.simulation.items import is_weight


@dataclass(frozen=True, slots=True)
class WeightMoves:
    """What a plan lets happen to weights in a step."""

    uses: list[WeightUse]
    events: list[tuple[int, str]]  # at which a weight comes: the hook calls of `plan_compiler.py`

    def as_rows(self, addresses: Mapping[str, int]) -> tuple[list[HeldUse], list[tuple[int, int]]]:
        """Return both as `Mover.plan_held` takes them; nothing if a weight is missing.

        Args:
            addresses: of the weights' storages, by name.
        """
        if any(use.name not in addresses for use in self.uses):
            return [], []
        rows = [
            HeldUse(
                addresses[use.name],
                use.times if use.leaves else 0,
                [addresses[each] for each in use.comes],
                [addresses[each] for each in use.gone],
                [addresses[each] for each in use.follows],
            )
            for use in self.uses
        ]
        return rows, [(event, addresses[name]) for event, name in self.events]


@dataclass(slots=True)
class WeightUse:
    """A use of a weight, by its name in the model: by several operators, if no other is in between.

    `comes`: the weights whose copies begin then; `gone`: those that must have left by then;
    `follows`: those whose copies begin right behind the operator.
    """

    name: str
    operator: int  # the first one
    times: int = 1
    leaves: bool = False
    comes: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)


def find_weight_moves(trace: Trace, plan: Plan) -> WeightMoves:
    """Return the uses of weights in a step, in order, with what the plan lets happen.

    Successive uses of one weight count once, as in the shim.
    """
    uses, first, last = _find_uses(trace)
    moves = WeightMoves(uses, [])
    operators = [use.operator for use in uses]
    events = [event.operator for event in trace.events]
    swapped = (each for each in plan.decisions if each.action is Action.SWAP)
    weights = [each for each in swapped if is_weight(trace.storages[each.storage])]
    for decision in sorted(weights, key=lambda each: first[each.storage]):  # the first needed
        storage = trace.storages[decision.storage]
        assert storage.continues is not None
        use, former = first[decision.storage], last[storage.continues]
        uses[former].leaves = True
        if decision.release is not None:
            before = bisect_right(operators, decision.release) - 1
            uses[max(before, former)].gone.append(storage.module)
        if decision.prefetch is not None and decision.prefetch < operators[use]:
            _prefetch(moves, events, storage.module, decision.prefetch, use)
        elif use == 0:
            uses[0].comes.append(storage.module)
    moves.events.sort(key=itemgetter(0))
    return moves


def _prefetch(moves: WeightMoves, events: list[int], name: str, prefetch: int, use: int) -> None:
    """Let a weight come as soon as a session can once an operator begins; `use`: its first one."""
    uses = moves.uses
    behind = bisect_left(uses, prefetch - 1, key=lambda each: each.operator)
    place = bisect_left(uses, prefetch, key=lambda each: each.operator)
    event = bisect_left(events, prefetch)
    if behind < place:  # the operator before is a use: its last one
        uses[place - 1].follows.append(name)
    elif event < len(events) and events[event] < uses[place].operator:
        moves.events.append((event, name))
    elif place < use or use == 0:
        uses[place].comes.append(name)


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
            else:
                uses[-1].times += 1
            last[weight] = len(uses) - 1
            first.setdefault(weight, last[weight])
    return uses, first, last
