"""How many ranks a machine has, and the part of its memory that each may share out."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed

import swapkit
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.model import ranks
from swapkit._runtime.saved import device as saved_device
from swapkit._runtime.saved.device import LOCKED_SHARE, Device
from tests.support import MIB

if TYPE_CHECKING:
    from pathlib import Path

distributed: Any = torch.distributed
LAUNCHERS = (
    *("LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NODEID"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


class Group:
    """A process group, as torch's functions show it to one thread: its rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: list[str]) -> None:
        self._machines = machines
        self._here = threading.local()
        store = distributed.HashStore()
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_world_size", lambda: len(machines))
        monkeypatch.setattr(distributed, "get_rank", lambda: self._here.rank)
        monkeypatch.setattr(ranks, "default_store", lambda: store)
        monkeypatch.setattr(ranks, "_name_of_machine", lambda: self._machines[self._here.rank])

    def count(self, numbers: range) -> list[int]:
        """Have these ranks ask at the same time; return what each was told."""
        told: dict[int, int] = {}

        def ask(rank: int) -> None:
            self._here.rank = rank
            told[rank] = ranks._ask()

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [told[rank] for rank in numbers]


def test_ranks_when_no_launcher_says_then_counted_by_the_machines_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(monkeypatch, ["a", "b", "a", "a"])
    assert group.count(range(4)) == [3, 1, 3, 3]


def test_ranks_when_some_say_nothing_then_counted_as_of_this_machine_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_SECONDS", 0.05)
    group = Group(monkeypatch, ["a", "b", "b", "b"])
    assert group.count(range(1)) == [4]
    assert "3 have not said so" in caplog.text


def test_ranks_when_there_is_no_process_group_then_one() -> None:
    assert ranks.count_ranks() == 1
    assert ranks.count_node_ranks() == 1


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_shares_when_several_ranks_train_on_a_machine_then_their_sum_is_at_most_the_share(
    ranks: int, installation: Installation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone = swapkit.budget("80%", host_limit="50%", disk=tmp_path, disk_limit="30%")._config.limits
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    each = swapkit.budget("80%", host_limit="50%", disk=tmp_path, disk_limit="30%")._config.limits
    assert alone.host_bytes is not None
    assert each.host_bytes is not None
    for mine, whole in (
        (each.budget_bytes, alone.budget_bytes),
        (each.host_bytes, alone.host_bytes),
        (each.disk_bytes, alone.disk_bytes),
    ):
        assert whole - 2 * ranks <= ranks * mine <= whole
    swapkit.install("60%", device="cpu")
    assert ranks * installation.limit_bytes <= 0.6 * installation.total_bytes


@pytest.mark.usefixtures("installation")
def test_bytes_when_several_ranks_train_on_a_machine_then_each_rank_has_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    session = swapkit.budget("64MiB", host_limit="32MiB", disk=tmp_path, disk_limit="1GiB")
    limits = session._config.limits
    sizes = limits.budget_bytes, limits.host_bytes, limits.disk_bytes
    assert sizes == (64 * MIB, 32 * MIB, 1024 * MIB)


def test_share_when_the_device_is_an_accelerator_then_of_its_whole_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    its: Any = SimpleNamespace(
        total_bytes=80 * MIB, device=SimpleNamespace(name=torch.device("cuda", 3))
    )
    assert Installation.shared_bytes(its) == 80 * MIB
    its.device.name = torch.device("cpu")
    assert Installation.shared_bytes(its) == 10 * MIB


@pytest.fixture
def host_room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host memory of each scheduler that a GPU asks for."""
    asked: list[int] = []
    monkeypatch.setattr(
        saved_device, "Scheduler", lambda *_, host_limit_bytes, **__: asked.append(host_limit_bytes)
    )
    gpu: Any = SimpleNamespace(
        name=torch.device("cuda", 0),
        link=SimpleNamespace(),
        shared=SimpleNamespace(
            host_bytes=lambda: 1024 * MIB,
            host_node=lambda _: 0,
            shim=SimpleNamespace(drop_address=0),
        ),
    )
    Device.new_scheduler(gpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    Device.new_scheduler(gpu)
    return asked


def test_host_copies_of_a_gpu_when_nothing_is_asked_then_the_ranks_share_the_usual_room(
    host_room: list[int],
) -> None:
    assert host_room == [LOCKED_SHARE * 1024 * MIB, LOCKED_SHARE * 128 * MIB]
