"""The figures of a run: step time against budget, and all its steps."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from swapkit.reporting.html.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LEGEND_BLUE,
    LEGEND_INK,
    ORANGE,
    PURPLE,
    RED,
    TAG_BLUE,
    TAG_INK,
    YELLOW,
    Key,
    Plot,
    add_level,
    bytes_unit,
    make_figure,
    seconds_unit,
)
from swapkit.reporting.html.views import view_run
from swapkit.reporting.machines import format_seconds
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.plotting import figure

    from swapkit.reporting.html.drawing import Unit
    from swapkit.reporting.html.views import StepPoint
    from swapkit.reporting.run_records import RunRecord

_STAGES = {"warmup": (YELLOW, "warm-up"), "search": (ORANGE, "search"), "stable": (BLUE, "stable")}
_MANY_POINTS = 150
_LONG = 6  # times the median: from there on, step times need a logarithmic axis


def draw_budgets(record: RunRecord) -> Plot:
    """Return step time against budget; the record has trade-offs and a plan."""
    plan, stats, offers = record.plan, record.stats, record.trade_offs
    assert plan is not None
    chosen = stats.predicted_step_seconds or 0.0
    seconds = [each.seconds * record.pace for each in offers]
    budgets = [each.budget_bytes for each in offers]
    marks = [
        _Mark("diamond", ORANGE, "this plan, predicted", chosen, 17),
        _Mark("cross", INK, "this plan, measured", stats.step_seconds or 0.0, 15),
    ]
    marks = [each for each in marks if each.seconds]
    unit = bytes_unit(max(*budgets, plan.budget_bytes))
    most = max(*seconds, *(each.seconds for each in marks))
    time = seconds_unit(most)
    made = make_figure(f"budget ({unit.name})", f"step time ({time.name})", 340,
                       y_range=(0, 1.1 * most / time.size))  # fmt: skip
    _draw_offers(made, record, unit, time)
    for mark in marks:
        _draw_mark(made, mark, plan.budget_bytes / unit.size, time)
    offered = "; ".join(
        f"{format_bytes(budget)}: {format_seconds(value)}"
        for budget, value in zip(budgets, seconds, strict=True)
    )
    return Plot(
        name="budgets",
        title="Step time against budget",
        figure=made,
        reading=(
            "Read from the chosen point (diamond) to the left what a smaller budget would cost, "
            "and to the right what a larger one would save."
        ),
        alternative=(
            f"Predicted step by budget: {offered}. This plan: {format_bytes(plan.budget_bytes)}, "
            f"{format_seconds(chosen)}."
        ),
        keys=(
            Key("line", LEGEND_BLUE, "fastest plan found (predicted)"),
            Key("dots", GREY, "no plan is faster (lower bound)"),
            *(each.key for each in marks),
        ),
    )


def _draw_offers(made: figure, record: RunRecord, unit: Unit, time: Unit) -> None:
    """Draw the predicted steps, and the bound of all plans."""
    from bokeh.models import ColumnDataSource, HoverTool

    offers, pace = record.trade_offs, record.pace
    source = ColumnDataSource(
        {
            "budget": unit.scale([each.budget_bytes for each in offers]),
            "seconds": time.scale([each.seconds * pace for each in offers]),
            "bound": time.scale([each.bound_seconds * pace for each in offers]),
            "swapped": [format_bytes(each.swapped_bytes) for each in offers],
            "recomputed": [format_seconds(each.recompute_seconds * pace) for each in offers],
        }
    )
    made.line("budget", "bound", source=source, line_color=GREY, line_width=2, line_dash="dotted")
    line = made.step("budget", "seconds", source=source, mode="after", line_color=BLUE,
                     line_width=2)  # fmt: skip
    dots = made.scatter("budget", "seconds", source=source, size=9, fill_color=BLUE,
                        line_color=BLUE)  # fmt: skip
    line.glyph.tags = dots.glyph.tags = [TAG_BLUE]
    rows = [
        ("budget", f"@budget{{0.00}} {unit.name}"),
        ("step", f"@seconds{{0.000}} {time.name}"),
        ("no plan is below", f"@bound{{0.000}} {time.name}"),
        ("swapped", "@swapped"),
        ("recomputed", "@recomputed"),
    ]
    made.add_tools(HoverTool(renderers=[dots], tooltips=rows, visible=False))


class _Mark(NamedTuple):
    """A point for the plan in use."""

    shape: str
    colour: str
    text: str
    seconds: float
    size: int

    @property
    def key(self) -> Key:
        """Its entry in the legend."""
        colour = LEGEND_INK if self.colour == INK else self.colour
        return Key(self.shape, colour, f"{self.text}: {format_seconds(self.seconds)}")


def _draw_mark(made: figure, mark: _Mark, at: float, time: Unit) -> None:
    drawn = made.scatter([at], [mark.seconds / time.size], marker=mark.shape, size=mark.size,
                         fill_color=mark.colour, line_color=mark.colour, line_width=3)  # fmt: skip
    if mark.colour == INK:
        drawn.glyph.tags = [TAG_INK]


def draw_run(record: RunRecord) -> list[Plot]:
    """Return time, memory and rescues of all steps, on one axis; there is at least one step."""
    from bokeh.models import Range1d

    points = view_run(record.steps)
    first, last = points[0].first, points[-1].last
    x_range = Range1d(first - 0.5, last + 0.5, bounds=(first - 0.5, last + 0.5))
    note = ""
    if len(points) < len(record.steps):
        note = (
            f"{len(record.steps):,} steps are drawn as {len(points):,} points: of the steps that a "
            "point stands for, the longest time, the highest peak, and all rescues."
        )
    if record.stats.steps > len(record.steps):
        note += f" The session keeps its latest {len(record.steps):,} steps."
    return [
        _draw_times(points, x_range, note.strip()),
        _draw_peaks(points, x_range, record.stats.budget_bytes),
        _draw_rescues(points, x_range),
    ]


def _source(points: Sequence[StepPoint], column: str, values: Sequence[float]) -> dict[str, object]:
    return {
        "step": [(each.first + each.last) / 2 for each in points],
        "steps": [
            str(each.first) if each.first == each.last else f"{each.first} to {each.last}"
            for each in points
        ],
        "stage": [each.stage for each in points],
        column: list(values),
    }


def _dot_size(points: Sequence[StepPoint]) -> int:
    """Return the size of a point: so many that they touch are only a line, with its texts."""
    return 6 if len(points) <= _MANY_POINTS else 1


def _mark_stages(made: figure, points: Sequence[StepPoint]) -> list[Key]:
    """Shade the steps before the plan settled; return the legend of the shades."""
    from bokeh.models import BoxAnnotation

    keys: dict[str, Key] = {}
    for stage, group in groupby(points, key=lambda each: each.stage):
        run = list(group)
        if stage not in _STAGES or stage == "stable":
            continue
        colour, text = _STAGES[stage]
        made.add_layout(
            BoxAnnotation(left=run[0].first - 0.5, right=run[-1].last + 0.5, fill_color=colour,
                          fill_alpha=0.22, line_color=None, level="underlay")
        )  # fmt: skip
        keys[stage] = Key("box", colour, text)
    return list(keys.values())


def _draw_times(points: Sequence[StepPoint], x_range: object, note: str) -> Plot:
    from bokeh.models import ColumnDataSource, HoverTool

    seconds = [each.seconds for each in points]
    middle = median(seconds)
    time = seconds_unit(middle)
    is_long = max(seconds) > _LONG * middle > 0 and min(seconds) > 0
    options = {"y_axis_type": "log"} if is_long else {}
    made = make_figure("step", f"time ({time.name})", 240, x_range=x_range, **options)
    if not is_long:
        made.y_range.start = 0
        made.y_range.end = (1.1 * max(seconds) or 1.0) / time.size
    source = ColumnDataSource(_source(points, "seconds", time.scale(seconds)))
    keys = _mark_stages(made, points)
    line = made.line("step", "seconds", source=source, line_color=BLUE, line_width=1.5)
    dots = made.scatter(
        "step", "seconds", source=source, size=_dot_size(points), fill_color=BLUE, line_color=BLUE
    )
    line.glyph.tags = dots.glyph.tags = [TAG_BLUE]
    rows = [("step", "@steps"), ("time", f"@seconds{{0.00}} {time.name}"), ("stage", "@stage")]
    made.add_tools(HoverTool(renderers=[dots], tooltips=rows, mode="vline", visible=False))
    return Plot(
        name="times",
        title="Time of each step",
        figure=made,
        reading=(
            "Read the height as the time from the end of one step to the end of the next; shaded "
            "steps record, measure or try plans, and those after them follow the plan"
            + (" (the axis is logarithmic)." if is_long else ".")
        ),
        alternative=(
            f"Steps {points[0].first} to {points[-1].last}: median {format_seconds(middle)}, "
            f"longest {format_seconds(max(seconds))}, last {format_seconds(seconds[-1])}."
        ),
        keys=(Key("line", LEGEND_BLUE, f"step time, median {format_seconds(middle)}"), *keys),
        note=note,
    )


def _draw_peaks(points: Sequence[StepPoint], x_range: object, budget_bytes: int) -> Plot:
    from bokeh.models import ColumnDataSource, HoverTool

    peaks = [each.peak_bytes for each in points]
    unit = bytes_unit(max(budget_bytes, *peaks))
    made = make_figure("step", f"peak ({unit.name})", 220, x_range=x_range,
                       y_range=(0, 1.1 * max(budget_bytes, *peaks) / unit.size))  # fmt: skip
    source = ColumnDataSource(
        _source(points, "peak", unit.scale(peaks))
        | {"moved": [format_bytes(each.moved_bytes) for each in points]}
    )
    _mark_stages(made, points)
    made.line("step", "peak", source=source, line_color=GREEN, line_width=1.5)
    dots = made.scatter(
        "step", "peak", source=source, size=_dot_size(points), fill_color=GREEN, line_color=None
    )
    add_level(made, budget_bytes / unit.size)
    rows = [("step", "@steps"), ("peak", f"@peak{{0.00}} {unit.name}"), ("copied out", "@moved")]
    made.add_tools(HoverTool(renderers=[dots], tooltips=rows, mode="vline", visible=False))
    return Plot(
        name="peaks",
        title="Peak of each step",
        figure=made,
        reading=(
            "Read the height as the most memory that the pool reserved in the step, which includes "
            "free parts of its blocks; it never exceeds the budget (red)."
        ),
        alternative=(
            f"Highest peak {format_bytes(max(peaks))} of {format_bytes(budget_bytes)}, last "
            f"{format_bytes(peaks[-1])}."
        ),
        keys=(
            Key("line", GREEN, f"peak reserved, at most {format_bytes(max(peaks))}"),
            Key("dashes", RED, f"budget {format_bytes(budget_bytes)}"),
        ),
    )


def _draw_rescues(points: Sequence[StepPoint], x_range: object) -> Plot:
    from bokeh.models import ColumnDataSource, HoverTool

    counts = [each.rescues for each in points]
    made = make_figure("step", "rescues", 220, x_range=x_range,
                       y_range=(0, 1.1 * max(*counts, 4)))  # fmt: skip
    source = ColumnDataSource(_source(points, "rescues", counts))
    _mark_stages(made, points)
    width = max(0.8, (points[-1].last - points[0].first) / 1000)
    bars = made.vbar("step", width=width, top="rescues", source=source, fill_color=PURPLE,
                     line_color=None)  # fmt: skip
    rows = [("step", "@steps"), ("rescues", "@rescues")]
    made.add_tools(HoverTool(renderers=[bars], tooltips=rows, visible=False))
    total = sum(counts)
    return Plot(
        name="rescues",
        title="Rescues of each step",
        figure=made,
        reading=(
            "Read a bar as allocations that did not fit, until memory was freed in the middle of "
            "an operator; once a plan has settled there should be few."
        ),
        alternative=f"{total} rescues in all, {counts[-1]} in the last step.",
        keys=(Key("box", PURPLE, f"rescues, {total} in all"),),
    )
