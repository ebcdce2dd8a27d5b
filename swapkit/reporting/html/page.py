"""The whole page: one file with all it needs. It loads nothing, and its policy forbids it to."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from swapkit.reporting.html.decisions import count_rows, list_rows, render_decisions
from swapkit.reporting.html.drawing import require_bokeh
from swapkit.reporting.html.run_figures import draw_budgets, draw_run
from swapkit.reporting.html.step_figures import draw_step
from swapkit.reporting.html.summary import render_notes, render_summary
from swapkit.reporting.html.views import view_step, why_no_plan
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit.reporting.html.drawing import Key, Plot
    from swapkit.reporting.html.views import StepView
    from swapkit.reporting.run_records import RunRecord

# The page may run its own scripts and styles, and fetch nothing.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)


def render_page(record: RunRecord) -> str:
    """Return the page of a record.

    Raises:
        MissingPackage: Bokeh is not installed.
    """
    require_bokeh()
    view = view_step(record)
    plots: list[Plot] = []
    body = [
        render_summary(record),
        _render_step(record, view, plots),
        _render_decisions(record, view),
        _render_budgets(record, plots),
        _render_run(record, plots),
        render_notes(record),
    ]
    return _assemble(_title(record), "\n".join(body), plots)


def _title(record: RunRecord) -> str:
    label = record.trace.label if record.trace is not None else ""
    budget = format_bytes(record.stats.budget_bytes)
    return f"{label} in {budget}" if label else f"Training in {budget}"


def _render_step(record: RunRecord, view: StepView | None, plots: list[Plot]) -> str:
    if view is None:
        return _section("step", "One step", _missing("this figure", why_no_plan(record)))
    made = draw_step(view, record.stats.budget_bytes)
    plots += made
    if view.is_planned:
        intro = (
            f"One step as the simulator predicts it for the plan: {view.operators:,} recorded "
            "operators, with times scaled to the measured steps."
        )
    else:
        intro = f"The recorded step without a plan, because {view.why_not_planned}."
    figures = [_render_plot(each) for each in made]
    return _section("step", "One step", f"<p>{escape(intro)}</p>", *figures, _render_peak(view))


def _render_peak(view: StepView) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(each.name)}</th>'
        f"<td>{format_bytes(each.nbytes)}</td><td>{each.count:,}</td></tr>"
        for each in view.peak_holders
    )
    return (
        "<h3>Who holds the peak</h3><p>The largest holders at the instant with the most memory in "
        'use, as simulated.</p><table id="peak"><thead><tr><th scope="col">what</th>'
        '<th scope="col">size</th><th scope="col">storages</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _render_decisions(record: RunRecord, view: StepView | None) -> str:
    title = "Decisions"
    if view is None or record.trace is None or not view.is_planned:
        why = why_no_plan(record) if view is None else view.why_not_planned
        return _section("plan", title, _missing("The table of decisions", why))
    rows = list_rows(record.trace, view.reasons, record.pace)
    if not rows:
        return _section("plan", title, "<p>The step saves nothing that a plan can move.</p>")
    intro = (
        "<p>Each storage that autograd saves and that a plan may move. Search for a module, or "
        "sort by a column to find what costs most.</p>"
    )
    left = count_rows(record.trace, rows)
    note = f'<p class="note">{escape(left)}</p>' if left else ""
    return _section("plan", title, intro, note, render_decisions(rows))


def _render_budgets(record: RunRecord, plots: list[Plot]) -> str:
    title = "Other budgets"
    if record.plan is None or not record.trade_offs:
        why = why_no_plan(record) if record.plan is None else "the speed of the links is unknown"
        return _section("budgets", title, _missing("This figure", why))
    plot = draw_budgets(record)
    plots.append(plot)
    return _section("budgets", title, _render_plot(plot))


def _render_run(record: RunRecord, plots: list[Plot]) -> str:
    title = "All steps"
    if not record.steps:
        return _section("run", title, _missing("This figure", "no step has ended"))
    made = draw_run(record)
    plots += made
    return _section("run", title, *map(_render_plot, made))


def _section(name: str, title: str, *parts: str) -> str:
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{"".join(parts)}\n</section>'


def _missing(what: str, why: str) -> str:
    return f'<p class="missing">{escape(what)} is missing: {escape(why)}.</p>'


def _render_plot(plot: Plot) -> str:
    keys = "".join(map(_render_key, plot.keys))
    note = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    return (
        f'<figure id="figure-{plot.name}">'
        f"<h3>{escape(plot.title)}</h3>"
        f'<ul class="legend">{keys}</ul>'
        f'<div class="plot" id="plot-{plot.name}" role="img" '
        f'aria-label="{escape(plot.alternative)}" '
        f'style="min-height:{plot.figure.height}px">'
        f"<noscript><p>{escape(plot.alternative)} The drawing needs JavaScript.</p></noscript>"
        "</div>"
        f"<figcaption>{escape(plot.reading)}</figcaption>{note}</figure>\n"
    )


def _render_key(key: Key) -> str:
    style = f' style="color:{key.colour}"' if key.colour else ""
    return f'<li><i class="{key.mark}"{style}></i>{escape(key.text)}</li>'


def _assemble(title: str, body: str, plots: Sequence[Plot]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} - swapkit</title>\n<style>\n{_read('page.css')}</style>\n"
        "</head>\n<body>\n"
        '<header><p class="brand">swapkit report</p>'
        f"<h1>{escape(title)}</h1>"
        '<button type="button" id="theme" class="script" '
        'aria-label="Switch between light and dark">light / dark</button></header>\n'
        f"<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="plots">{_embed(plots)}</script>\n'
        f"<script>\n{_bokeh() if plots else ''}\n</script>\n"
        f"<script>\n{_read('page.js')}</script>\n</body>\n</html>\n"
    )


def _embed(plots: Sequence[Plot]) -> str:
    """Return all figures as one document of Bokeh, and the elements that they go into."""
    if not plots:
        return "null"
    from bokeh.document import Document

    document = Document()
    for plot in plots:
        document.add_root(plot.figure)
    roots = {plot.figure.id: f"plot-{plot.name}" for plot in plots}
    items = [{"docid": "page", "roots": roots, "root_ids": list(roots)}]
    text = json.dumps(
        {"documents": {"page": document.to_json(deferred=False)}, "items": items},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    return _escape_script(text)


def _escape_script(text: str) -> str:
    """Return JSON that cannot end the script element that it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _bokeh() -> str:
    """Return the core of BokehJS, without its widgets, tables and web GL."""
    from bokeh.resources import Resources

    return _join(Resources(mode="inline", components=["bokeh"]).js_raw)


def _join(scripts: Iterable[str]) -> str:
    return "\n".join(scripts).replace("</script", "<\\/script")


def _read(name: str) -> str:
    return files("swapkit.reporting.html").joinpath(name).read_text(encoding="utf-8")
