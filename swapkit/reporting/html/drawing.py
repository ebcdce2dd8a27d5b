"""What all figures share: colours, axes, units, and what is said when Bokeh is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swapkit.errors import MissingPackage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.plotting import figure

# The palette of Okabe and Ito, which people with colour blindness tell apart.
BLUE, SKY, GREEN, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#f0e442"
ORANGE, RED, PURPLE, GREY = "#e69f00", "#cf1020", "#cc79a7", "#999999"
INK = "#1f2933"
# Tags of lines and marks that page.js draws lighter in the dark, and their colours for legends.
TAG_INK, TAG_BLUE = "ink", "blue"
LEGEND_INK, LEGEND_BLUE = "", "var(--blue)"

LEFT_BORDER = 104  # pixels; equal in all figures, so that their time axes are aligned
_TOOLS = "xbox_zoom,xpan,xwheel_zoom,reset,save"
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of an axis: values are divided by `size`."""

    size: float
    name: str

    def scale(self, values: Sequence[float]) -> list[float]:
        """Return values in this unit, with as many digits as a screen can show."""
        return [float(f"{value / self.size:.6g}") for value in values]


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend. `mark`: box, line, dashes, dots, diamond, cross or circle."""

    mark: str
    colour: str
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with the words around it.

    Args:
        name: its identifier in the page.
        title: its heading.
        figure: of Bokeh.
        reading: one sentence that says how to read it.
        alternative: what it shows, for people who do not see it.
        keys: its legend.
        note: what was left out or joined; empty: nothing.
    """

    name: str
    title: str
    figure: figure
    reading: str
    alternative: str
    keys: tuple[Key, ...]
    note: str = ""


def require_bokeh() -> None:
    """Check that Bokeh is installed.

    Raises:
        MissingPackage: it is not.
    """
    if importlib.util.find_spec("bokeh") is None:
        raise MissingPackage(
            "a report as a page needs Bokeh, which is not installed: "
            'pip install "swapkit[report]". `session.report("run.json")` works without it; '
            "`swapkit report run.json` draws the page where Bokeh is installed",
            name="bokeh",
        )


def bytes_unit(most: float) -> Unit:
    """Return the unit in which an axis up to `most` bytes is easy to read."""
    return next((Unit(size, name) for size, name in _BYTES if most >= 2 * size), Unit(1, "B"))


def seconds_unit(most: float) -> Unit:
    """Return the unit in which an axis up to `most` seconds is easy to read."""
    return next((Unit(size, name) for size, name in _SECONDS if most >= 2 * size), Unit(1e-6, "us"))


def make_figure(
    x_label: str,
    y_label: str,
    height: int,
    **options: Any,
) -> figure:
    """Return an empty figure as wide as the page.

    Args:
        x_label: with its unit.
        y_label: with its unit; short, since it is written upwards.
        height: in pixels.
        options: for Bokeh's `figure`.
    """
    from bokeh.plotting import figure

    made = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_drag="xbox_zoom",
        active_scroll=None,
        toolbar_location="right",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=LEFT_BORDER,
        min_border_top=8,
        **options,
    )
    made.toolbar.logo = None
    made.xaxis.axis_label, made.yaxis.axis_label = x_label, y_label
    for axis in (*made.xaxis, *made.yaxis):
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_line_color = axis.major_tick_line_color = None
        axis.minor_tick_line_color = None
    made.xgrid.grid_line_color = None
    return made


def add_level(made: figure, height: float, colour: str = RED) -> None:
    """Draw a dashed line across a figure, such as the budget."""
    from bokeh.models import Span

    made.add_layout(
        Span(
            location=height, dimension="width", line_color=colour, line_width=2, line_dash="dashed"
        )
    )
