"""The group of tensor-parallel ranks is found where weights are spread over one, and only there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from swapkit._runtime.model.ranks import check_group, find_tensor_parallel_group
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

distributed: Any = torch.distributed


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def spread(names: tuple[str, ...] | None, *, is_sharded: bool = True) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = distributed.init_device_mesh("cpu", (1,), mesh_dim_names=names)
    model = nn.Linear(4, 4)
    placement = Shard(0) if is_sharded else Replicate()
    weight = distribute_tensor(model.weight.data, mesh, [placement])
    model.weight = nn.Parameter(weight)
    return model


def test_group_when_nothing_is_distributed_then_none() -> None:
    assert find_tensor_parallel_group(nn.Linear(4, 4)) is None


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("names", "is_sharded", "is_found"),
    [(("tp",), True, True), (None, True, True), (None, False, False), (("dp",), True, False)],
)
def test_group_when_weights_are_spread_then_that_of_tensor_parallelism(
    names: tuple[str, ...] | None, is_sharded: bool, is_found: bool
) -> None:
    found = find_tensor_parallel_group(spread(names, is_sharded=is_sharded))
    assert (found is not None) == is_found
    check_group(found)


@pytest.mark.usefixtures("group")
def test_group_when_fsdp_shards_then_none_since_its_ranks_see_different_data() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
    assert type(model.weight).__name__ == "DTensor"
    assert find_tensor_parallel_group(model) is None


@pytest.mark.usefixtures("group")
def test_group_when_no_weight_is_spread_then_none() -> None:
    assert find_tensor_parallel_group(nn.Linear(4, 4)) is None


def test_group_when_it_is_none_of_torchs_then_refused() -> None:
    check_group(None)
    with pytest.raises(InvalidArgument, match="tensor_parallel_group=5: expected a "):
        check_group(5)
