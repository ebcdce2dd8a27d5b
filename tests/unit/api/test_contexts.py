"""`budget` reads its arguments, refuses what it cannot do, and starts when it is entered."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument, Unsupported
from tests.support import MIB, limit_above_reserved

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.installation import Installation
    from swapkit._runtime.session import SessionConfig


def config_of(limit: float | str = "1GiB", **options: Any) -> SessionConfig:
    return swapkit.budget(limit, **options)._config


@pytest.mark.promise("E7")
@pytest.mark.parametrize(("limit", "share"), [("50%", 0.5), (0.25, 0.25), (1.0, 1.0)])
def test_limit_when_a_share_then_of_the_machines_memory(
    installation: Installation, limit: float | str, share: float
) -> None:
    total_bytes = installation.total_bytes
    assert config_of(limit).limit_bytes == int(total_bytes * share)
    assert config_of("1GiB", host_limit=limit).host_limit_bytes == int(total_bytes * share)


@pytest.mark.usefixtures("installation")
def test_limits_when_bytes_are_given_then_they_are_taken() -> None:
    config = config_of("10GiB", host_limit=5 * 2**30, min_swap_bytes="1MiB")
    assert config.limit_bytes == 10 * 2**30
    assert config.host_limit_bytes == 5 * 2**30
    assert config.min_swap_bytes == 2**20


@pytest.mark.usefixtures("installation")
def test_options_when_left_out_then_the_documented_defaults() -> None:
    config = config_of()
    assert config.host_limit_bytes == 0
    assert config.min_swap_bytes == 1024


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "magic"}, "policy='magic': expected one of auto, swap, recompute, rescue"),
        ({"policy": object()}, "or an object with plan"),
        ({"profile_steps": 0}, "profile_steps=0: expected a whole number of at least 1"),
        ({"search_steps": 1.5}, "search_steps=1.5: expected a whole number of at least 1"),
        ({"limit": "plenty"}, "limit='plenty' is not understood"),
        ({"limit": 0}, "limit=0 is less than one byte"),
        ({"host_limit": "110%"}, "host_limit='110%': a share"),
        ({"min_swap_bytes": 1023}, "min_swap_bytes=1023: the least possible is 1024"),
        ({"min_swap_bytes": "10%"}, "min_swap_bytes='10%': a share is not possible"),
        ({"disk": "/nonexistent/folder"}, "disk='/nonexistent/folder': there is no such folder"),
        ({"disk_limit": "1GiB"}, "disk_limit='1GiB' needs disk=, a folder"),
        ({"disk": "/tmp", "disk_limit": "x"}, "disk_limit='x' is not understood"),
        ({"device": "toaster"}, "device='toaster'"),
        ({"model": "gpt"}, "model='gpt': expected a torch"),
        ({"optimizer": "sgd"}, "optimizer='sgd': expected a torch"),
    ],
)
def test_argument_when_wrong_then_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.budget(**{"limit": "1GiB", **options})


@pytest.mark.usefixtures("installation")
def test_device_when_not_the_cpu_then_unsupported() -> None:
    with pytest.raises(Unsupported, match="'cuda:0'"):
        swapkit.budget("1GiB", device=torch.device("cuda:0"))
    assert config_of(device="cpu") == config_of(device=None) == config_of()


def test_session_when_not_entered_then_nothing_has_changed(installation: Installation) -> None:
    swapkit.budget("1GiB")
    assert installation.sessions == []
    assert installation.pool.budget_bytes == 0


def test_budget_when_not_installed_then_it_installs(installation: Installation) -> None:
    swapkit.uninstall()
    with swapkit.budget(1 << 40):
        assert installation.active
        assert installation.pool.owns(torch.ones(1024).data_ptr())


@pytest.mark.usefixtures("installation")
def test_disk_when_given_then_folder_limits_and_a_small_host_share(tmp_path: Path) -> None:
    config = config_of("1GiB", disk=tmp_path, disk_limit="3GiB")
    assert config.disk == tmp_path
    assert config.disk_limit_bytes == 3 * 2**30
    assert config.host_limit_bytes == 2**30 // 8
    assert config_of("1MiB", disk=str(tmp_path)).host_limit_bytes == 64 * 2**20
    assert config_of("1GiB", disk=tmp_path, host_limit="5MiB").host_limit_bytes == 5 * 2**20
    total_bytes = shutil.disk_usage(tmp_path).total
    assert config_of(disk=tmp_path, disk_limit="50%").disk_limit_bytes == int(total_bytes * 0.5)
    assert config_of(disk=tmp_path).disk_limit_bytes == 0


@pytest.mark.promise("A3")
def test_disk_when_the_host_limit_is_small_then_the_rest_goes_there_and_comes_back(
    installation: Installation, tmp_path: Path
) -> None:
    limit_bytes = limit_above_reserved(installation, 24 * MIB)

    def losses(count: int) -> torch.Tensor:
        x = torch.linspace(0, 1, MIB, requires_grad=True)
        torch.cat([(x * n).exp().sum().view(1) for n in range(1, count)]).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = losses(8)
    with swapkit.budget(limit_bytes, disk=tmp_path, host_limit="12MiB") as session:
        assert torch.equal(losses(8), expected)
    assert session.stats.disk_peak_bytes > 0
    assert session.stats.host_peak_bytes <= 12 * MIB
    assert session.stats.peak_bytes <= limit_bytes
    assert list(tmp_path.iterdir()) == []


def test_disk_when_everything_is_full_then_out_of_memory_and_training_goes_on(
    installation: Installation, tmp_path: Path
) -> None:
    limit_bytes = limit_above_reserved(installation, 24 * MIB)
    options: Any = {"disk": tmp_path, "host_limit": "4MiB", "disk_limit": "4MiB"}

    def run(count: int) -> None:
        x = torch.ones(MIB, requires_grad=True)
        torch.cat([(x * n).exp().sum().view(1) for n in range(count)]).sum().backward()

    with swapkit.budget(limit_bytes, **options) as session:
        with pytest.raises(torch.OutOfMemoryError, match="host_limit"):
            run(12)
        run(2)
    assert session.stats.disk_peak_bytes <= 4 * MIB
