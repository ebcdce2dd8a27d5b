"""Estimates as text and as flat values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.reporting.estimates import Estimate, LargestBatch

SMALL = Estimate(
    plain_bytes=8,
    smallest_budget_bytes=4,
    floor_bytes=2,
    state_bytes=1,
    gradient_bytes=1,
    optimizer_bytes=0,
    step_seconds=0.5,
)


@pytest.mark.parametrize(("is_capped", "shown"), [(True, "2048 or more  "), (False, "2048  ")])
def test_estimate_when_larger_batches_were_not_considered_then_said(
    is_capped: bool, shown: str
) -> None:
    largest = LargestBatch(budget_bytes=6, batch_size=2048, is_capped=is_capped)
    found = replace(SMALL, largest_batches=(largest,))
    assert shown in str(found)
    assert found.to_dict()["largest_batches_0_is_capped"] is is_capped


def test_estimate_when_a_budget_is_too_small_then_marked_in_the_flat_values() -> None:
    values = replace(SMALL, budgets=(3, 4)).to_dict()
    assert (values["budgets_0_fits"], values["budgets_1_fits"]) == (False, True)
