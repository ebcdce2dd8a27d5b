"""The decisions of a plan as a table. It is readable without scripts; page.js sorts and filters."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from swapkit.ir.plans import Action, Tier
from swapkit.ir.traces import BEFORE
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.plans import OUTSIDE, SiteReport, format_totals, group_sites
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit.ir.traces import Trace
    from swapkit.planning.reasons import Reason

MOST_ROWS = 5000
_ORDER = {"swap": 0, "swap to disk": 1, "recompute": 2, "keep": 3}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table. `meaning`: for a tooltip."""

    head: str
    meaning: str
    is_number: bool = False
    of_joined: bool = True  # whether rows that stand for several storages have it
    of_single: bool = True


_COLUMNS = (
    _Column("place", "the module that saved the storage first, and its number there"),
    _Column("made by", "the operator that makes it", of_joined=False),
    _Column("decision", "what happens to it between forward and backward"),
    _Column("storages", "how many storages the row stands for", is_number=True, of_single=False),
    _Column("size", "bytes on the device", is_number=True),
    _Column("costs", "time that the step waits for its copies, or recomputes it", is_number=True),
    _Column("copies", "time on the links, out and back", is_number=True, of_joined=False),
    _Column(
        "recomputing",
        "time that recomputing it takes, or would take",
        is_number=True,
        of_joined=False,
    ),
    _Column("why", "the reason for the decision"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """A storage, or alike storages of numbered modules, with the decision about it."""

    place: str
    maker: str
    action: str
    why: str
    count: int
    nbytes: int
    cost_seconds: float
    copy_seconds: float
    recompute_seconds: float | None


def list_rows(trace: Trace, reasons: Iterable[Reason], pace: float) -> list[DecisionRow]:
    """Return a row for each storage: the moved ones first, each by bytes.

    Args:
        trace: the step.
        reasons: the result of `explain_decisions`.
        pace: a factor for times.
    """
    rows = [
        DecisionRow(
            place=f"{reason.module or OUTSIDE}#{reason.index}",
            maker=_maker_of(trace, reason.storage),
            action=_name(reason),
            why=reason.why.value,
            count=1,
            nbytes=reason.nbytes,
            cost_seconds=_cost(reason) * pace,
            copy_seconds=reason.copy_seconds * pace,
            recompute_seconds=(
                None if reason.recompute_seconds is None else reason.recompute_seconds * pace
            ),
        )
        for reason in reasons
    ]
    return sorted(rows, key=lambda each: (_ORDER[each.action], -each.nbytes))


def _maker_of(trace: Trace, storage: int) -> str:
    birth = trace.storages[storage].birth
    return trace.operators[birth].name if birth >= 0 else "before the step"


def _name(reason: Reason) -> str:
    to_disk = reason.action is Action.SWAP and reason.tier is Tier.DISK
    return "swap to disk" if to_disk else reason.action.value


def _cost(reason: Reason) -> float:
    if reason.action is Action.RECOMPUTE:
        return reason.recompute_seconds or 0.0
    return reason.exposed_seconds


def render_decisions(rows: Sequence[DecisionRow]) -> str:
    """Return the totals, the search box and the table."""
    sites = [
        SiteReport(
            site=row.place,
            action=row.action,
            why=row.why,
            count=row.count,
            nbytes=row.nbytes,
            exposed_seconds=row.cost_seconds,
        )
        for row in rows
    ]
    totals = "".join(f"<li>{escape(line)}</li>" for line in format_totals(sites))
    shown, note = _limit(rows, sites)
    is_joined = shown is not rows
    columns = [each for each in _COLUMNS if (each.of_joined if is_joined else each.of_single)]
    heads = "".join(map(_render_head, columns))
    body = "\n".join(_render_row(row, columns) for row in shown)
    return (
        f'<ul class="totals">{totals}</ul>'
        '<p class="search script"><label for="filter">Search</label> '
        '<input id="filter" type="search" placeholder="a module, an operator, a decision ..." '
        'autocomplete="off" spellcheck="false" aria-controls="decisions">'
        f' <output id="count" for="filter">{len(shown)} rows</output></p>'
        f"{note}"
        '<div class="scroll" tabindex="0" role="region" aria-label="The decisions">'
        f'<table id="decisions"><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
        "</div>"
        '<p class="note print">Printed: the first 60 rows.</p>'
    )


def count_rows(trace: Trace, rows: Sequence[DecisionRow]) -> str:
    """Return a sentence on the saved storages that have no row; empty: all have one."""
    saved = sum(each.is_saved and each.birth != BEFORE for each in trace.storages)
    left = saved - len(rows)
    if left <= 0:
        return ""
    return (
        f"Autograd saves {saved:,} storages in this step, {len(rows):,} of which a plan can move: "
        f"these have a row. The other {left:,} stay on the device."
    )


def _limit(
    rows: Sequence[DecisionRow], sites: Sequence[SiteReport]
) -> tuple[Sequence[DecisionRow], str]:
    """Return the rows to show, and a paragraph about those that are joined or left out."""
    if len(rows) <= MOST_ROWS:
        return rows, ""
    joined = [
        DecisionRow(
            place=each.site,
            maker="",
            action=each.action,
            why=each.why,
            count=each.count,
            nbytes=each.nbytes,
            cost_seconds=each.exposed_seconds,
            copy_seconds=0.0,
            recompute_seconds=None,
        )
        for each in group_sites(sites)
    ]
    shown = joined[:MOST_ROWS]
    left = f" The largest {MOST_ROWS:,} rows are shown." if len(joined) > MOST_ROWS else ""
    return shown, (
        f'<p class="note">The {len(rows):,} storages are joined to {len(joined):,} rows: those of '
        f"modules that differ only in numbers share a row.{left}</p>"
    )


def _render_head(column: _Column) -> str:
    kind = "number" if column.is_number else "text"
    return (
        f'<th scope="col" class="{kind}" title="{escape(column.meaning)}">'
        f'<button type="button">{escape(column.head)}</button></th>'
    )


def _render_row(row: DecisionRow, columns: Sequence[_Column]) -> str:
    action = row.action.split(maxsplit=1)[0]
    cells = {
        "place": f'<th scope="row">{escape(row.place)}</th>',
        "made by": f'<td class="maker">{escape(row.maker)}</td>',
        "decision": f'<td><span class="tag {action}">{escape(row.action)}</span></td>',
        "storages": _number(row.count, str(row.count)),
        "size": _number(row.nbytes, format_bytes(row.nbytes)),
        "costs": _seconds(row.cost_seconds or None),
        "copies": _seconds(row.copy_seconds or None),
        "recomputing": _seconds(row.recompute_seconds),
        "why": f"<td>{escape(row.why)}</td>",
    }
    return f"<tr>{''.join(cells[column.head] for column in columns)}</tr>"


def _seconds(value: float | None) -> str:
    return _number(-1, "-") if value is None else _number(value, format_seconds(value))


def _number(value: float, text: str) -> str:
    return f'<td data-v="{value:.6g}">{text}</td>'
