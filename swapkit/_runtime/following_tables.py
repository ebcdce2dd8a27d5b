"""A plan as tables: what is due at which event of a step, and which operators are repeated.

An *event* is one call of the session's hooks; `Event.operator` of a trace says which operators run
between two of them. What a plan says of an operator is done at an event: what has to be gone before
it starts at the last event before, what may come back then at the first one that is no earlier.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from swapkit._native.sched import Tier
from swapkit.errors import PlanMismatch
from swapkit.ir import plans
from swapkit.ir.plans import Action
from swapkit.ir.traces import BEFORE, EventKind, Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from swapkit._runtime.tracking import ModuleTracker
    from swapkit.ir.plans import Decision, Plan
    from swapkit.ir.traces import Trace

# As in `cpp/following.cpp`.
FIRST_SAVE, SAVE, USE = 0, 1, 2
_TREATMENTS = {Action.KEEP: 0, Action.SWAP: 1, Action.RECOMPUTE: 2}
_AGAIN = _TREATMENTS[Action.RECOMPUTE]
_TIERS = {plans.Tier.HOST: Tier.ANY, plans.Tier.DISK: Tier.DISK}
_NOTHING = -1
# In the order in which they are done at one event.
_CONTINUES, _GOES, _COMES = range(3)


class Run(NamedTuple):
    """One run of an operator in forward that a plan repeats in backward."""

    position: int  # events before it
    name: str
    occurrence: int  # among those of this name in this call of the module


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """What is due at each event. The three tables are rows of 64-bit numbers.

    `events`: storage (-1: none that is planned), bytes, tag of the module, kind. `storages`: last
    save in forward, tier, treatment, the storage that it continues (-1: none). `dues`: event,
    storage, whether it continues another one, goes or comes.
    """

    events: bytes
    storages: bytes
    dues: bytes
    event_count: int
    # By the path of a module: the operators that it repeats, and of each of their results whether
    # it is computed again.
    repeats: dict[str, dict[Run, tuple[bool, ...]]]
    # Where something is saved first: tags, and the bytes that have been sent out by then.
    curve: tuple[tuple[int, int], ...]
    largest_bytes: int  # of what is moved


def compile_plan(trace: Trace, plan: Plan, tracker: ModuleTracker) -> Table:
    """Return what a plan comes to at each event of its trace.

    Raises:
        PlanMismatch: the plan decides about storages that the trace does not have, or the trace
            has no events.
    """
    if not trace.events:
        raise PlanMismatch("the trace has no events, by which its plan could be followed")
    decisions = {decision.storage: decision for decision in plan.decisions}
    unknown = [storage for storage in decisions if not 0 <= storage < len(trace.storages)]
    if unknown:
        raise PlanMismatch(f"the plan decides about storage {unknown[0]}, which the trace lacks")
    lives = _event_lives(trace)
    paths = {tracker.name_of(module) for module in tracker.modules()}
    chains = _Chains(trace, decisions, paths)
    movable = lives.keys() - _find_changing(trace, lives)
    planned = {
        storage: _possible(decisions[storage], chains)
        for storage in sorted(movable & decisions.keys())
    }
    rows = list(_event_rows(trace, lives, tracker))
    return Table(
        events=array("q", [number for row in rows for number in row]).tobytes(),
        storages=array("q", _storage_rows(trace, lives, planned)).tobytes(),
        dues=array("q", _dues(trace, lives, planned)).tobytes(),
        event_count=len(rows),
        repeats=chains.by_module(),
        curve=_curve(rows, planned),
        largest_bytes=max((trace.storages[each].nbytes for each in planned), default=0),
    )


def _possible(decision: Decision, chains: _Chains) -> Decision:
    """Return what can be done instead of computing again what no module makes: it moves."""
    if decision.action is Action.RECOMPUTE and decision.storage not in chains.made:
        return replace(decision, action=Action.SWAP)
    return decision


class _EventLife(NamedTuple):
    """The events of one storage."""

    first_save: int  # of what continues another storage: the first event after that one's end
    last_save: int  # before its first use; likewise
    first_use: int  # the number of events: it is not used
    first_event: int


def _event_lives(trace: Trace) -> dict[int, _EventLife]:
    """Return the events of each storage that is saved."""
    saves: dict[int, list[int]] = {}
    uses: dict[int, int] = {}
    for number, event in enumerate(trace.events):
        if event.storage is None:
            continue
        if event.kind is EventKind.USE:
            uses.setdefault(event.storage, number)
        else:
            saves.setdefault(event.storage, []).append(number)
    lives = {}
    operators = [event.operator for event in trace.events]
    for storage in {**saves, **uses}:
        numbers = saves.get(storage, [])
        first_use = uses.get(storage, len(trace.events))
        first_event = min([first_use, *numbers[:1]])
        if trace.storages[storage].continues is not None:
            numbers = [bisect_left(operators, trace.storages[storage].birth), *numbers]
        if numbers:
            last = max((each for each in numbers if each < first_use), default=numbers[0])
            lives[storage] = _EventLife(numbers[0], last, first_use, first_event)
    return lives


def _find_changing(trace: Trace, lives: dict[int, _EventLife]) -> set[int]:
    """Return the storages that forward changes after they were saved first.

    Pieces of one storage, as of `unsafe_chunk`, may each be changed while another is saved.
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
    trace: Trace, lives: dict[int, _EventLife], tracker: ModuleTracker
) -> Iterator[tuple[int, int, int, int]]:
    for number, event in enumerate(trace.events):
        storage = event.storage
        is_known = storage is not None and storage in lives
        if event.kind is EventKind.USE:
            yield storage if storage is not None and is_known else _NOTHING, 0, 0, USE
        elif storage is None:
            yield _NOTHING, 0, 0, SAVE
        elif lives[storage].first_save == number and trace.storages[storage].continues is None:
            saved = trace.storages[storage]
            yield storage, saved.nbytes, tracker.tag_named(saved.module), FIRST_SAVE
        else:
            yield storage, 0, 0, SAVE


def _storage_rows(
    trace: Trace, lives: dict[int, _EventLife], planned: dict[int, Decision]
) -> Iterator[int]:
    treatments: list[int] = []
    for number, storage in enumerate(trace.storages):
        decision = planned.get(number)
        treatment = _TREATMENTS[decision.action if decision is not None else Action.KEEP]
        # What is computed again is so in each backward pass: nothing is kept between them.
        if storage.continues is not None and treatments[storage.continues] == _AGAIN:
            treatment = _AGAIN
        treatments.append(treatment)
        yield lives[number].last_save if number in lives else 0
        yield int(_TIERS[decision.tier] if decision is not None else Tier.ANY)
        yield treatment
        yield _NOTHING if storage.continues is None else storage.continues


def _dues(
    trace: Trace, lives: dict[int, _EventLife], planned: dict[int, Decision]
) -> Iterator[int]:
    """Yield when storages go and come, in order: what was saved first, and what is needed first."""
    operators = [event.operator for event in trace.events]
    dues = []
    for storage, life in lives.items():
        if trace.storages[storage].continues is not None:
            # No later than its own first event, which has to find it.
            event = max(0, min(life.first_save, life.first_event - 1))
            dues.append((event, _CONTINUES, life.first_use, storage))
    for storage, decision in planned.items():
        if decision.action is Action.SWAP:
            life = lives[storage]
            for event, kind in _moves(operators, life, decision):
                # A copy that is waited for overtakes the others, which then wait for what it waits
                # for, too: on the way out, what is used last was made first.
                turn = life.first_use if kind == _COMES else -life.first_use
                dues.append((event, kind, turn, storage))
    for event, kind, _, storage in sorted(dues):
        yield from (event, storage, kind)


def _moves(
    operators: Sequence[int], life: _EventLife, decision: Decision
) -> Iterator[tuple[int, int]]:
    """Yield at which events what is swapped goes and comes."""
    if decision.release is not None:
        yield max(bisect_right(operators, decision.release) - 1, life.last_save), _GOES
    if decision.prefetch is None:
        return
    # What comes no earlier than it is used comes with its use: at the event before, the operators
    # in between still need that memory.
    if life.first_use == len(operators) or decision.prefetch < operators[life.first_use]:
        yield min(_event_before(operators, decision.prefetch), life.first_use - 1), _COMES


def _event_before(operators: Sequence[int], operator: int) -> int:
    """Return the last event right before an operator; if there is none, the first one after."""
    after = bisect_right(operators, operator)
    is_right_before = after > 0 and operators[after - 1] == operator
    return after - 1 if is_right_before else after


def _curve(
    rows: Sequence[tuple[int, int, int, int]], planned: dict[int, Decision]
) -> tuple[tuple[int, int], ...]:
    first = [(storage, nbytes, tag) for storage, nbytes, tag, kind in rows if kind == FIRST_SAVE]
    moved = accumulate(
        nbytes if storage in planned and planned[storage].action is Action.SWAP else 0
        for storage, nbytes, _ in first
    )
    return tuple((tag, so_far) for (_, _, tag), so_far in zip(first, moved, strict=True))


# ---- what is computed again ----------------------------------------------------------------------


class _Chains:
    """Which operators have to run again for what a plan recomputes.

    `simulation/chains.py` says what can be recomputed; here is what follows for the operators.
    """

    def __init__(
        self, trace: Trace, decisions: dict[int, Decision], paths: Collection[str]
    ) -> None:
        """Find them all. `paths`: of the modules, inside of which operators are seen."""
        self._trace = trace
        self._paths = paths
        self._makers = _makers(trace)
        self._saved = {event.storage for event in trace.events if event.storage is not None}
        self._results: dict[int, set[int]] = {}  # by the operators that run again
        self.made: set[int] = set()  # of the recomputed storages, those whose maker can be repeated
        for storage, decision in decisions.items():
            if decision.action is Action.RECOMPUTE and self._add(storage):
                self.made.add(storage)

    def by_module(self) -> dict[str, dict[Run, tuple[bool, ...]]]:
        """Return the runs, and of each result whether it is made, by the paths of modules."""
        operators = [event.operator for event in self._trace.events]
        found: dict[str, dict[Run, tuple[bool, ...]]] = {}
        for step, storages in self._results.items():
            operator = self._trace.operators[step]
            run = Run(bisect_right(operators, step), operator.name, operator.occurrence)
            found.setdefault(operator.module, {})[run] = tuple(
                each in storages
                for each in operator.writes
                if self._trace.storages[each].birth == step
            )
        return found

    def _add(self, storage: int) -> bool:
        """Add the operator that makes a storage, and those before it; False: that cannot be."""
        maker = self._makers.get(storage)
        if maker is None or not self._can_repeat(maker):
            return False
        is_new = maker not in self._results
        self._results.setdefault(maker, set()).add(storage)
        if is_new:
            for read in self._trace.operators[maker].reads:
                about = self._trace.storages[read]
                if read not in self._saved and not about.keeps_bytes(BEFORE, maker):
                    self._add(read)  # if it cannot be, the recipe keeps it
        return True

    def _can_repeat(self, maker: int) -> bool:
        operator = self._trace.operators[maker]
        is_seen = operator.module in self._paths
        return is_seen and operator.is_repeatable and operator.phase is Phase.FORWARD


def _makers(trace: Trace) -> dict[int, int]:
    """Return what made each storage that nothing else has written."""
    writers: dict[int, list[int]] = {}
    for number, operator in enumerate(trace.operators):
        for storage in operator.writes:
            writers.setdefault(storage, []).append(number)
    return {
        storage: numbers[0]
        for storage, numbers in writers.items()
        if len(numbers) == 1 and trace.storages[storage].birth == numbers[0]
    }
