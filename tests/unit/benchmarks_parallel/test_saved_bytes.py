"""What the benchmark of several ranks counts as saved."""

from __future__ import annotations

import torch

from benchmarks._parallel_parts import SavedBytes

NUMBERS = 1 << 10
NBYTES = 4 * NUMBERS


def test_storages_when_the_step_ends_then_those_that_only_the_graph_held_count() -> None:
    weight = torch.nn.Parameter(torch.ones(NUMBERS))
    received = torch.ones(NUMBERS, requires_grad=True)  # as a stage of a pipeline keeps it
    saved = SavedBytes()
    with saved:
        (received * weight).exp().sum().backward()
    assert saved.drop() == NBYTES  # the result of `exp`
    assert saved.drop() == 0


def test_storages_when_they_are_small_then_they_do_not_count() -> None:
    saved = SavedBytes()
    with saved:
        torch.ones(8, requires_grad=True).exp().sum().backward()
    assert saved.drop() == 0
