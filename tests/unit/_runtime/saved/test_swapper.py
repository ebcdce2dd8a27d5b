"""What is packed, what passes, and that it comes back bit for bit, whatever happens meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._native.backend import Backend
from swapkit._native.sched import State
from swapkit._runtime.shim.types import Placement
from swapkit.errors import SavedTensorModified
from swapkit.ir.plans import Action
from tests.support import MIB
from tests.support.instruments import Instrument
from tests.unit._runtime.rig import (
    AUTO,
    EVERYTHING,
    SWAP,
    evict,
    group_of,
    in_use,
    make_swapper,
    numbers,
    save,
    settle,
    state_of,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")

AHEAD_GROUPS = 2  # come back ahead of their use, whatever their size


# ---- packing -----------------------------------------------------------------------------------


def test_unpack_when_nothing_happened_then_an_equal_tensor_over_the_same_storage() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    unpacked = unpack(swapper, save(swapper, tensor))
    assert torch.equal(unpacked, tensor)
    assert unpacked.data_ptr() == tensor.data_ptr()


def test_unpack_when_evicted_then_every_view_is_back_over_one_storage() -> None:
    swapper = make_swapper()
    base = numbers(8192).view(32, 64)
    expected = [base.clone(), base.t().clone(), base[3:, 1::2].clone()]
    handles = [save(swapper, view) for view in (base, base.t(), base[3:, 1::2])]
    assert len({id(handle.group) for handle in handles}) == 1
    del base
    assert swapper.rescue_bytes(1) == 8192
    assert state_of(handles[0]) == State.OUT
    unpacked = [unpack(swapper, handle) for handle in handles]
    assert all(torch.equal(a, b) for a, b in zip(unpacked, expected, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in unpacked}) == 1
    stats = swapper.scheduler.stats()
    assert stats.copied_out_bytes == stats.copied_in_bytes == 8192


def test_unpack_when_evicted_then_the_memory_is_the_pools(installation: Installation) -> None:
    swapper = make_swapper()
    handle = save(swapper, MIB)
    evict(swapper, handle)
    before = in_use(installation)
    assert installation.pool.owns(unpack(swapper, handle).data_ptr())
    assert in_use(installation) == before + MIB


def test_pack_when_the_version_differs_then_a_group_of_its_own() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    first = save(swapper, tensor)
    tensor.add_(1)
    assert save(swapper, tensor).group is not first.group


class Subclass(torch.Tensor):
    pass


PASSING: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: numbers(1020),
    "empty": lambda: torch.empty(0),
    "parameter": lambda: torch.nn.Parameter(numbers(4096).view(32, 32)),
    "view of a parameter": lambda: torch.nn.Parameter(numbers(4096).view(32, 32)).t(),
    "subclass": lambda: numbers(4096).as_subclass(Subclass),
    "sparse": lambda: numbers(4096).view(32, 32).to_sparse(),
    "meta": lambda: torch.empty(4096, device="meta"),
    "inference": torch.inference_mode()(lambda: numbers(4096)),
    "not from the pool": lambda: torch.frombuffer(bytearray(4096), dtype=torch.float32),
    "quantised": lambda: torch.quantize_per_tensor(numbers(8192), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantised tensors are announced to go
@pytest.mark.parametrize("kind", PASSING)
def test_pack_when_the_tensor_is_not_for_swapping_then_it_passes(kind: str) -> None:
    swapper = make_swapper()
    tensor = PASSING[kind]()
    handle = save(swapper, tensor)
    assert handle.group is None
    assert swapper.rescue_bytes(EVERYTHING) == 0
    unpacked = unpack(swapper, handle)
    assert unpacked.layout == tensor.layout
    assert isinstance(unpacked, Subclass) == isinstance(tensor, Subclass)
    if kind not in {"meta", "sparse"}:
        assert unpacked.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("kind", ["parameter", "frozen view", "buffer"])
def test_pack_when_a_scope_swaps_then_state_of_known_modules_stays(kind: str) -> None:
    swapper = make_swapper()
    module = torch.nn.BatchNorm1d(1024)
    assert module.running_mean is not None
    swapper._tracker.add_model(module)
    tensors = {
        "parameter": module.weight,
        "frozen view": module.requires_grad_(requires_grad=False).weight[1:],
        "buffer": module.running_mean[1:],
    }
    assert save(swapper, tensors[kind], SWAP).group is None
    assert save(swapper, torch.frombuffer(bytearray(4096), dtype=torch.uint8), SWAP).group


@pytest.mark.promise("A14")
@pytest.mark.parametrize("action", [Action.AUTO, Action.SWAP])
def test_pack_when_the_least_size_is_higher_then_smaller_storages_pass(action: Action) -> None:
    swapper = make_swapper()
    choice = Placement(action, min_bytes=8192)
    assert save(swapper, 8188, choice).group is None
    assert save(swapper, 8192, choice).group is not None


@pytest.mark.parametrize("away", [False, True])
def test_unpack_when_changed_in_place_then_refused(away: bool) -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    handle = save(swapper, tensor)
    if away:
        evict(swapper, handle)
    tensor[7:].add_(1)
    with pytest.raises(SavedTensorModified):
        swapper.unpack(handle)


def test_unpack_when_a_small_tensor_was_changed_then_refused() -> None:
    swapper = make_swapper()
    tensor = numbers(64)
    handle = save(swapper, tensor)
    tensor.zero_()
    with pytest.raises(SavedTensorModified):
        swapper.unpack(handle)


# ---- swapping scopes ----------------------------------------------------------------------------


def test_swap_when_automatic_then_released_when_copied_and_not_before(
    installation: Installation,
) -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    before = in_use(installation)
    first = save(swapper, MIB, SWAP)
    second = save(swapper, MIB, SWAP, seed=1)
    swapper.end_scope()
    assert [state_of(first), state_of(second)] == [State.COPYING_OUT] * 2
    assert in_use(installation) == before + 2 * MIB
    slow.release_copies(1)
    swapper.mover.finish_out(group_of(first))
    third = save(swapper, MIB, SWAP, seed=2)
    assert state_of(first) == State.OUT
    assert state_of(second) == State.COPYING_OUT
    assert in_use(installation) == before + 2 * MIB
    slow.release_copies()
    settle(swapper)
    assert [state_of(second), state_of(third)] == [State.OUT] * 2
    assert in_use(installation) == before


def test_swap_when_its_scope_is_over_then_other_saves_release_what_is_copied() -> None:
    slow = Instrument.delay(Backend.cpu())
    swapper = make_swapper(slow)
    handle = save(swapper, MIB, SWAP)
    swapper.end_scope()
    assert state_of(handle) == State.COPYING_OUT
    slow.release_copies()
    swapper.scheduler.drain()
    save(swapper, 4096, AUTO)
    assert state_of(handle) == State.OUT


def test_swap_when_saved_before_outside_of_the_scope_then_the_scopes_choice_holds() -> None:
    swapper = make_swapper()
    tensor = numbers(4096)
    first = save(swapper, tensor, AUTO)
    chosen = Placement(Action.SWAP, prefetch=3)
    save(swapper, tensor, chosen)
    assert group_of(first).placement is chosen


def test_swap_when_the_host_is_full_then_it_stays_and_comes_back_right() -> None:
    swapper = make_swapper(host_limit_bytes=MIB)
    handle = save(swapper, 2 * MIB, SWAP)
    settle(swapper)
    assert state_of(handle) == State.RESIDENT
    assert torch.equal(unpack(swapper, handle), numbers(2 * MIB))


def drop_all(swapper: Swapper, count: int) -> list[State]:
    """Save in a swapping scope; return where everything is after the newest came back."""
    handles = [save(swapper, MIB, SWAP, seed=seed) for seed in range(count)]
    settle(swapper)
    assert {state_of(handle) for handle in handles} == {State.OUT}
    unpack(swapper, handles[-1])
    return [state_of(handle) for handle in handles]


def test_ahead_when_one_comes_back_then_those_saved_before_are_on_their_way() -> None:
    swapper = make_swapper()
    states = drop_all(swapper, AHEAD_GROUPS + 4)
    assert State.OUT not in states[-1 - AHEAD_GROUPS :]


def test_ahead_when_earlier_graphs_left_groups_unused_then_still_ahead() -> None:
    swapper = make_swapper()
    for _ in range(5):
        states = drop_all(swapper, 40)
        assert states.count(State.OUT) < 39  # some come ahead in every pass
        assert State.OUT not in states[-1 - AHEAD_GROUPS :]
