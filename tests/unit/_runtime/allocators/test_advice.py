"""What to try, by how the pool's memory lies."""

from __future__ import annotations

import pytest

from swapkit._runtime.allocators.memory_holders import SCATTERED_BYTES, advise_here, advise_layout

FREE_BYTES = SCATTERED_BYTES + (1 << 29)
IN_USE_BYTES = 100
LIFETIMES = (
    "1.50 GiB are reserved but unallocated: call swapkit.install(lifetimes=True), or set "
    "MEMORY_FRAGMENTATION=1, to keep memory that lives unequally long apart"
)


def stats_of(
    free_bytes: int, *, expandable: int, peak_bytes: int = 0, budget_bytes: int = 0
) -> dict[str, int]:
    return {
        "reserved_bytes.all.current": free_bytes + IN_USE_BYTES,
        "allocated_bytes.all.current": IN_USE_BYTES,
        "reserved_bytes.all.peak": free_bytes + IN_USE_BYTES,
        "allocated_bytes.all.peak": max(peak_bytes, IN_USE_BYTES),
        "expandable_segments": expandable,
        "budget_bytes": budget_bytes,
    }


@pytest.mark.promise("F14")
def test_advice_when_more_than_a_gib_lies_in_pieces_then_the_setting_is_named() -> None:
    for separates in (False, True):
        (advice,) = advise_layout(stats_of(FREE_BYTES, expandable=0), separates=separates)
        assert advice.startswith(
            "1.50 GiB are reserved but unallocated: set PYTORCH_ALLOC_CONF=expand"
        )
    assert advise_layout(stats_of(FREE_BYTES, expandable=1), separates=False) == [LIFETIMES]


@pytest.mark.parametrize(
    ("free_bytes", "expandable", "separates"),
    [(SCATTERED_BYTES, 0, False), (SCATTERED_BYTES, 1, False), (1 << 40, 1, True)],
)
def test_advice_when_little_is_free_or_lives_are_separate_then_none(
    free_bytes: int, expandable: int, separates: bool
) -> None:
    stats = stats_of(free_bytes, expandable=expandable)
    assert advise_layout(stats, separates=separates) == []


@pytest.mark.promise("F14")
def test_advice_when_between_steps_then_the_peaks_count() -> None:
    cached = stats_of(FREE_BYTES, expandable=1, peak_bytes=FREE_BYTES)
    assert advise_layout(cached, separates=False, at_peak=True) == []
    scattered = stats_of(FREE_BYTES, expandable=1)
    (advice,) = advise_layout(scattered, separates=False, at_peak=True)
    assert advice.startswith("1.50 GiB are reserved but unallocated at the peak: call swapkit.ins")


@pytest.mark.promise("F14")
@pytest.mark.parametrize("budget_bytes", [0, 2 * FREE_BYTES])
def test_advice_when_a_request_would_fit_in_one_piece_then_it_names_lifetimes(
    budget_bytes: int,
) -> None:
    stats = stats_of(FREE_BYTES, expandable=1, budget_bytes=budget_bytes)
    assert advise_here(stats, FREE_BYTES, separates=False) == [LIFETIMES]


def test_advice_when_a_request_is_larger_than_the_budget_then_pieces_are_not_the_reason() -> None:
    stats = stats_of(FREE_BYTES, expandable=1, budget_bytes=2 * FREE_BYTES)
    assert advise_here(stats, 2 * FREE_BYTES, separates=False) == []
