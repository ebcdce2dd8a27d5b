"""The demo's chart: device bytes over one step of every run."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from swapkit.demo.messages import RunKind
from swapkit.demo.results import RaceResult

_MIB = 1 << 20
_INCHES = (8.0, 4.5)
_HEADROOM = 1.25
_DOTS_PER_INCH = 140
_COLOURS = {RunKind.PLAIN: "#222222", RunKind.RECOMPUTE: "#2ca02c"}
_BUDGET_COLOURS = ("#1f77b4", "#d62728", "#9467bd", "#ff7f0e")


def draw_chart(race: RaceResult, path: Path) -> None:
    """Write the chart.

    Args:
        race: all runs.
        path: the PNG file to write.
    """
    mpl.use("Agg")
    figure = Figure(figsize=_INCHES, layout="constrained")
    panel = figure.subplots()
    budgets = 0
    for result in race.runs:
        if not result.series:
            continue
        kind, colour = result.spec.kind, _BUDGET_COLOURS[budgets % len(_BUDGET_COLOURS)]
        if result.budget_bytes is not None:
            budgets += 1
            panel.axhline(result.budget_bytes / _MIB, color=colour, linestyle="--", linewidth=0.8)
        xs = [time / result.series_seconds for time, _ in result.series]
        ys = [nbytes / _MIB for _, nbytes in result.series]
        colour = _COLOURS.get(kind, colour)
        panel.step(xs, ys, where="post", color=colour, linewidth=1.3, label=result.spec.label)
    panel.set_title("Device memory over one training step (dashed: the budgets)")
    panel.set_xlabel("fraction of the step")
    panel.set_ylabel("bytes in use, MiB")
    panel.set_xlim(0, 1)
    panel.set_ylim(0, race.plain.peak_bytes / _MIB * _HEADROOM)
    panel.grid(alpha=0.25)
    panel.legend(loc="upper right", fontsize="small", ncols=2)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
