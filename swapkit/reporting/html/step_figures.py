"""The figures of one step: memory by kind of data, and the lanes of computing and copying."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from swapkit.ir.traces import Phase
from swapkit.reporting.html.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LEGEND_INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TAG_INK,
    YELLOW,
    Key,
    Plot,
    add_level,
    bytes_unit,
    make_figure,
    seconds_unit,
)
from swapkit.reporting.html.lanes import MOST_COLUMNS, WAITING, Lane
from swapkit.reporting.machines import format_seconds
from swapkit.simulation.occupancy import ON_DEVICE, Layer
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bokeh.plotting import figure

    from swapkit.reporting.html.drawing import Unit
    from swapkit.reporting.html.lanes import ModuleSpan, WorkBlock
    from swapkit.reporting.html.views import StepView

_LAYERS = {
    Layer.BASE: GREY,
    Layer.STATE: BLUE,
    Layer.OPTIMIZER_STATE: PURPLE,
    Layer.GRADIENT: GREEN,
    Layer.INPUT: YELLOW,
    Layer.SAVED: SKY,
    Layer.TEMPORARY: ORANGE,
}
_KINDS = {
    Phase.FORWARD.value: (BLUE, "forward"),
    Phase.BACKWARD.value: (SKY, "backward"),
    Phase.OPTIMIZER.value: (GREEN, "optimizer"),
    Lane.RECOMPUTE.value: (ORANGE, "recompute"),
    Lane.OUT.value: (PURPLE, "copy out"),
    Lane.IN.value: (GREY, "copy in"),
    WAITING: (RED, "waiting for a copy"),
}
_LINES = {
    Layer.PLAIN: ("dashed", "dashes", "without a plan"),
    Layer.HOST: ("dotted", "dots", "copies on the host"),
    Layer.DISK: ("dotdash", "line", "copies on the disk"),
}
_HEADROOM = 1.06
_READING = (
    "Read the top of the coloured areas as the memory in use on the device; it has to stay below "
    "the budget (red), and the dashed line above it is what the same operators take without a plan."
)
_READING_PLAIN = (
    "Read the top of the coloured areas as the memory in use on the device; where it is above the "
    "budget (red), memory is freed in the middle of an operator."
)
_READING_LANES = (
    "Read each row as one resource at work, on the time axis of the figure above (a zoom there is "
    "one here): copies below coloured computing are free, and red means that computing waits for "
    "a copy."
)
_JOINED = (
    f"Neighbours of one kind that are narrower than 1/{MOST_COLUMNS} of the step are drawn as one "
    "block, whose text says how many they are."
)


def draw_step(view: StepView, budget_bytes: int) -> tuple[Plot, Plot]:
    """Return memory and lanes of a step, on one time axis.

    Args:
        view: the step.
        budget_bytes: the budget to mark.
    """
    from bokeh.models import Range1d

    end = view.occupancy.end
    time = seconds_unit(end)
    x_range = Range1d(0, end / time.size, bounds=(0, end / time.size))
    return _draw_memory(view, budget_bytes, x_range, time), _draw_lanes(view, x_range, time)


def _draw_memory(view: StepView, budget_bytes: int, x_range: object, time: Unit) -> Plot:
    occupancy = view.occupancy
    layers = {layer: row for layer, row in occupancy.layers.items() if max(row) > 0}
    if not view.is_planned:
        layers.pop(Layer.PLAIN, None)
    in_use = occupancy.in_use()
    most = max(budget_bytes, *in_use, *(max(row) for row in layers.values()))
    unit = bytes_unit(most)
    made = make_figure(f"time in the step ({time.name})", f"memory ({unit.name})", 380,
                       x_range=x_range, y_range=(0, _HEADROOM * most / unit.size))  # fmt: skip
    source = _columns(view, unit, time)
    times = [*source.data["left"], source.data["right"][-1]]
    _stack(made, times, layers, unit)
    add_level(made, budget_bytes / unit.size)
    _add_hover(made, source, list(layers), unit, time)
    plain_bytes = max(occupancy.layers[Layer.PLAIN])
    planned = "with its plan" if view.is_planned else "without a plan"
    return Plot(
        name="memory",
        title="Memory over one step",
        figure=made,
        reading=_READING if view.is_planned else _READING_PLAIN,
        alternative=(
            f"Memory over a step {planned} of {format_seconds(occupancy.end)}: at most "
            f"{format_bytes(max(in_use))} in use, budget {format_bytes(budget_bytes)}, without a "
            f"plan {format_bytes(plain_bytes)}."
        ),
        keys=_list_keys(layers, budget_bytes),
        note=_say_thinned(len(occupancy.times), occupancy.instants),
    )


def _stack(
    made: figure, times: list[float], layers: Mapping[Layer, tuple[int, ...]], unit: Unit
) -> None:
    """Draw what is on the device as areas, one above the other, and the rest as lines."""
    shown = [layer for layer in ON_DEVICE if layer in layers]
    lower = [0.0] * len(times)
    for layer, row in zip(shown, accumulate((layers[each] for each in shown), _add), strict=True):
        upper = unit.scale([*row, row[-1]])
        made.varea_step(x=times, y1=lower, y2=upper, step_mode="after", fill_color=_LAYERS[layer])
        lower = upper
    for layer, (dash, *_) in _LINES.items():
        if layer in layers:
            heights = unit.scale([*layers[layer], layers[layer][-1]])
            line = made.step(x=times, y=heights, mode="after", line_color=INK, line_width=1.5,
                             line_dash=dash)  # fmt: skip
            line.glyph.tags = [TAG_INK]


def _list_keys(layers: Mapping[Layer, tuple[int, ...]], budget_bytes: int) -> tuple[Key, ...]:
    """Return the legend, in the order from top to bottom."""
    return (
        *(
            Key("box", _LAYERS[layer], _say_most(layer.value, layers[layer]))
            for layer in reversed(ON_DEVICE)
            if layer in layers
        ),
        Key("dashes", RED, f"budget {format_bytes(budget_bytes)}"),
        *(
            Key(mark, LEGEND_INK, _say_most(text, layers[layer]))
            for layer, (_, mark, text) in _LINES.items()
            if layer in layers
        ),
    )


def _add(below: tuple[int, ...], row: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(below, row, strict=True)))


def _say_most(text: str, row: tuple[int, ...]) -> str:
    return f"{text}, at most {format_bytes(max(row))}"


def _say_thinned(shown: int, all_rows: int) -> str:
    if shown == all_rows:
        return ""
    return (
        f"Memory changes at {all_rows:,} instants; the figure shows {shown:,} of them, the one "
        "with the most memory in use for each span of time. Zooming in shows no more."
    )


def _columns(view: StepView, unit: Unit, time: Unit) -> Any:  # noqa: ANN401 - of Bokeh
    """Return the rows of the memory figure, for hovering."""
    from bokeh.models import ColumnDataSource

    occupancy = view.occupancy
    lefts = time.scale(occupancy.times)
    columns = {
        "left": lefts,
        "right": [*lefts[1:], occupancy.end / time.size],
        "in_use": unit.scale(occupancy.in_use()),
    }
    for layer, row in occupancy.layers.items():
        if max(row) > 0:
            columns[layer.name] = unit.scale(row)
    return ColumnDataSource(columns)


def _add_hover(made: figure, source: object, layers: list[Layer], unit: Unit, time: Unit) -> None:
    """Show all amounts wherever the mouse is."""
    from bokeh.models import HoverTool

    spans = made.quad(left="left", right="right", bottom=0, top=made.y_range.end, source=source,
                      fill_alpha=0, line_alpha=0)  # fmt: skip
    rows = [
        ("time", f"@left{{0.000}} {time.name}"),
        ("in use", f"@in_use{{0.00}} {unit.name}"),
        *((each.value, f"@{each.name}{{0.00}} {unit.name}") for each in reversed(layers)),
    ]
    made.add_tools(
        HoverTool(renderers=[spans], tooltips=rows, point_policy="follow_mouse", visible=False)
    )


def _draw_lanes(view: StepView, x_range: object, time: Unit) -> Plot:
    from bokeh.models import FactorRange

    y_range = FactorRange(*[lane.value for lane in reversed(Lane)])
    made = make_figure(f"time in the step ({time.name})", "", 80 + 36 * len(Lane),
                       x_range=x_range, y_range=y_range)  # fmt: skip
    made.ygrid.grid_line_color = None
    _draw_blocks(made, view.blocks, time)
    _draw_names(made, view.spans, time)
    spent: dict[str, float] = {}
    for each in view.blocks:
        spent[each.kind] = spent.get(each.kind, 0.0) + each.end - each.start
    keys = tuple(
        Key("box", colour, f"{text}, {format_seconds(spent[kind])}")
        for kind, (colour, text) in _KINDS.items()
        if kind in spent
    )
    is_joined = view.operators > MOST_COLUMNS or len(view.blocks) > MOST_COLUMNS
    return Plot(
        name="lanes",
        title="Computing and copying in the same step",
        figure=made,
        reading=_READING_LANES,
        alternative="Time by kind of work: " + "; ".join(key.text for key in keys) + ".",
        keys=keys,
        note=_JOINED if is_joined else "",
    )


def _draw_blocks(made: figure, blocks: Sequence[WorkBlock], time: Unit) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    source = ColumnDataSource(
        {
            "lane": [each.lane.value for each in blocks],
            "left": time.scale([each.start for each in blocks]),
            "right": time.scale([each.end for each in blocks]),
            "colour": [_KINDS.get(each.kind, (GREY, ""))[0] for each in blocks],
            "label": [each.label for each in blocks],
            "detail": [each.detail for each in blocks],
        }
    )
    # A line around each block, so that the narrowest one has a pixel.
    bars = made.hbar(y="lane", left="left", right="right", height=0.72, source=source,
                     fill_color="colour", line_color="colour")  # fmt: skip
    rows = [
        ("what", "@label"),
        ("where", "@detail"),
        ("from", f"@left{{0.000}} to @right{{0.000}} {time.name}"),
    ]
    made.add_tools(
        HoverTool(renderers=[bars], tooltips=rows, point_policy="follow_mouse", visible=False)
    )


def _draw_names(made: figure, spans: Sequence[ModuleSpan], time: Unit) -> None:
    """Write the names of the parts of the model into the lane of computing."""
    made.text(
        x=time.scale([(each.start + each.end) / 2 for each in spans]),
        y=[Lane.COMPUTE.value] * len(spans),
        text=[each.name for each in spans],
        text_align="center",
        text_baseline="middle",
        text_font_size="10px",
        text_color="#ffffff",
    )
