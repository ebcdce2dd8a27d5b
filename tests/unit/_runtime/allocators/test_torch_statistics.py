"""Torch's functions that tell of CUDA memory, answered from a pool, against what torch does.

What torch's C functions raise and return was recorded: see `tests/cuda/record.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.pool import Pool
from swapkit._runtime.allocators.torch_allocator import nest_stats, repair_statistics
from swapkit._runtime.torch_compat.accelerators import CUDA
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORDED: dict[str, dict[str, Any]] = json.loads(
    next((Path(__file__).parents[3] / "cuda" / "recorded").glob("*.json")).read_text()
)


def stand_in(fact: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that does what torch's did."""

    def call(*_: object) -> Any:
        if "raises" in fact:
            raise RuntimeError(fact["raises"])
        return fact["returns"]

    return call


class FakeInstallation:
    """A pool of the size that torch would find on a GPU."""

    limit_bytes = 0
    total_bytes = 256 * MIB

    def __init__(self, pool: Pool) -> None:
        self.pool = pool


@pytest.fixture
def unrepaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this torch be one for CUDA, whose allocator is not its own."""
    for name, fact in RECORDED["pluggable"].items():
        monkeypatch.setattr(torch._C, name, stand_in(fact), raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def installation(unrepaired: None) -> Iterator[FakeInstallation]:  # noqa: ARG001 - it comes first
    """Repair what was recorded."""
    backend = Backend.cpu(capacity_bytes=FakeInstallation.total_bytes)
    with Pool(backend) as pool:
        installation = FakeInstallation(pool)
        repair_statistics(CUDA, {0: installation})  # type: ignore[dict-item]
        yield installation
        pool.trim()


ASKING: dict[str, Callable[[], object]] = {
    "memory_allocated": lambda: torch.cuda.memory_allocated(0),
    "max_memory_allocated": lambda: torch.cuda.max_memory_allocated(0),
    "memory_reserved": lambda: torch.cuda.memory_reserved(0),
    "memory_stats": lambda: torch.cuda.memory_stats(0),
    "memory_summary": lambda: torch.cuda.memory_summary(0),
    "memory_snapshot": torch.cuda.memory_snapshot,
    "reset_peak": lambda: torch.cuda.reset_peak_memory_stats(0),
    "reset_accumulated": lambda: torch.cuda.reset_accumulated_memory_stats(0),
    "fraction": lambda: torch.cuda.get_per_process_memory_fraction(0),
}


@pytest.mark.usefixtures("unrepaired")
@pytest.mark.parametrize("name", ASKING)
def test_torch_when_nothing_is_repaired_then_it_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match="does not yet support"):
        ASKING[name]()


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("name", ASKING)
def test_torch_when_repaired_then_it_answers(name: str) -> None:
    ASKING[name]()


def test_names_when_nested_then_those_of_torch(installation: FakeInstallation) -> None:
    def names(value: Any) -> Any:
        return {k: names(v) for k, v in value.items()} if isinstance(value, dict) else None

    for function in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
        native = names(RECORDED["native"][function]["returns"])
        ours = names(nest_stats(installation.pool.stats()))
        assert native.items() <= ours.items()


def test_statistics_when_asked_of_torch_then_those_of_the_pool(
    installation: FakeInstallation,
) -> None:
    pool = installation.pool
    first, second = pool.take(3 * MIB), pool.take(1000)
    assert torch.cuda.memory_allocated(0) == 3 * MIB + 1024
    assert torch.cuda.memory_stats(0)["requested_bytes.all.current"] == 3 * MIB + 1000
    pool.give(first)
    assert torch.cuda.max_memory_allocated(0) == 3 * MIB + 1024
    torch.cuda.reset_peak_memory_stats(0)
    assert torch.cuda.max_memory_allocated(0) == 1024
    assert torch.cuda.memory_reserved(0) == pool.stats()["reserved_bytes.all.current"]
    torch.cuda.reset_accumulated_memory_stats(0)
    stats = torch.cuda.memory_stats(0)
    assert stats["allocated_bytes.all.allocated"] == stats["allocation.all.freed"] == 0
    pool.give(second)
    assert torch.cuda.memory_stats(0)["allocation.all.freed"] == 1


def test_snapshot_when_taken_then_every_segment_and_block_as_torch_has_them(
    installation: FakeInstallation,
) -> None:
    pool = installation.pool
    held = [pool.take(nbytes) for nbytes in (1000, 3 * MIB, 5000)]
    pool.give(held.pop())
    segments = torch.cuda.memory_snapshot()
    native = RECORDED["native"]["_cuda_memorySnapshot"]["returns"]["segments"][0]
    for segment in segments:
        assert native.keys() <= segment.keys()
        assert native["blocks"][0].keys() <= segment["blocks"][0].keys()
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert {segment["segment_type"] for segment in segments} == {"small", "large"}
    in_use = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    assert sorted(block["address"] for block in in_use) == sorted(held)
    assert sum(segment["requested_size"] for segment in segments) == 1000 + 3 * MIB
    for address in held:
        pool.give(address)


@pytest.mark.parametrize(("limit_bytes", "fraction"), [(0, 1.0), (64 * MIB, 0.25)])
def test_fraction_when_asked_then_the_limits_share(
    installation: FakeInstallation, limit_bytes: int, fraction: float
) -> None:
    installation.limit_bytes = limit_bytes
    assert torch.cuda.get_per_process_memory_fraction(0) == fraction


def test_gpu_when_it_is_not_in_use_then_nothing_is_told_of_it(
    installation: FakeInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    address = installation.pool.take(1000)
    assert torch.cuda.memory_allocated(1) == torch.cuda.memory_stats(1)["num_ooms"] == 0
    assert torch.cuda.get_per_process_memory_fraction(1) == 1.0
    torch.cuda.reset_peak_memory_stats(1)
    torch.cuda.reset_accumulated_memory_stats(1)
    assert {segment["device"] for segment in torch.cuda.memory_snapshot()} == {0}
    installation.pool.give(address)
