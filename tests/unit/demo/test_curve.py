"""Curves keep their peaks when they are thinned out."""

from __future__ import annotations

from swapkit.demo.curve import thin_out


def test_curve_when_thinned_then_peak_and_end_stay() -> None:
    points = [(index / 1000, (index * 7919) % 1009) for index in range(5000)]
    points[3210] = (3.210, 99_999)
    thinned = thin_out(points, count=50)
    assert len(thinned) <= 102
    assert (3.210, 99_999) in thinned
    assert thinned[-1] == points[-1]
    assert list(thinned) == sorted(thinned)
    assert set(thinned) <= set(points)


def test_curve_when_short_then_left_as_it_is() -> None:
    assert thin_out([(0.0, 1), (0.0, 5), (1.0, 2)], count=3) == ((0.0, 1), (0.0, 5), (1.0, 2))


def test_curve_when_all_at_one_time_then_highest_and_last() -> None:
    assert thin_out([(0.0, 1), (0.0, 5), (0.0, 2)], count=2) == ((0.0, 5), (0.0, 2))
