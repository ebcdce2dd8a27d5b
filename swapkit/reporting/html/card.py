"""A session as a small card of HTML, for notebooks: no script, and no library."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from swapkit.reporting.machines import format_seconds
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.runs import SessionStats, StepRecord

STEPS_SHOWN = 5
# The colours of the notebook show through, so that the card is readable in light and dark.
_CARD = (
    '<div style="display:inline-block;min-width:22em;padding:.7em 1em;border-radius:6px;'
    'border:1px solid rgba(128,128,128,.5);font:13px/1.5 system-ui,sans-serif">{}</div>'
)
_BAR = (
    '<div role="img" aria-label="{label}" style="height:8px;margin:.4em 0;border-radius:4px;'
    'background:rgba(128,128,128,.3)"><div style="width:{percent:.1f}%;height:8px;'
    'border-radius:4px;background:#0072b2"></div></div>'
)
_CELL = '<td style="text-align:right;padding:0 .6em">{}</td>'
_HEAD = '<th style="text-align:right;padding:0 .6em;font-weight:600">{}</th>'


def render_new(budget_bytes: int) -> str:
    """Return the card of a session that was not entered yet."""
    return _CARD.format(
        f"<b>swapkit session</b>, budget {escape(format_bytes(budget_bytes))}, not entered"
    )


def render_card(
    stats: SessionStats, state: str, plan_text: str, steps: Sequence[StepRecord]
) -> str:
    """Return a card with the stage, the peak as a bar of the budget, the plan and a few steps.

    Args:
        stats: the statistics.
        state: the stage, or `"ended"`.
        plan_text: the plan in one line; empty: there is none.
        steps: the latest steps.
    """
    share = 100 * stats.peak_bytes / stats.budget_bytes
    peak = f"peak {format_bytes(stats.peak_bytes)} of {format_bytes(stats.budget_bytes)}"
    count = f"{stats.steps} {'step' if stats.steps == 1 else 'steps'}"
    parts = [
        f"<b>swapkit session</b>, {escape(state)}, {count}",
        f"<div>{peak} ({share:.0f} %)</div>",
        _BAR.format(label=escape(peak), percent=min(share, 100.0)),
        f"<div>plan: {escape(plan_text) if plan_text else 'none'}</div>",
    ]
    if steps:
        parts.append(_render_steps(steps))
    return _CARD.format("".join(parts))


def _render_steps(steps: Sequence[StepRecord]) -> str:
    heads = "".join(map(_HEAD.format, ("step", "time", "peak", "rescues", "stage")))
    rows = "".join(f"<tr>{''.join(map(_CELL.format, _cells(each)))}</tr>" for each in steps)
    return (
        '<table style="border-collapse:collapse;margin-top:.4em">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _cells(step: StepRecord) -> tuple[str, ...]:
    return (
        str(step.step),
        format_seconds(step.seconds),
        format_bytes(step.peak_bytes),
        str(step.rescues),
        escape(step.stage),
    )
