"""A session as a small card of HTML, for notebooks: no script, and no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.text import format_html
from swapkit.units import format_bytes

STEPS_SHOWN = 5
_HEADS = ("step", "time", "peak", "rescues", "stage")
# The colours of the notebook show through, so that the card is readable in light and dark.
_CARD = (
    '<div style="display:inline-block;min-width:22em;padding:.7em 1em;border-radius:6px;'
    'border:1px solid rgba(128,128,128,.5);font:13px/1.5 system-ui,sans-serif">'
    "<b>swapkit session</b>, {}</div>"
)


def render_new(budget_bytes: int) -> str:
    """Return the card of a session that was not entered yet."""
    return _CARD.format(f"budget {format_bytes(budget_bytes)}, not entered")


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
    share = stats.peak_bytes / stats.budget_bytes
    peak = f"peak {format_bytes(stats.peak_bytes)} of {format_bytes(stats.budget_bytes)}"
    rows = [
        (
            str(each.step),
            format_seconds(each.seconds),
            format_bytes(each.peak_bytes),
            str(each.rescues),
            each.stage,
        )
        for each in steps
    ]
    return _CARD.format(
        f"{escape(state)}, {stats.steps} {'step' if stats.steps == 1 else 'steps'}"
        f"<br>{peak} ({share:.0%})"
        f'<br><meter style="width:100%" aria-label="{peak}" value="{share:.3f}"></meter>'
        f"<br>plan: {escape(plan_text or 'none')}"
        f"{format_html(_HEADS, rows) if rows else ''}"
    )
