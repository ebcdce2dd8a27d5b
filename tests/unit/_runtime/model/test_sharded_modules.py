"""Which modules of FSDP2 have a setting that a session may change, and how it changes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed
import torch.testing._internal.distributed.fake_pg  # knows the backend "fake"
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swapkit._runtime.model.sharded_modules import find_sharded
from swapkit._runtime.torch_compat.internals import fsdp_groups_of

if TYPE_CHECKING:
    from collections.abc import Iterator

distributed: Any = torch.distributed
RANKS = 4


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    distributed.init_process_group("fake", store=distributed.HashStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


def make(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(count)])


def paths(model: nn.Module | None) -> list[tuple[str, ...]]:
    return [each.paths for each in find_sharded(model)]


def frees(module: Any) -> list[bool]:
    groups = fsdp_groups_of(module._get_fsdp_state())
    return [group.post_forward_mesh_info is not None for group in groups]


def test_modules_when_the_outermost_is_sharded_too_then_fsdp_itself_decides_for_that_one() -> None:
    model = make()
    for layer in model:
        fully_shard(layer)
    assert paths(model) == []  # each is the outermost one
    fully_shard(model)
    assert paths(model) == [("0",), ("1",), ("2",)]
    assert [each.frees for each in find_sharded(model)] == [True] * 3


def test_modules_when_one_is_sharded_to_fewer_ranks_then_it_stays_as_it_is() -> None:
    model = make()
    for layer, setting in zip(model, (True, 2, False), strict=True):
        fully_shard(layer, reshard_after_forward=setting)
    fully_shard(model)
    assert [(each.paths, each.frees) for each in find_sharded(model)] == [
        (("0",), True), (("2",), False)
    ]  # fmt: skip


def test_modules_when_shards_are_replicated_then_they_stay_as_they_are() -> None:
    model = make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert paths(model) == []


def test_modules_when_backward_does_not_gather_then_they_stay_as_they_are() -> None:
    model = make()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[1].set_unshard_in_backward(False)  # type: ignore[operator, unused-ignore]
    assert paths(model) == [("0",), ("2",)]


def test_modules_when_several_are_sharded_together_then_they_are_one() -> None:
    model = make()
    fully_shard([model[0], model[1]])
    fully_shard(model)
    assert paths(model) == [("0", "1")]


def test_modules_when_a_session_has_taken_them_then_another_one_finds_none() -> None:
    model = make()
    fully_shard(model[1])
    fully_shard(model)
    (found,) = find_sharded(model)
    found.take()
    assert paths(model) == []
    found.give()
    assert paths(model) == [("1",)]


def test_modules_when_nothing_is_sharded_then_there_are_none() -> None:
    assert paths(make()) == []
    assert paths(None) == []


@pytest.mark.parametrize("setting", [True, False])
def test_setting_when_changed_and_restored_then_it_is_the_users(*, setting: bool) -> None:
    model = make()
    fully_shard(model[0], reshard_after_forward=setting)
    fully_shard(model)
    (found,) = find_sharded(model)
    found.set(frees=not setting)
    assert frees(model[0]) == [not setting]
    assert frees(model) == [True]  # not touched, as not yet called
    found.restore()
    found.restore()
    assert frees(model[0]) == [setting]


def test_setting_when_the_user_changes_it_meanwhile_then_restoring_leaves_it() -> None:
    model = make()
    fully_shard(model[0])
    fully_shard(model)
    (found,) = find_sharded(model)
    found.set(frees=False)
    found.set(frees=True)
    assert frees(model[0]) == [True]
    model[0].set_reshard_after_forward(False)  # type: ignore[operator, unused-ignore]
    found.restore()
    assert frees(model[0]) == [False]


def test_module_when_its_owner_drops_it_then_it_goes_and_changes_do_nothing() -> None:
    model = make()
    fully_shard(model[0])
    fully_shard(model)
    (found,) = find_sharded(model)
    del model
    gc.collect()
    found.take()
    found.set(frees=False)
    found.release()
    found.restore()
    found.give()
