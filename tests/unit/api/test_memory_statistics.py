"""The statistics have torch's keys, follow the pool, and need it to be installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit.errors import SessionError
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation

# Of torch.cuda.memory_stats(), as its documentation lists them.
TORCH_NAMES = (
    "allocated",
    "reserved",
    "active",
    "inactive_split",
)
TORCH_POOLS = ("all", "large_pool", "small_pool")
TORCH_FIELDS = ("current", "peak", "allocated", "freed")


@pytest.mark.usefixtures("installation")
def test_stats_when_asked_then_torchs_keys_are_there() -> None:
    stats = swapkit.memory_stats()
    wanted = {
        f"{name}_bytes.{pool}.{field}"
        for name in TORCH_NAMES
        for pool in TORCH_POOLS
        for field in TORCH_FIELDS
    }
    wanted |= {
        f"{name}.all.{field}"
        for name in ("allocation", "segment", "active", "inactive_split")
        for field in TORCH_FIELDS
    }
    wanted |= {"num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"}
    assert wanted <= stats.keys()
    assert all(type(value) is int for value in stats.values())


@pytest.mark.usefixtures("installation")
def test_stats_when_a_tensor_is_made_and_freed_then_they_follow() -> None:
    before = swapkit.memory_stats()
    tensor = torch.ones(MIB)
    during = swapkit.memory_stats()
    del tensor
    after = swapkit.memory_stats()
    name = "allocated_bytes.all"
    assert during[f"{name}.current"] - before[f"{name}.current"] == 4 * MIB
    assert after[f"{name}.current"] == before[f"{name}.current"]
    assert after[f"{name}.freed"] - before[f"{name}.freed"] == 4 * MIB
    assert during["requested_bytes.large_pool.allocated"] > 0


@pytest.mark.usefixtures("installation")
def test_peak_when_reset_then_it_is_the_current_value() -> None:
    torch.ones(8 * MIB)
    swapkit.reset_peak_memory_stats()
    stats = swapkit.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.current"]
    torch.ones(MIB)
    stats = swapkit.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.current"] + 4 * MIB


@pytest.mark.usefixtures("installation")
def test_peak_when_reset_inside_a_session_then_the_sessions_own_stays() -> None:
    with swapkit.budget(1 << 40) as session:
        torch.ones(16 * MIB)
        swapkit.reset_peak_memory_stats()
    assert session.stats.peak_bytes >= 64 * MIB


@pytest.mark.usefixtures("installation")
def test_summary_when_asked_then_it_is_the_table_of_the_stats() -> None:
    with swapkit.budget(1 << 40):
        summary = swapkit.memory_summary()
    assert summary.startswith("swapkit memory, device cpu\n")
    assert "\nreserved " in summary
    assert "budget 1.00 TiB;" in summary


@pytest.mark.parametrize(
    "ask", [swapkit.memory_stats, swapkit.memory_summary, swapkit.reset_peak_memory_stats]
)
def test_stats_when_not_installed_then_the_error_says_what_to_do(
    installation: Installation, ask: Callable[[], object]
) -> None:
    swapkit.uninstall()
    assert not installation.active
    with pytest.raises(SessionError, match=r"call swapkit\.install\(\) first"):
        ask()
