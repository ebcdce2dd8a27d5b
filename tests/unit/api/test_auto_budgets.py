"""`budget("auto")`: what is free, with what the pool has, less the reserve, for each process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._runtime.allocators import limits
from swapkit._runtime.allocators.limits import HOST_RESERVE_BYTES, HOST_RESERVE_SHARE
from swapkit.errors import InvalidArgument
from swapkit.units import MIB

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation

GIB = 1 << 30


@pytest.fixture
def reserve_bytes(installation: Installation) -> int:
    return max(HOST_RESERVE_BYTES, int(HOST_RESERVE_SHARE * installation.total_bytes))


def set_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(limits, "host_available_bytes", lambda: nbytes)


def reserved(installation: Installation) -> int:
    return installation.pool.stats()["reserved_bytes.all.current"]


def test_budget_when_auto_then_free_and_reserved_memory_less_the_reserve_and_logged(
    installation: Installation,
    reserve_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_free(monkeypatch, 3 * GIB + reserve_bytes)
    held = torch.ones(8 * MIB)
    with caplog.at_level(logging.INFO, logger="swapkit"), swapkit.budget("auto") as session:
        assert session.limit_bytes == 3 * GIB + reserved(installation)
        assert session.stats.budget_bytes == session.limit_bytes
    assert reserved(installation) >= held.nbytes
    (line,) = [each for each in caplog.messages if "budget 'auto'" in each]
    assert "free on cpu, less a reserve of" in line
    assert "shared by" not in line


def test_budget_when_auto_and_processes_share_the_machine_then_equal_parts(
    installation: Installation,
    reserve_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_free(monkeypatch, 3 * GIB + reserve_bytes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with caplog.at_level(logging.INFO, logger="swapkit"):
        assert swapkit.budget("auto").limit_bytes == GIB + reserved(installation)
    assert "shared by 3 processes" in caplog.text


def test_budget_when_auto_and_nothing_is_left_then_refused_with_the_sum(
    installation: Installation, reserve_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.pool.trim()
    set_free(monkeypatch, reserve_bytes - reserved(installation) - 1)
    with pytest.raises(InvalidArgument, match=r"limit='auto': nothing is left \(.* free on cpu"):
        swapkit.budget("auto")


@pytest.mark.usefixtures("installation")
def test_budget_when_auto_inside_another_session_then_the_tightest_holds() -> None:
    with swapkit.budget("1GiB"), swapkit.budget("auto") as inner:
        assert swapkit.memory_stats()["budget_bytes"] == min(GIB, inner.limit_bytes)
