"""The run without swapkit counts the bytes of all its tensors."""

from __future__ import annotations

import torch

from swapkit.demo.plain_allocator import PlainAllocator

MIB = 1 << 20


def test_peak_when_tensors_overlap_then_their_sum() -> None:
    allocator = PlainAllocator()
    first = torch.empty(3 * MIB, dtype=torch.uint8)
    with allocator.watched_step():
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first
    with allocator.watched_step():
        third = torch.empty(MIB, dtype=torch.uint8)
        del second
    del third
    assert 5 * MIB <= allocator.peak_bytes < 5 * MIB + 4096
    levels = [nbytes // MIB for _, nbytes in allocator.series()]
    assert levels == [3, 1]
    allocator.close()
