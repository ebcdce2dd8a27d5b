"""Sizes of blocks and segments, by the rules of torch's allocator."""

from __future__ import annotations

import pytest

from swapkit.simulation.allocators.rounding import MIB, round_request, segment_bytes


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)],
)
def test_request_when_rounded_then_to_512_bytes(nbytes: int, expected: int) -> None:
    assert round_request(nbytes) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segment_when_made_then_2_or_20_mib_or_whole_2_mib(nbytes: int, expected: int) -> None:
    assert segment_bytes(nbytes) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (1200, 1280),  # torch's own example: 1024, 1280, 1536, 1792
        (1280, 1280),
        (1024, 1024),
        (1793, 2048),
        (9 * MIB, 10 * MIB),
    ],
)
def test_request_when_powers_are_divided_by_4_then_to_the_next_part(
    nbytes: int, expected: int
) -> None:
    divided = round_request(nbytes, (4,) * 16)
    if nbytes <= 4 * 512:  # too small to divide: whole 512 bytes
        assert divided == round_request(nbytes)
    else:
        assert divided == expected


def test_divisions_when_they_differ_then_chosen_by_size() -> None:
    divisions = (0, 8, 1, *(4,) * 12, 2)
    assert round_request(MIB + 1, divisions) == MIB + 512  # from 1 MiB: none
    assert round_request(2 * MIB + 1, divisions) == 2 * MIB + MIB // 4  # from 2 MiB: 8
    assert round_request(4 * MIB + 1, divisions) == 4 * MIB + 512  # from 4 MiB: 1 is none
    assert round_request((40 << 30) + 1, divisions) == 48 << 30  # from 32 GiB: 2
    assert round_request((65 << 30) + 1, divisions) == 96 << 30  # beyond the last
    assert round_request(8 * MIB + 1, (0, 8)) == 8 * MIB + 512  # missing
