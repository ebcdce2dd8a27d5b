"""Running out of memory with very many tensors alive: an error with its whole text."""

from __future__ import annotations

import pytest

from tests.support import run_python

PROGRAM = """
    import torch
    import swapkit

    swapkit.install()
    with swapkit.budget("256MiB"):
        tensors = [torch.empty(256) for _ in range({count})]
        try:
            torch.empty(300 << 20, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            print(error)
"""


@pytest.mark.parametrize("count", [20_000, 60_000])
@pytest.mark.parametrize(
    "allocator",
    # What was freed is overwritten, or is gone at once: whoever reads it is found out.
    [{"MALLOC_PERTURB_": "165"}, {"MALLOC_MMAP_THRESHOLD_": "65536"}],
    ids=["overwritten", "unmapped"],
)
def test_allocation_when_it_fails_beside_many_tensors_then_the_text_counts_them(
    count: int, allocator: dict[str, str]
) -> None:
    text = run_python(PROGRAM.format(count=count), timeout_s=60, **allocator)
    assert "300.00 MiB (314572800 bytes) requested" in text
    assert f"({count})" in text
