"""What to try, by how the pool's memory lies."""

from __future__ import annotations

import pytest

from swapkit._runtime.allocators.advice import SCATTERED_BYTES, advise_layout


def stats_of(free_bytes: int, *, expandable: int) -> dict[str, int]:
    return {
        "reserved_bytes.all.current": free_bytes + 100,
        "allocated_bytes.all.current": 100,
        "expandable_segments": expandable,
    }


@pytest.mark.promise("F14")
def test_advice_when_more_than_a_gib_lies_in_pieces_then_the_setting_is_named() -> None:
    (advice,) = advise_layout(stats_of(SCATTERED_BYTES + (1 << 29), expandable=0))
    assert advice.startswith("1.50 GiB are reserved but unallocated: set PYTORCH_ALLOC_CONF=expand")


@pytest.mark.parametrize(("free_bytes", "expandable"), [(SCATTERED_BYTES, 0), (1 << 40, 1)])
def test_advice_when_little_is_free_or_it_serves_anything_then_none(
    free_bytes: int, expandable: int
) -> None:
    assert advise_layout(stats_of(free_bytes, expandable=expandable)) == []
