"""Which optimizers a wrapper, a container or a list stands for."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.optimizer.chunked_step import attached
from swapkit._runtime.optimizer.wrapped import list_optimizers
from swapkit.errors import InvalidArgument, SessionError
from tests.support.offloading import (
    STATE,
    are_equal,
    is_on_device,
    make_adam,
    make_params,
    moment,
    take_steps,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.optim import ZeroRedundancyOptimizer

    from swapkit._runtime.allocators.installed_pool import Installation

distributed: Any = torch.distributed


class Container(torch.optim.Optimizer):
    """One optimizer for each part of a model, itself an optimizer, as torchtitan's."""

    def __init__(self, parts: list[list[torch.nn.Parameter]]) -> None:
        self.optimizers = [torch.optim.AdamW(part, lr=0.01) for part in parts]
        super().__init__([param for part in parts for param in part], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step(closure)


def test_list_when_a_container_holds_optimizers_then_these() -> None:
    container = Container([make_params(1), make_params(1)])
    assert list_optimizers(container) == tuple(container.optimizers)
    assert list_optimizers([container]) == tuple(container.optimizers)


def test_list_when_an_optimizer_is_chained_and_wrapped_then_the_innermost() -> None:
    first, second = make_adam(1, 0), make_adam(1, 0)
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=first), second])
    assert list_optimizers(chained) == (first, second)


@pytest.mark.parametrize("given", [[], [3], SimpleNamespace(optimizers=[3])], ids=str)
def test_list_when_there_is_no_optimizer_then_it_is_refused(given: object) -> None:
    with pytest.raises(InvalidArgument, match=r"optimizer=.*expected a torch.optim.Optimizer"):
        list_optimizers(given)


def test_offload_when_given_several_optimizers_then_the_states_of_each(
    installation: Installation,
) -> None:
    optimizers = [make_adam(), make_adam()]
    wrapped: Any = [optimizers[0], SimpleNamespace(optimizer=optimizers[1])]
    assert swapkit.offload(wrapped) is wrapped
    assert not any(is_on_device(installation, moment(each)) for each in optimizers)


def test_offload_when_given_a_container_then_its_members_with_the_same_bits(
    installation: Installation,
) -> None:
    plain = Container([make_params(2), make_params(2, seed=1)])
    ours = Container([make_params(2), make_params(2, seed=1)])
    swapkit.offload(ours)
    for each in (plain, ours):
        take_steps(each, 2)
    assert not any(is_on_device(installation, moment(each)) for each in ours.optimizers)
    for one, other in zip(ours.optimizers, plain.optimizers, strict=True):
        assert are_equal(values(one), values(other))


@pytest.mark.usefixtures("installation")
def test_offload_when_one_of_several_is_offloaded_already_then_nothing_changes() -> None:
    first, second = make_adam(), make_adam()
    swapkit.offload(second)
    with pytest.raises(SessionError, match="already offloaded"):
        swapkit.offload([first, second])
    assert attached(first) is None
    assert attached(second) is not None


@pytest.mark.usefixtures("installation")
def test_offload_when_an_optimizer_comes_with_a_pattern_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pattern 'x' needs a model"):
        swapkit.offload(make_adam(), "x")  # type: ignore[call-overload]


# ---- ZeRO-1 -------------------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def make_zero() -> ZeroRedundancyOptimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(make_params(), torch.optim.AdamW, lr=0.01)


def reload(optimizer: ZeroRedundancyOptimizer) -> None:
    """Load copies of the states, as from a file."""
    optimizer.consolidate_state_dict()
    found = optimizer.state_dict()
    states = {
        index: {name: value.clone() for name, value in state.items()}
        for index, state in found["state"].items()
    }
    optimizer.load_state_dict({**found, "state": states})


@pytest.mark.usefixtures("ranks")
def test_zero_when_its_states_are_offloaded_then_they_move_also_after_a_load(
    installation: Installation,
) -> None:
    optimizer, plain = make_zero(), make_zero()
    swapkit.offload(optimizer)
    for each in (optimizer, plain):
        take_steps(each, 2)
    states = attached(optimizer.optim)
    assert states is not None
    assert states.hosted_bytes == 8 * STATE
    before = installation.pool.in_use_bytes()
    for each in (optimizer, plain):
        reload(each)
        take_steps(each)
    assert str(states.places()) == "states of AdamW: 512.00 KiB on the host"
    assert installation.pool.in_use_bytes() <= before + 8 * STATE + STATE  # those of `plain`
    assert are_equal(values(optimizer.optim), values(plain.optim))
