"""`budget` reads its arguments, refuses what it cannot do, and starts when it is entered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from swapkit._runtime.installation import Installation
    from swapkit._runtime.session import SessionConfig


def config_of(limit: float | str = "1GiB", **options: Any) -> SessionConfig:
    return swapkit.budget(limit, **options)._config


@pytest.mark.promise("E7")
@pytest.mark.parametrize(("limit", "share"), [("50%", 0.5), (0.25, 0.25), (1.0, 1.0)])
def test_limit_when_a_share_then_of_the_machines_memory(
    installation: Installation, limit: float | str, share: float
) -> None:
    total_bytes = installation.backend.memory_info().total_bytes
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
@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
def test_policy_when_it_needs_a_planner_then_unsupported(policy: str) -> None:
    with pytest.raises(Unsupported, match=f"policy='{policy}' needs the planner"):
        swapkit.budget("1GiB", policy=policy)


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "magic"}, "policy='magic': expected one of rescue"),
        ({"limit": "plenty"}, "limit='plenty' is not understood"),
        ({"limit": 0}, "limit=0 is less than one byte"),
        ({"host_limit": "110%"}, "host_limit='110%': a share"),
        ({"min_swap_bytes": 1023}, "min_swap_bytes=1023: the least possible is 1024"),
        ({"min_swap_bytes": "10%"}, "min_swap_bytes='10%': a share is not possible"),
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
