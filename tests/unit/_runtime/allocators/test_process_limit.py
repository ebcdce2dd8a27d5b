"""Limits of a process, resolved for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._runtime.allocators.limits import ProcessLimit
from swapkit.errors import InvalidArgument
from tests.support import MIB, limit_above_reserved

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation

TOTAL = 1000 * MIB


@pytest.mark.promise("F15")
@pytest.mark.parametrize(
    ("limit", "reserve", "usual", "expected"),
    [
        (None, None, 0, 0),
        (None, None, 500 * MIB, 500 * MIB),
        ("80%", None, 500 * MIB, 800 * MIB),
        (None, "100MiB", 0, 900 * MIB),
        (None, "10%", 0, 900 * MIB),
        (None, 100 * MIB, 950 * MIB, 900 * MIB),
        (None, 100 * MIB, 500 * MIB, 500 * MIB),
        ("80%", "300MiB", 0, 700 * MIB),
        ("80%", "100MiB", 0, 800 * MIB),
        ("80%", 0, 0, 800 * MIB),
    ],
)
def test_limit_when_resolved_then_it_leaves_the_reserve(
    limit: str | None, reserve: int | str | None, usual: int, expected: int
) -> None:
    asked = ProcessLimit(limit=limit, reserve=reserve)
    asked.check()
    assert asked.resolve(lambda: TOTAL, usual) == expected


@pytest.mark.parametrize("reserve", [TOTAL, "100%", "2GiB"])
def test_limit_when_the_reserve_leaves_nothing_then_it_is_refused(reserve: int | str) -> None:
    with pytest.raises(InvalidArgument, match=r"reserve=.*: expected less than"):
        ProcessLimit(reserve=reserve).resolve(lambda: TOTAL, 0)


@pytest.mark.parametrize(
    ("limit", "reserve", "name"), [("much", None, "limit"), (None, "much", "reserve")]
)
def test_limit_when_an_amount_is_wrong_then_it_is_named(
    limit: str | None, reserve: str | None, name: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}='much'"):
        ProcessLimit(limit=limit, reserve=reserve).check()


@pytest.mark.promise("F15")
def test_install_when_memory_is_reserved_for_other_code_then_the_pool_leaves_it(
    installation: Installation,
) -> None:
    total = installation.total_bytes
    swapkit.install(device="cpu", reserve=total - limit_above_reserved(installation, 8 * MIB))
    torch.empty(4 * MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match="budget"):
        torch.empty(16 * MIB, dtype=torch.uint8)
    swapkit.install(device="cpu")
    torch.empty(16 * MIB, dtype=torch.uint8)
