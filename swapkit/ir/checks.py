"""Checks of traces, machines and plans. Each raises if the value is not sound.

The message names the place: `operators[12].seconds: expected a number of at least 0, ...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from swapkit.ir.fields import SHAPES, refuse
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Prediction, Tier
from swapkit.ir.traces import BEFORE, Event, EventKind, Operator, Storage, Trace

MOST_TOTAL_BYTES = 1 << 62  # sums stay below 64 bits


def check_trace(trace: Trace) -> None:
    """Check that a trace can be planned for.

    It has at least one operator, and all fields have valid values. Each storage lives from `birth`
    up to `death`. Operators touch only storages that exist while they run. Events are in order,
    fall into the life of their storage, and use only storages that an earlier event saved.

    Raises:
        InvalidDocument: the trace is not sound; the message says where.
    """
    _check_head(trace, Trace)
    _check_rows("operators", trace.operators, Operator)
    _check_rows("storages", trace.storages, Storage)
    _check_rows("events", trace.events, Event)
    if not trace.operators:
        refuse("operators", "at least one", ())
    _check_lives(trace)
    _check_touches(trace)
    _check_events(trace)


def check_machine(machine: Machine) -> None:
    """Check that all fields of a machine have valid values, and that a disk has its speeds.

    Raises:
        InvalidDocument: the machine is not sound; the message says where.
    """
    _check_head(machine, Machine)
    for name in ("disk_write_bytes_per_second", "disk_read_bytes_per_second"):
        if machine.disk_bytes and getattr(machine, name) < 1:
            refuse(name, "a number of at least 1, since there is a disk", getattr(machine, name))


def check_plan(plan: Plan, trace: Trace | None = None) -> None:
    """Check that a plan makes sense in itself, and for the trace it was made for.

    A storage has one decision. Only a swap has a tier and a release, which is no later than its
    prefetch, and what is kept has no prefetch. With a trace: the trace has these storages and
    operators, and the same signature, if both have one. `find_violations` checks whether the plan
    is legal.

    Raises:
        InvalidDocument: the plan is not sound; the message says where.
    """
    _check_head(plan, Plan)
    _check_rows("decisions", plan.decisions, Decision)
    if plan.prediction is not None:
        _check_fields("prediction", plan.prediction, Prediction, "prediction.")
    seen: set[int] = set()
    for row, decision in enumerate(plan.decisions):
        if decision.storage in seen:
            most = "at most one decision for each storage"
            refuse(f"decisions[{row}].storage", most, decision.storage)
        seen.add(decision.storage)
        _check_decision(f"decisions[{row}]", decision)
    if trace is not None:
        _check_plan_of(plan, trace)


def _check_head(value: Trace | Machine | Plan, kind: type) -> None:
    _check_fields(kind.__name__.lower(), value, kind)
    known = SHAPES[kind].version
    if value.version != known or type(value.version) is not int:
        refuse("version", str(known), value.version)


def _check_fields(where: str, value: object, kind: type, prefix: str = "") -> None:
    if type(value) is not kind:
        refuse(where, f"a {kind.__name__}", value)
    for name, rule in SHAPES[kind].rules.items():
        content = getattr(value, name)
        if not rule.holds(content):
            refuse(f"{prefix}{name}", rule.expectation, content)


def _check_rows(name: str, rows: Sequence[object], kind: type) -> None:
    if type(rows) is not tuple:
        refuse(name, f"a tuple of {kind.__name__}", rows)
    for number, row in enumerate(rows):
        if type(row) is not kind:
            refuse(f"{name}[{number}]", f"a {kind.__name__}", row)
    for field, rule in SHAPES[kind].rules.items():
        for number, content in enumerate(map(attrgetter(field), rows)):
            if not rule.holds(content):
                refuse(f"{name}[{number}].{field}", rule.expectation, content)


def _check_lives(trace: Trace) -> None:
    count = len(trace.operators)
    for number, storage in enumerate(trace.storages):
        ends = {
            "birth": (BEFORE, count - 1),
            "death": (max(storage.birth, 0), count),
            "held": (BEFORE, max(storage.death, 1) - 1),
        }
        for field, (first, last) in ends.items():
            at = getattr(storage, field)
            if not first <= at <= last:
                refuse(f"storages[{number}].{field}", f"an operator from {first} to {last}", at)
        _check_continuation(trace, number)
    total = trace.base_bytes + sum(storage.nbytes for storage in trace.storages)
    if total > MOST_TOTAL_BYTES:
        refuse("storages", f"at most {MOST_TOTAL_BYTES} bytes together", total)


def _check_continuation(trace: Trace, number: int) -> None:
    former = trace.storages[number].continues
    if former is None:
        return
    where = f"storages[{number}].continues"
    if trace.storages[number].birth == BEFORE:
        last = trace.storages[former] if former < len(trace.storages) else None
        if last is None or last.death != len(trace.operators):
            refuse(where, "a storage that is there when the step ends", former)
        return
    if former >= number:
        refuse(where, f"a storage below {number}", former)
    if trace.storages[former].death != trace.storages[number].birth:
        refuse(where, "a storage whose death is the birth of this one", former)


def _check_touches(trace: Trace) -> None:
    births = [storage.birth for storage in trace.storages]
    deaths = [storage.death for storage in trace.storages]
    for number, operator in enumerate(trace.operators):
        for field, touched in (("reads", operator.reads), ("writes", operator.writes)):
            for storage in touched:
                where = f"operators[{number}].{field}"
                if storage >= len(births):
                    refuse(where, f"storages below {len(births)}", storage)
                if not births[storage] <= number < deaths[storage]:
                    life = f"from operator {births[storage]} until before {deaths[storage]}"
                    refuse(
                        where, (f"storages alive at this operator; {storage} lives {life}"), touched
                    )


def _check_events(trace: Trace) -> None:
    count, before = len(trace.operators), 0
    saved = {
        number
        for number, each in enumerate(trace.storages)
        if each.birth == BEFORE or each.continues is not None
    }
    for number, event in enumerate(trace.events):
        where = f"events[{number}]"
        if not before <= event.operator <= count:
            refuse(f"{where}.operator", f"an operator from {before} to {count}", event.operator)
        before = event.operator
        if event.storage is None:
            continue
        if event.storage >= len(trace.storages):
            refuse(f"{where}.storage", f"a storage below {len(trace.storages)}", event.storage)
        storage = trace.storages[event.storage]
        if not storage.birth <= event.operator <= storage.death:
            life = f"from operator {storage.birth} until before {storage.death}"
            refuse(
                f"{where}.operator",
                (f"an operator in the life of the storage, {life}"),
                event.operator,
            )
        if event.kind is EventKind.SAVE:
            saved.add(event.storage)
        elif event.storage not in saved:
            refuse(f"{where}.storage", "a storage that an earlier event saved", event.storage)


def _check_decision(where: str, decision: Decision) -> None:
    if decision.action is not Action.SWAP:
        if decision.release is not None:
            refuse(f"{where}.release", "nothing, as it is not swapped", decision.release)
        if decision.prefetch is not None and decision.action is Action.KEEP:
            refuse(f"{where}.prefetch", "nothing, as it stays", decision.prefetch)
        if decision.tier is not Tier.HOST:
            refuse(f"{where}.tier", "'host', as it is not swapped", decision.tier)


def _check_moments(where: str, decision: Decision, count: int) -> None:
    for field in ("release", "prefetch"):
        slot = getattr(decision, field)
        if slot is not None and slot >= count:
            refuse(f"{where}.{field}", f"an operator below {count}", slot)


def _check_order(where: str, decision: Decision) -> None:
    release, prefetch = decision.release, decision.prefetch
    if release is not None and prefetch is not None and prefetch < release:
        refuse(f"{where}.prefetch", f"an operator of at least {release}, its release", prefetch)


def _check_plan_of(plan: Plan, trace: Trace) -> None:
    count = len(trace.operators)
    for row, decision in enumerate(plan.decisions):
        where = f"decisions[{row}]"
        if decision.storage >= len(trace.storages):
            refuse(f"{where}.storage", f"a storage below {len(trace.storages)}", decision.storage)
        _check_moments(where, decision, count)
        about = trace.storages[decision.storage]
        if about.continues is None or about.birth != BEFORE:  # not for the next step
            _check_order(where, decision)
    if plan.signature and trace.signature and plan.signature != trace.signature:
        refuse("signature", f"{trace.signature!r}, the signature of the trace", plan.signature)
