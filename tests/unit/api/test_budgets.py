"""`budget` reads its arguments, refuses what it cannot do, and starts when it is entered."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import swapkit
from swapkit._runtime.control.plan_status import PlanStatus
from swapkit._runtime.session.session import Final
from swapkit.errors import DiskError, InvalidArgument, Unsupported
from swapkit.ir.codec import write_planned
from swapkit.ir.plans import Plan
from tests.support import MIB, limit_above_reserved
from tests.unit.ir.values import PLAN, TRACE

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace


class KeepAll:
    """A policy of one's own."""

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        return Plan(decisions=(), budget_bytes=machine.budget_bytes, signature=trace.signature)


def config_of(limit: float | str = "1GiB", **options: Any) -> SessionConfig:
    return swapkit.budget(limit, **options)._config


@pytest.mark.promise("E7")
@pytest.mark.parametrize(("limit", "share"), [("50%", 0.5), (0.25, 0.25), (1.0, 1.0)])
def test_limit_when_a_share_then_of_the_machines_memory(
    installation: Installation, limit: float | str, share: float
) -> None:
    total_bytes = installation.total_bytes
    assert config_of(limit).limits.budget_bytes == int(total_bytes * share)
    assert config_of("1GiB", host_limit=limit).limits.host_bytes == int(total_bytes * share)


@pytest.mark.usefixtures("installation")
def test_limits_when_bytes_are_given_then_they_are_taken() -> None:
    config = config_of("10GiB", host_limit=5 * 2**30, min_swap_bytes="1MiB")
    assert config.limits.budget_bytes == 10 * 2**30
    assert config.limits.host_bytes == 5 * 2**30
    assert config.min_swap_bytes == 2**20
    assert (
        config_of(min_swap_bytes=0).min_swap_bytes
        == config_of(min_swap_bytes="1Ki").min_swap_bytes
        == 1024
    )
    assert config_of("10G").limits.budget_bytes == 10**10


@pytest.mark.usefixtures("installation")
def test_options_when_left_out_then_the_documented_defaults() -> None:
    config = config_of()
    assert config.limits.host_bytes is None
    assert config.min_swap_bytes == 1024


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "magic"}, "policy='magic': expected 'auto', 'swap', 'recompute', 'rescue'"),
        ({"policy": object()}, "or an object with plan"),
        ({"plan": 5}, "plan=5: expected the path of a file that session.save_plan"),
        ({"plan": True}, "plan=True: expected the path of a file"),
        ({"plan": b"plan.json"}, "plan=b'plan.json': expected the path of a file"),
        ({"plan": swapkit.plan}, "plan=<function plan .*: expected the path of a file"),
        ({"plan": Plan}, "plan=<class .*Plan'>: expected the path of a file"),
        (
            {"plan": PLAN},
            r"plan=<Plan .*: the plan lacks its trace.* Pass the plan that swapkit.plan",
        ),
        ({"plan": ""}, "plan='': expected the path of a file"),
        ({"plan": "a\0b"}, "expected the path of a file"),
        ({"plan": "missing-file.json"}, "plan='missing-file.json': there is no such file in '/"),
        ({"plan": Path("/nowhere/x")}, "plan='/nowhere/x': there is no such file; expected"),
        ({"plan": "/tmp"}, "plan='/tmp': this is a folder; expected the path"),
        ({"plan": "x" * 300}, "it cannot be read: File name too long; expected the path"),
        ({"plan": "x", "policy": "rescue"}, "plan='x': policy='rescue' follows no plan. Omit"),
        ({"profile_steps": 0}, "profile_steps=0: expected a whole number of at least 1"),
        ({"search_steps": 1.5}, "search_steps=1.5: expected a whole number of at least 1"),
        ({"limit": "plenty"}, "limit='plenty' is not understood"),
        ({"limit": 0}, "limit=0 is less than one byte"),
        ({"limit": 10**400}, "limit=1000.* is more than any device has"),
        ({"host_limit": 10**5000}, "host_limit=.* is more than any device has"),
        ({"host_limit": "110%"}, "host_limit='110%': a share"),
        ({"min_swap_bytes": 1023}, "min_swap_bytes=1023: expected at least 1024"),
        ({"min_swap_bytes": "10%"}, "min_swap_bytes='10%': a share is not supported"),
        (
            {"disk": "/nonexistent/folder"},
            "disk='/nonexistent/folder': expected an existing folder",
        ),
        ({"disk_limit": "1GiB"}, "disk_limit='1GiB' needs disk=, a folder"),
        ({"disk": "/tmp", "disk_limit": "x"}, "disk_limit='x' is not understood"),
        ({"on_oom": "both"}, "on_oom='both': expected 'rank' or 'all'"),
        ({"on_oom": None}, "on_oom=None: expected 'rank' or 'all'"),
        ({"reshard": True}, "reshard=True: expected 'user' or 'auto'"),
        (
            {"reshard": "auto", "policy": "rescue"},
            "reshard='auto' compares plans, and policy='resc",
        ),
        ({"reshard": "auto", "policy": KeepAll()}, "expected one of 'auto', 'swap', 'recompute'"),
        ({"device": "toaster"}, "device='toaster'"),
        ({"model": "gpt"}, "model='gpt': expected a torch"),
        ({"optimizer": "sgd"}, "optimizer='sgd': expected a torch"),
    ],
)
def test_argument_when_wrong_then_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.budget(**{"limit": "1GiB", **options})


def test_failing_together_when_the_allocator_is_torchs_then_refused(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "tells_failures", False)
    with pytest.raises(Unsupported, match="on_oom='all' needs swapkit's pool"):
        config_of(on_oom="all")
    assert config_of().on_oom == "rank"


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
def test_saved_plan_when_the_policy_plans_then_taken(policy: str, tmp_path: Path) -> None:
    write_planned(tmp_path / "plan.json", TRACE, PLAN)
    config = config_of(policy=policy, plan=tmp_path / "plan.json")
    assert config.saved_plan == (TRACE, PLAN)
    assert config.policy == policy


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        (
            "{0}/none/x",
            DiskError,
            "path='{0}/none/x': the folder '{0}/none' does not exist; create",
        ),
        (
            "{0}/file/x",
            DiskError,
            "path='{0}/file/x': '{0}/file' is not a folder; pass another path",
        ),
        ("/", DiskError, "path='/': this is a folder; pass the path of a file in it"),
        ("{0}", DiskError, "path='{0}': this is a folder; pass the path of a file in it"),
        ("{0}/" + "x" * 300, DiskError, "cannot write it: File name too long; pass another"),
        ("", InvalidArgument, "path='': expected the path of the file to write"),
        ("a\0b", InvalidArgument, "expected the path of the file to write"),
        (None, InvalidArgument, "path=None: expected the path of the file to write"),
    ],
)
def test_plan_when_it_cannot_be_saved_then_the_path_asked_for_is_named(
    path: str | None, error: type[Exception], text: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    session = swapkit.budget("1GiB")
    status = PlanStatus(plan=PLAN, trace=TRACE)
    session._final = Final(stats=Mock(), status=status, timed=((), 0.0))
    with pytest.raises(error, match=re.escape(text.format(tmp_path))) as caught:
        session.save_plan(path if path is None else path.format(tmp_path))  # type: ignore[arg-type]
    assert ".part" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


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
    assert config.limits.disk == tmp_path
    assert config.limits.disk_bytes == 3 * 2**30
    assert config.limits.host_bytes == 2**30 // 8
    assert config_of("1MiB", disk=str(tmp_path)).limits.host_bytes == 64 * 2**20
    assert config_of("1GiB", disk=tmp_path, host_limit="5MiB").limits.host_bytes == 5 * 2**20
    total_bytes = shutil.disk_usage(tmp_path).total
    assert config_of(disk=tmp_path, disk_limit="50%").limits.disk_bytes == int(total_bytes * 0.5)
    assert config_of(disk=tmp_path).limits.disk_bytes == 0


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
