"""A plan as tables, and which steps it fits."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from swapkit._runtime.execution.weight_moves import WeightMoves, find_weight_moves
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.process.captures import Capture
from swapkit._runtime.shim.types import COPY_TIERS
from swapkit._runtime.torch_compat.internals import pytree, submodules_of
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit.errors import PlanMismatch
from swapkit.ir.plans import Action, Decision, Plan, Tier
from swapkit.ir.traces import BEFORE, EventKind, Phase, Storage, Trace
from swapkit.planning.selection.asking import SWITCHED
from swapkit.simulation.schedules import NEVER, EventLife, EventMoves, find_event_lives, find_moves
from swapkit.texts import encodable
from swapkit.units import format_bytes

# ---- plan compiler -------------------------------------------------------------------------------
#
# A plan as tables: the moves due at each event of a step, and the operators that are repeated.
#
# An *event* is one call of the session's hooks. `Event.operator` of a trace says which operators
# run between two events. A plan names operators, but moves are carried out at events: a release
# that has to be done before an operator is due at the last event before it; a prefetch that may
# start at an operator is due at the first event that is not earlier.

# The same numbers as in `shim/cpp/moves/plan_cursor.cpp`.
FIRST_SAVE, SAVE, USE = 0, 1, 2
# The numbers of `Action` in `shim/cpp/saved/saved_tensors.hpp`, which has the same order.
_ACTIONS = {action: number for number, action in enumerate(Action)}
_RECOMPUTE = _ACTIONS[Action.RECOMPUTE]
_NOTHING = -1
_ANY_BYTES = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """A compiled plan. Its three tables are rows of 64-bit numbers; -1 is none.

    `events`: storage (-1: not in the plan), bytes (-1: any), module tag and index of the save in
    the module's call, kind. `storages`: event of the last save in forward, tier, action, the
    storage that it continues, the event of its release and its order among releases, the same two
    for its prefetch. `continuing`: event, and the storage that continues another from there on.
    """

    events: bytes
    storages: bytes
    continuing: bytes
    captures: tuple[Capture, ...]  # the runs that are repeated, in order
    operators: tuple[str, ...]  # names of all operators that run in the step
    # For each first save of a storage: the tag, and the bytes sent out by then.
    curve: tuple[tuple[int, int], ...]
    largest_bytes: int  # the size of the largest planned storage
    weights: WeightMoves


def compile_plan(
    trace: Trace, plan: Plan, tracker: ModuleTracker, *, for_any_length: bool = False
) -> Table:
    """Compile a plan to tables for the events of its trace.

    Args:
        trace: the recorded step.
        plan: the decisions for its storages.
        tracker: knows the modules.
        for_any_length: whether storages may have other sizes than in the trace.

    Raises:
        PlanMismatch: the plan decides about storages that the trace does not have, or the trace
            has no events.
    """
    decisions = _decisions(trace, plan)
    lives = find_event_lives(trace)
    paths = {tracker.name_of(module) for module in tracker.modules()}
    chains = _Chains(trace, decisions, paths)
    movable = lives.keys() - _find_changing(trace, lives)
    planned = {
        storage: _possible(decisions[storage], chains)
        for storage in sorted(movable & decisions.keys())
    }
    rows = list(_event_rows(trace, lives, tracker))
    events = [(each[0], _ANY_BYTES, *each[2:]) for each in rows] if for_any_length else rows
    actions = _actions(trace, planned)
    return Table(
        events=array("q", [number for row in events for number in row]).tobytes(),
        storages=array("q", _storage_rows(trace, lives, planned, actions)).tobytes(),
        continuing=array("q", _continuing(trace, lives)).tobytes(),
        captures=tuple(chains.captures()),
        operators=tuple(sorted({operator.name for operator in trace.operators})),
        curve=_curve(rows, planned),
        largest_bytes=max((trace.storages[each].nbytes for each in planned), default=0),
        weights=find_weight_moves(trace, plan),
    )


def _decisions(trace: Trace, plan: Plan) -> dict[int, Decision]:
    """Return a plan's decisions by storage; see `compile_plan`."""
    if not trace.events:
        raise PlanMismatch("the trace has no events, so its plan cannot be followed")
    decisions = {decision.storage: decision for decision in plan.decisions}
    unknown = [storage for storage in decisions if not 0 <= storage < len(trace.storages)]
    if unknown:
        raise PlanMismatch(
            f"the plan decides about storage {unknown[0]}, which is not in the trace"
        )
    return decisions


def _possible(decision: Decision, chains: _Chains) -> Decision:
    """Return a decision that can be carried out: swap if the storage cannot be recomputed."""
    if decision.action is Action.RECOMPUTE and decision.storage not in chains.made:
        return replace(decision, action=Action.SWAP)
    return decision


def _find_changing(trace: Trace, lives: dict[int, EventLife]) -> set[int]:
    """Return the storages that forward changes after their first save.

    Autograd allows this: one piece of a storage (of `unsafe_chunk`) may change while another is
    saved.
    """
    saved_at = {storage: trace.events[life.first_save].operator for storage, life in lives.items()}
    return {
        storage
        for number, operator in enumerate(trace.operators)
        if operator.phase is Phase.FORWARD
        for storage in operator.writes
        if number >= saved_at.get(storage, len(trace.operators))
    }


def _event_rows(
    trace: Trace, lives: dict[int, EventLife], tracker: ModuleTracker
) -> Iterator[tuple[int, int, int, int, int]]:
    for number, event in enumerate(trace.events):
        storage = event.storage
        is_known = storage is not None and storage in lives
        if event.kind is EventKind.USE:
            yield storage if storage is not None and is_known else _NOTHING, 0, 0, 0, USE
        elif storage is None:
            yield _NOTHING, 0, 0, 0, SAVE
        elif lives[storage].first_save == number and trace.storages[storage].continues is None:
            saved = trace.storages[storage]
            yield storage, saved.nbytes, tracker.tag_named(saved.module), saved.index, FIRST_SAVE
        else:
            yield storage, 0, 0, 0, SAVE


def _find_former(storage: Storage) -> int:
    """Return the storage of the step that a storage continues."""
    if storage.continues is None or storage.birth == BEFORE:  # a weight's, of the step before
        return _NOTHING
    return storage.continues


def _actions(trace: Trace, planned: dict[int, Decision]) -> list[int]:
    """Return the action for each storage."""
    actions: list[int] = []
    for number, storage in enumerate(trace.storages):
        decision = planned.get(number)
        action = _ACTIONS[decision.action if decision is not None else Action.KEEP]
        # A recomputed storage is recomputed in each backward pass.
        former = _find_former(storage)
        if former != _NOTHING and actions[former] == _RECOMPUTE:
            action = _RECOMPUTE
        actions.append(action)
    return actions


def _storage_rows(
    trace: Trace,
    lives: dict[int, EventLife],
    planned: dict[int, Decision],
    actions: Sequence[int],
) -> Iterator[int]:
    operators = [event.operator for event in trace.events]
    swapped = {
        storage: find_moves(operators, lives[storage], decision)
        for storage, decision in planned.items()
        if decision.action is Action.SWAP
    }
    # A copy that is waited for overtakes the others, which then also wait for the operators that it
    # waits for. So releases go in order of production: the storage used last was made first.
    order = {
        storage: place
        for place, storage in enumerate(sorted(swapped, key=lambda each: lives[each].first_use))
    }
    for number, storage in enumerate(trace.storages):
        decision = planned.get(number)
        moves = swapped.get(number, EventMoves(NEVER, NEVER))
        place = order.get(number, 0)
        yield lives[number].last_save if number in lives else 0
        yield int(COPY_TIERS[decision.tier] if decision is not None else Tier.ANY)
        yield actions[number]
        yield _find_former(storage)
        yield from (moves.goes, len(order) - place, moves.comes, place)


def _continuing(trace: Trace, lives: dict[int, EventLife]) -> Iterator[int]:
    """Yield the events at which storages continue others; per event, the first needed first."""
    continuing = [
        # Before its own first event, which has to find the storage.
        (max(0, min(life.first_save, life.first_event - 1)), life.first_use, storage)
        for storage, life in lives.items()
        if trace.storages[storage].continues is not None
    ]
    for event, _, storage in sorted(continuing):
        yield from (event, storage)


def _curve(
    rows: Sequence[tuple[int, int, int, int, int]], planned: dict[int, Decision]
) -> tuple[tuple[int, int], ...]:
    first = [(storage, nbytes, tag) for storage, nbytes, tag, _, kind in rows if kind == FIRST_SAVE]
    moved = accumulate(
        nbytes if storage in planned and planned[storage].action is Action.SWAP else 0
        for storage, nbytes, _ in first
    )
    return tuple((tag, so_far) for (_, _, tag), so_far in zip(first, moved, strict=True))


# ---- recomputation -------------------------------------------------------------------------------


class _Chains:
    """The operators that have to run again for the storages that a plan recomputes.

    `simulation/lowering.py` decides which storages can be recomputed.
    """

    def __init__(
        self, trace: Trace, decisions: dict[int, Decision], paths: Collection[str]
    ) -> None:
        """Find all of them. `paths`: of the modules whose operators are seen."""
        self._trace = trace
        self._paths = paths
        self._makers = _makers(trace)
        self._saved = {event.storage for event in trace.events if event.storage is not None}
        self._results: dict[int, set[int]] = {}  # storages to recompute, by repeated operator
        self.made: set[int] = set()  # the recomputed storages whose maker can be repeated
        for storage, decision in decisions.items():
            if decision.action is Action.RECOMPUTE and self._add(storage):
                self.made.add(storage)

    def captures(self) -> Iterator[Capture]:
        """Yield the runs, in order."""
        events = [event.operator for event in self._trace.events]
        position, counts = 0, dict[str, int]()
        for step, operator in enumerate(self._trace.operators):
            if operator.phase is not Phase.FORWARD:
                continue
            now = bisect_right(events, step)
            if now != position:
                position, counts = now, {}
            run = counts.get(operator.name, 0)
            counts[operator.name] = run + 1
            storages = self._results.get(step)
            if storages is not None:
                born = [each for each in operator.writes if self._is_born(each, step)]
                wanted = tuple(each in storages for each in born)
                yield Capture(position, operator.name, run, wanted, operator.module)

    def _is_born(self, storage: int, step: int) -> bool:
        return self._trace.storages[storage].birth == step

    def _add(self, storage: int) -> bool:
        """Add the operators that recompute a storage; False: its maker cannot be repeated."""
        due = [storage]
        while due:
            made = due.pop()
            maker = self._makers.get(made)
            if maker is None or not self._can_repeat(maker):
                continue  # a recipe that needs this storage keeps it
            if maker not in self._results:
                due += self._find_missing(maker)
            self._results.setdefault(maker, set()).add(made)
        maker = self._makers.get(storage)
        return maker is not None and storage in self._results.get(maker, ())

    def _find_missing(self, maker: int) -> Iterator[int]:
        """Yield the operands of an operator that may be gone or overwritten in backward."""
        for read in self._trace.operators[maker].reads:
            if read not in self._saved and not self._trace.storages[read].keeps_bytes(
                BEFORE, maker
            ):
                yield read

    def _can_repeat(self, maker: int) -> bool:
        operator = self._trace.operators[maker]
        is_seen = operator.module in self._paths
        return is_seen and operator.is_repeatable and operator.phase is Phase.FORWARD


def _makers(trace: Trace) -> dict[int, int]:
    """Return the operator that made each storage, for storages with no other writers."""
    writers: dict[int, list[int]] = {}
    for number, operator in enumerate(trace.operators):
        for storage in operator.writes:
            writers.setdefault(storage, []).append(number)
    return {
        storage: numbers[0]
        for storage, numbers in writers.items()
        if len(numbers) == 1 and trace.storages[storage].birth == numbers[0]
    }


# ---- plan checks ---------------------------------------------------------------------------------
#
# Checks which steps a plan fits.

# A step is heavier than the recorded one if it begins with more bytes in use, by more than this
# share of the budget.
HEAVIER = 1 / 256
# Modules that are visited without a set of the modules seen.
MOST_LOOKS = 1 << 14


@unseen
def sign(module: torch.nn.Module, inputs: object) -> str:
    """Return a signature that is equal for steps with the same kind of inputs.

    The signature also depends on which modules are in training mode: a norm layer then updates its
    buffers, which no event shows. Modules whose mode differs from the model's form the last part.
    Old saved plans lack that part, but can still be followed (`planning/selection/asking.py`).
    """
    leaves, structure = pytree.tree_flatten(inputs)
    parts = [str(structure), str(module.training)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{leaf.dtype}{tuple(leaf.shape)}{leaf.requires_grad}")
        else:
            parts.append(str(leaf) if isinstance(leaf, (bool, str)) else type(leaf).__name__)
    switched = _find_switched(module)
    end = SWITCHED + _hash(str(switched)) if switched else ""
    return _hash("\n".join(parts)) + end


@unseen
def find_form(inputs: object, signature: str) -> tuple[str, int]:
    """Return text that is equal for inputs that differ only in size, and the inputs' elements.

    Args:
        inputs: the model's inputs.
        signature: the signature of the step with these inputs (`sign`).
    """
    leaves, structure = pytree.tree_flatten(inputs)
    parts, length = [str(structure)], 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{leaf.dtype}{leaf.dim()}{leaf.requires_grad}")
            length += leaf.numel()
        else:
            parts.append(str(leaf) if isinstance(leaf, (bool, str)) else type(leaf).__name__)
    return _hash("\n".join([*parts, signature.partition(SWITCHED)[2]])), length


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _train_alike(module: torch.nn.Module) -> bool:
    """Return whether all modules have the model's training mode; False: maybe not.

    Runs once per step over all modules, so it keeps no set of the modules seen: that would take
    longer than everything else here.
    """
    is_training = module.training
    waiting: list[torch.nn.Module | None] = [module]
    for _ in range(MOST_LOOKS):
        if not waiting:
            return True
        each = waiting.pop()
        if each is None:
            continue
        if each.training != is_training:
            return False
        if submodules_of(each):
            waiting.extend(submodules_of(each).values())
    return False  # too many modules, or one contains itself


def _find_switched(module: torch.nn.Module) -> list[int]:
    """Return the modules whose training mode differs from the model's, as indices of a walk."""
    if _train_alike(module):
        return []
    seen = {id(module)}
    waiting = [module]
    switched = []
    while waiting:
        for each in submodules_of(waiting.pop()).values():
            if each is None or id(each) in seen:
                continue
            if each.training != module.training:
                switched.append(len(seen))
            seen.add(id(each))
            waiting.append(each)
    return switched


def pace(plan: Plan, factor: float) -> Plan:
    """Return a plan with its predicted times and its bound multiplied by a factor."""
    if plan.prediction is None or factor == 1.0:
        return plan
    seconds = plan.prediction.seconds * factor
    bound_seconds = None if plan.bound_seconds is None else plan.bound_seconds * factor
    host_seconds = plan.prediction.host_seconds * factor
    prediction = replace(plan.prediction, seconds=seconds, host_seconds=host_seconds)
    return replace(plan, prediction=prediction, bound_seconds=bound_seconds)


def check_fit(trace: Trace, plan: Plan, model: torch.nn.Module | None, limit_bytes: int) -> None:
    """Refuse a plan that does not fit a model and a budget.

    Raises:
        PlanMismatch: the message says what does not fit.
    """
    if plan.budget_bytes > limit_bytes:
        raise PlanMismatch(
            f"the plan is for a budget of {format_bytes(plan.budget_bytes)}, more than "
            f"{format_bytes(limit_bytes)}: plan again, or pass the plan's budget"
        )
    if model is None:
        raise PlanMismatch("a plan needs its model: call swapkit.budget(limit, model, ...)")
    known = {"", type(model).__name__, *(encodable(path) for path, _ in model.named_modules())}
    for storage in trace.storages:
        if storage.is_saved and not _is_known(storage.module, known):
            raise PlanMismatch(
                f"the plan is for another model: its module {storage.module} saves tensors, but "
                f"{type(model).__name__} has no such module"
            )


def _is_known(path: str, known: set[str]) -> bool:
    """Return whether a model has a module, or the module whose forward created it."""
    return path in known or path.rpartition(".")[0] in known - {""}


def is_heavier(began_bytes: int, recorded_bytes: int, limit_bytes: int) -> bool:
    """Return whether a step began with clearly more memory in use than the recorded step.

    Args:
        began_bytes: the bytes in use when the step began.
        recorded_bytes: the same for the recorded step (`Trace.bytes_before`).
        limit_bytes: the budget.
    """
    return began_bytes > recorded_bytes + int(limit_bytes * HEAVIER)
