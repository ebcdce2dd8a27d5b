"""States that are DTensors: their shards move, the DTensors stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from swapkit._runtime.optimizer.chunked_step import attach, report_places
from swapkit._runtime.torch_compat.internals import get_shard, set_shard
from tests.support.offloading import (
    STATE,
    Recorder,
    are_equal,
    is_on_device,
    make_params,
    take_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

distributed: Any = torch.distributed


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def executor(installation: Installation) -> Recorder:
    return Recorder(installation)


def make_sharded(steps: int = 1, **options: Any) -> torch.optim.AdamW:
    mesh = init_device_mesh("cpu", (1,))
    params = [
        torch.nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)]))
        for each in make_params()
    ]
    optimizer = torch.optim.AdamW(params, lr=0.01, **options)
    step(optimizer, steps)
    return optimizer


def step(optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    params = optimizer.param_groups[0]["params"]
    plain = torch.optim.SGD([torch.nn.Parameter(each.to_local().detach()) for each in params], 0.0)
    for _ in range(steps):
        take_steps(plain)  # for its gradients
        for param, other in zip(params, plain.param_groups[0]["params"], strict=True):
            param.grad = DTensor.from_local(other.grad, param.device_mesh, [Shard(0)])
        optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[DTensor]:
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def shards(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    return [each.to_local().detach() for each in [*params, *moments(optimizer)]]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_step_when_states_are_dtensors_then_their_shards_are_on_the_host_with_the_same_bits(
    installation: Installation, executor: Recorder, options: dict[str, Any]
) -> None:
    optimizer, plain = make_sharded(0, **options), make_sharded(0, **options)
    states = attach(optimizer, executor)
    for each in (optimizer, plain):
        step(each, 3)
    assert states.hosted_bytes == 8 * STATE
    assert not any(is_on_device(installation, get_shard(each)) for each in moments(optimizer))
    assert are_equal(shards(optimizer), shards(plain))


def test_dtensor_when_its_shard_travels_then_it_is_the_same_object_with_its_placements(
    executor: Recorder,
) -> None:
    optimizer = make_sharded()
    before = [id(each) for each in moments(optimizer)]
    attach(optimizer, executor)
    step(optimizer, 2)
    assert [id(each) for each in moments(optimizer)] == before
    for each in moments(optimizer):
        assert each.placements == (Shard(0),)
        assert each.full_tensor().shape == each.shape == get_shard(each).shape


@pytest.mark.parametrize("what", ["DTensor", "shard"])
def test_dtensor_when_somebody_keeps_it_then_it_stays_on_the_device(
    installation: Installation, executor: Recorder, what: str
) -> None:
    optimizer = make_sharded()
    whole = moments(optimizer)[0]
    kept: Any = whole if what == "DTensor" else get_shard(whole)
    del whole
    attach(optimizer, executor)
    step(optimizer)
    assert is_on_device(installation, get_shard(moments(optimizer)[0]))
    assert kept is (
        moments(optimizer)[0] if what == "DTensor" else get_shard(moments(optimizer)[0])
    )
    del kept
    step(optimizer)
    assert not is_on_device(installation, get_shard(moments(optimizer)[0]))


def test_dtensor_when_it_is_replaced_between_steps_then_the_step_uses_the_new_one(
    installation: Installation, executor: Recorder
) -> None:
    optimizer, plain = make_sharded(), make_sharded()
    attach(optimizer, executor)
    for each in (optimizer, plain):
        first = next(iter(each.state.values()))
        first["exp_avg"] = torch.ones_like(first["exp_avg"])
        step(each)
    assert are_equal(shards(optimizer), shards(plain))
    assert not is_on_device(installation, get_shard(moments(optimizer)[0]))


def test_detach_when_shards_are_on_the_host_then_they_are_back(
    installation: Installation, executor: Recorder
) -> None:
    optimizer = make_sharded()
    attach(optimizer, executor).detach()
    assert all(is_on_device(installation, get_shard(each)) for each in moments(optimizer))


def test_state_dict_when_a_dtensor_reports_another_device_then_another_reports_its_own() -> None:
    optimizer = make_sharded()
    mesh = init_device_mesh("cpu", (1,))
    # As with a shard on the host in the mesh of an accelerator.
    elsewhere = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)])
    shard = torch.ones(2, 3)
    set_shard(elsewhere, shard)
    state = next(iter(optimizer.state.values()))
    others = dict(state)
    state["exp_avg"] = elsewhere
    shown = report_places(optimizer, {"state": {0: state}, "param_groups": []})["state"][0]
    assert elsewhere.device.type == "meta"
    assert shown["exp_avg"].device.type == "cpu"
    assert get_shard(shown["exp_avg"]) is shard
    assert (shown["exp_avg"].placements, shown["exp_avg"].device_mesh) == ((Shard(0),), mesh)
    assert state["exp_avg"] is elsewhere
    assert shown["exp_avg_sq"] is others["exp_avg_sq"]


def test_state_dict_when_dtensors_report_their_devices_then_it_is_the_plain_one(
    executor: Recorder,
) -> None:
    optimizer = make_sharded()
    attach(optimizer, executor)
    states = optimizer.state_dict()["state"]
    assert states[0] is next(iter(optimizer.state.values()))
