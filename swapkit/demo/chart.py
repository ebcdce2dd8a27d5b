"""The demo's picture: device bytes over one step, a panel without a limit and one per budget."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swapkit.demo.messages import RunKind
from swapkit.demo.results import RunResult
from swapkit.demo.sizes import UNTIMED_STEPS

_MIB = 1 << 20
_PANEL_INCHES = (5.2, 4.4)
_HEADROOM = 1.35
_DOTS_PER_INCH = 140
_COLOURS = {
    RunKind.PLAIN: "#222222",
    RunKind.POOL: "#1f77b4",
    RunKind.RECOMPUTE: "#2ca02c",
    RunKind.CAPPED: "#d62728",
    RunKind.BUDGETED: "#1f77b4",
}
_NAMES = {
    RunKind.PLAIN: "torch's allocator",
    RunKind.POOL: "swapkit's pool",
    RunKind.RECOMPUTE: "full recompute",
    RunKind.CAPPED: "plain torch",
    RunKind.BUDGETED: "swapkit.budget",
}


def draw_chart(results: Sequence[RunResult], path: Path) -> None:
    """Write the picture.

    Args:
        results: of all runs, the one on torch's own allocator first.
        path: of the PNG to write.
    """
    free = [each for each in results if each.spec.budget_bytes is None]
    budgets = list(dict.fromkeys(each.spec.budget_bytes for each in results))
    groups = [free] + [
        [each for each in results if each.spec.budget_bytes == budget]
        for budget in budgets
        if budget is not None
    ]
    mpl.use("Agg")
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(groups), height), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    usual = next(each for each in free if each.spec.kind == RunKind.POOL)
    for panel, group in zip(panels, groups, strict=True):
        _draw_panel(panel, group, usual)
    panels[0].set_ylim(0, free[0].peak_bytes / _MIB * _HEADROOM)
    panels[0].set_ylabel("device bytes in use, MiB")
    figure.suptitle("Device memory over the second training step")
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw_panel(panel: Axes, group: Sequence[RunResult], usual: RunResult) -> None:
    """Draw the runs with one budget, and the pool without a limit behind them."""
    budget_bytes = group[0].spec.budget_bytes
    if budget_bytes is None:
        panel.set_title("no limit")
    else:
        panel.set_title(f"budget {budget_bytes / _MIB:.1f} MiB")
        panel.axhline(budget_bytes / _MIB, color="#555555", linestyle="--", label="budget")
        xs, ys = _points(usual, usual)
        label = f"{usual.spec.label}: no limit"
        panel.fill_between(xs, ys, color="#dddddd", label=label, step="post")
    for result in group:
        _draw_run(panel, result, usual)
    panel.set_xlabel("fraction of the step")
    panel.set_xlim(0, 1)
    panel.grid(alpha=0.25)
    panel.legend(loc="upper right", fontsize="small", framealpha=0.9, ncols=2)


def _draw_run(panel: Axes, result: RunResult, usual: RunResult) -> None:
    """Draw one run; a cross marks where it ran out of memory."""
    kind, failure = result.spec.kind, result.out_of_memory
    xs, ys = _points(result, usual)
    if not xs:
        return
    label = f"{result.spec.label}: {_NAMES[kind]}"
    style = ":" if kind == RunKind.POOL else "-"
    colour = _COLOURS[kind]
    panel.step(xs, ys, style, where="post", color=colour, linewidth=1.3, label=label)
    if failure is not None:
        label = f"out of memory, step {failure.step + 1}"
        panel.plot(xs[-1], ys[-1], "X", color=colour, markersize=10, label=label)


def _points(result: RunResult, usual: RunResult) -> tuple[list[float], list[float]]:
    """The run's curve: fraction of the step, MiB. A failed step would have been a usual one."""
    failure = result.out_of_memory
    last = UNTIMED_STEPS - 1
    if result.untimed_seconds:
        seconds = result.untimed_seconds[last]
    else:
        seconds = usual.untimed_seconds[min(failure.step, last) if failure else last]
    xs = [time / seconds for time, _ in result.series]
    return xs, [nbytes / _MIB for _, nbytes in result.series]
