"""The head of a page: what was asked, what came of it, and with which software."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from swapkit.reporting.html.views import why_no_plan
from swapkit.reporting.machines import format_seconds, summarize_machine
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit.reporting.run_records import RunRecord

FAR = 0.1  # share of a predicted time: a warning if the measured time differs by more
_STAGES = {"warmup": "in its warm-up", "search": "trying plans", "stable": "settled"}


def render_summary(record: RunRecord) -> str:
    """Return the figures of a run as HTML."""
    stats = record.stats
    share = stats.peak_bytes / stats.budget_bytes
    state = "ended" if record.is_ended else _STAGES.get(record.stage, record.stage)
    facts = [
        ("budget", format_bytes(stats.budget_bytes), f"policy {record.policy}"),
        ("peak", format_bytes(stats.peak_bytes), f"reserved, {share:.1%} of the budget"),
        ("steps", f"{stats.steps:,}", f"the session is {state}" if not record.is_ended else state),
        ("step time", *_step_time(record)),
        (
            "copied out",
            format_bytes(stats.swapped_out_bytes),
            f"{format_bytes(stats.swapped_in_bytes)} back",
        ),
        (
            "waiting for copies",
            format_seconds(stats.stall_seconds),
            f"{stats.oom_rescues:,} rescues, {stats.recomputed_regions:,} recomputations",
        ),
        (
            "on the host",
            format_bytes(stats.host_peak_bytes),
            "most copies at once"
            + (f"; disk {format_bytes(stats.disk_peak_bytes)}" if stats.disk_peak_bytes else ""),
        ),
    ]
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><span>{escape(more)}</span></dd>"
        "</div>"
        for name, value, more in facts
    )
    return (
        f'<section id="summary">{_tell_measured(record)}'
        f'<p class="lead">{escape(_tell_plan(record))}</p>'
        f"{_render_bar(share, stats.peak_bytes, stats.budget_bytes)}"
        f'<dl class="facts">{cards}</dl>'
        f'<p class="made">{escape(_tell_software(record))}</p></section>'
    )


def _render_bar(share: float, peak_bytes: int, budget_bytes: int) -> str:
    text = f"peak {format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}"
    return (
        f'<div class="bar" role="img" aria-label="{escape(text)}">'
        f'<div style="width:{min(100.0, 100 * share):.1f}%"></div></div>'
    )


def _tell_measured(record: RunRecord) -> str:
    """Return the measured step beside the predicted one, as a warning if they are far apart."""
    stats = record.stats
    measured, predicted = stats.step_seconds, stats.predicted_step_seconds
    if measured is None:
        return ""
    text = f"Measured: {format_seconds(measured)} a step"
    is_far = False
    if predicted:
        error = measured / predicted - 1
        is_far = abs(error) > FAR
        text += f", {error:+.1%} from the prediction of {format_seconds(predicted)}"
    kind = "warning" if is_far else "lead"
    more = ": times below that are predicted are as far off" if is_far else ""
    return f'<p class="{kind}">{escape(f"{text}{more}.")}</p>'


def _tell_plan(record: RunRecord) -> str:
    if not record.plan_text:
        return f"There is no plan: {why_no_plan(record)}."
    settled = "The plan" if record.stage == "stable" else "The plan tried last"
    return f"{settled}: {record.plan_text}."


def _step_time(record: RunRecord) -> tuple[str, str]:
    stats = record.stats
    measured, free = stats.step_seconds, stats.unlimited_step_seconds
    if measured is None:
        median = _median(sorted(each.seconds for each in record.steps))
        return (format_seconds(median), "median of all steps") if record.steps else ("-", "")
    if free is None:
        return format_seconds(measured), "median of the latest steps"
    return format_seconds(measured), f"median; {format_seconds(free)} predicted without a budget"


def _median(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2] if ordered else 0.0


def _tell_software(record: RunRecord) -> str:
    device = f"{record.device} ({record.hardware})" if record.hardware else record.device
    return (
        f"{device}, torch {record.torch_version}, swapkit {record.swapkit_version}, "
        f"{record.created}"
    )


def render_notes(record: RunRecord) -> str:
    """Return what else there is to say; empty: nothing."""
    notes = list(record.notes)
    if record.machine is not None:
        notes.append(f"links: {summarize_machine(record.machine)}")
    if not notes:
        return ""
    items = "".join(f"<li>{escape(_as_sentence(each))}</li>" for each in notes)
    return f'<section id="notes"><h2>Notes</h2><ul>{items}</ul></section>'


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
