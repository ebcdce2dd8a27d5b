"""The chart of a replay: free memory is shown, addresses that nobody has are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from swapkit.replay.chart import draw_replay, squeeze_addresses
from swapkit.replay.comparing import compare_allocators
from swapkit.simulation.allocators.rounding import MIB
from tests.unit.simulation.allocators.test_replaying import HOLES

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keep the figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        saved.append(figure)
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def test_chart_when_drawn_then_a_panel_for_each_allocator(
    tmp_path: Path, figures: list[Figure]
) -> None:
    reports = compare_allocators(HOLES)
    draw_replay(HOLES, reports, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)
    (figure,) = figures
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles[0] == "torch: 0.18 GiB reserved"
    assert len(titles) == len(reports) == 4
    tops = [panel.get_ylim()[1] for panel in figure.axes]
    assert tops == pytest.approx([180 / 1024 * 1.02] * 4)  # one scale
    (shapes,) = (each for each in figure.axes[0].collections if isinstance(each, PolyCollection))
    extents = [path.get_extents().bounds for path in shapes.get_paths()]
    assert extents[1] == pytest.approx((1, 30 / 1024, 8, 30 / 1024))  # to event 9


def test_chart_when_an_allocator_fails_then_it_ends_there(
    tmp_path: Path, figures: list[Figure]
) -> None:
    reports = compare_allocators(HOLES, budget_bytes=119 * MIB)
    draw_replay(HOLES, reports, tmp_path / "chart.png")
    first = figures[0].axes[0]
    assert first.get_title(loc="left").endswith("reserved, then out of memory")
    assert first.lines[0].get_xdata()[0] == 3  # type: ignore[index]


def test_addresses_when_far_apart_then_drawn_together() -> None:
    far = 1 << 40
    ranges = [(far, MIB), (far + 3 * MIB, MIB), (2 * far, MIB), (2 * far, 2 * MIB), (far, 5 * MIB)]
    assert squeeze_addresses(ranges) == [0, 3 * MIB, 25 * MIB, 25 * MIB, 0]
    assert squeeze_addresses([]) == []
