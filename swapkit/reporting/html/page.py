"""The files of a report: a record, or a static template with the values that its script draws.

The page is one file that loads nothing, and its policy forbids it to. Names reach it as JSON, which
the script shows as text, and as escaped text for readers without scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections import defaultdict
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from swapkit.errors import InvalidArgument
from swapkit.ir.documents import write_text
from swapkit.ir.traces import BEFORE, Trace
from swapkit.planning.reasons import Reason
from swapkit.reporting import plans
from swapkit.reporting.machines import summarize_machine
from swapkit.reporting.paths import PAGE, check_report
from swapkit.reporting.run_records import RunRecord, encode_run, read_run, write_run
from swapkit.reporting.steps import SimulatedStep, Work, list_works, simulate_step
from swapkit.simulation.occupancy import Layer, Presence, find_peak, measure_occupancy
from swapkit.texts import printable
from swapkit.units import format_bytes, show

MOST_ROWS = 2500  # of memory over a step
MOST_HOLDERS = 10  # of the peak
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def write_report(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Write a record as a page or as a document, depending on the name of the file.

    Raises:
        InvalidArgument, InvalidType: as for `check_report`.
        DiskError: the file cannot be written; its previous content stays.
    """
    if check_report(path) == PAGE:
        write_text(path, render_page(record))
    else:
        write_run(path, record)


def draw_report(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Draw the page of a record that `session.report("run.json")` wrote.

    Args:
        source: the record.
        target: the page; its name ends in .html.

    Raises:
        InvalidArgument: `target` is not a page.
        InvalidDocument: `source` is not a record.
        OSError: it cannot be read.
        DiskError: as for `write_report`.
    """
    if check_report(target) != PAGE:
        raise InvalidArgument(f"path={show(os.fspath(target))}: expected a name that ends in .html")
    write_report(target, read_run(source))


def render_page(record: RunRecord) -> str:
    """Return the page of a record."""
    step = None
    if record.trace is not None:
        why = why_no_plan(record)
        step = simulate_step(record.trace, record.plan, record.machine, why)
    values = _list_values(record, step)
    script = _read("chart.js") + _read("page.js")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest())
    data = json.dumps(values, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": escape(printable(values["title"])),
        "style": _read("page.css"),
        "script": script,
        "digest": digest.decode(),
        "data": data.replace("<", "\\u003c"),  # so that it cannot end its element
        "words": escape(_summarize(record, step)),
    }
    return _PLACEHOLDER.sub(lambda found: parts[found[1]], _read("page.html"))


def why_no_plan(record: RunRecord) -> str:
    """Return why a record has no plan, as the rest of a sentence."""
    if record.why_no_plan:
        return record.why_no_plan
    if record.policy == "rescue":
        return "with policy='rescue' a session makes no plan"
    steps = record.stats.steps
    done = f"{steps} {'step' if steps == 1 else 'steps'}"
    if record.trace is None:
        return f"no step was recorded yet ({done}, stage {record.stage!r})"
    return f"the session is in stage {record.stage!r} after {done}, and tries plans"


def _list_values(record: RunRecord, step: SimulatedStep | None) -> dict[str, Any]:
    """Return what the script draws: the record, with the simulated step for trace and plan."""
    label = record.trace.label if record.trace is not None else ""
    values = encode_run(replace(record, trace=None, plan=None, machine=None))
    links = [] if record.machine is None else [f"links: {summarize_machine(record.machine)}"]
    return {
        **values,
        "title": f"{label or 'Training'} in {format_bytes(record.stats.budget_bytes)}",
        "why_no_plan": why_no_plan(record),
        "notes": [*record.notes, *links],
        "plan_bytes": None if record.plan is None else record.plan.budget_bytes,
        "step": None if step is None else _list_step(step),
    }


class _Numbered(dict[str, int]):
    """Texts in the order of their numbers: a page has each of them once."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _list_step(step: SimulatedStep) -> dict[str, Any]:
    trace, plan, schedule = step.trace, step.plan, step.schedule
    texts = _Numbered()
    memory = measure_occupancy(trace, plan, schedule, most_rows=MOST_ROWS)
    reasons = sorted(
        step.reasons, key=lambda each: (plans.ORDER.index(plans.name_action(each)), -each.nbytes)
    )
    return {
        "why_not_planned": step.why_not_planned,
        "operators": len(trace.operators),
        "end": schedule.ends[-1],
        "times": [_round(each) for each in memory.times],
        "instants": memory.instants,
        "layers": {layer.value: row for layer, row in memory.layers.items() if max(row) > 0},
        "works": [
            _list_work(trace, each, texts)
            for each in list_works(step)
            if each.end > each.start and (each.storage >= 0 or trace.operators[each.operator].name)
        ],
        "peak": _list_peak(step),
        "decisions": [_list_decision(trace, each, texts) for each in reasons],
        "saved": sum(each.is_saved and each.birth != BEFORE for each in trace.storages),
        "states": sum(not trace.storages[each.storage].is_saved for each in reasons),
        "texts": list(texts),
    }


def _list_work(trace: Trace, work: Work, texts: _Numbered) -> list[float]:
    """Return kind, start, end, what, where, bytes.

    An operator of backward has no module: it is where the tensors that it reads were saved.
    """
    name, place, nbytes = work.kind, plans.OUTSIDE, 0
    if work.storage >= 0:
        storage = trace.storages[work.storage]
        place, nbytes = plans.name_site(storage.module, storage.index), storage.nbytes
    else:
        operator = trace.operators[work.operator]
        read = (trace.storages[each] for each in operator.reads)
        modules = (operator.module, *(each.module for each in read if each.is_saved))
        name, place = operator.name, next(filter(None, modules), plans.OUTSIDE)
    times = _round(work.start), _round(work.end)
    return [texts[work.kind], *times, texts[name], texts[place], nbytes]


def _list_decision(trace: Trace, reason: Reason, texts: _Numbered) -> list[float | None]:
    """Return place, maker, decision, bytes, cost, seconds of copies and of recomputing, why."""
    birth = trace.storages[reason.storage].birth
    again = reason.recompute_seconds
    return [
        texts[plans.name_site(reason.module, reason.index)],
        texts[trace.operators[birth].name if birth >= 0 else "before the step"],
        texts[plans.name_action(reason)],
        reason.nbytes,
        _round(plans.cost_of(reason)),
        _round(reason.copy_seconds),
        None if again is None else _round(again),
        texts[reason.why.value],
    ]


def _list_peak(step: SimulatedStep) -> list[tuple[str, int, int]]:
    """Return the largest holders of memory when the most is in use: name, bytes, storages."""
    totals: defaultdict[str, list[int]] = defaultdict(list)
    for stay in find_peak(step.trace, step.plan, step.schedule):
        totals[_name_stay(step.trace, stay)].append(stay.nbytes)
    holders = [(name, sum(sizes), len(sizes)) for name, sizes in totals.items()]
    return sorted(holders, key=lambda each: (-each[1], each[0]))[:MOST_HOLDERS]


def _name_stay(trace: Trace, stay: Presence) -> str:
    if stay.storage is None or stay.layer not in {Layer.SAVED, Layer.TEMPORARY, Layer.INPUT}:
        return stay.layer.value
    storage = trace.storages[stay.storage]
    if storage.is_saved:
        return plans.name_site(storage.module, storage.index)
    if storage.birth < 0:
        return f"{stay.layer.value}, made before the step"
    maker = trace.operators[storage.birth]
    return f"{stay.layer.value}: {maker.name} in {maker.module or plans.OUTSIDE}"


def _summarize(record: RunRecord, step: SimulatedStep | None) -> str:
    """Return a report in words, for readers without scripts."""
    stats = record.stats
    lines = [
        f"peak {format_bytes(stats.peak_bytes)} of {format_bytes(stats.budget_bytes)}, "
        f"{stats.steps} steps, policy {record.policy}"
    ]
    if record.plan is None:
        return f"{lines[0]}\nThere is no plan: {why_no_plan(record)}."
    reasons = () if step is None else step.reasons
    lines += [
        plans.format_plan(record.plan, reasons, step_seconds=stats.step_seconds),
        plans.format_trade_offs(record.trade_offs, plan=record.plan, pace=record.pace),
    ]
    return "\n\n".join(lines)


def _round(value: float) -> float:
    """Return a value with as many digits as a screen can show."""
    return float(f"{value:.7g}")


def _read(name: str) -> str:
    return files("swapkit.reporting.html").joinpath(name).read_text(encoding="utf-8")
