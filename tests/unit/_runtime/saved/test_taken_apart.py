"""Saved wrappers: what is inside moves like plain tensors, and torch's rules for them hold."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import _functional_collectives as collectives

from swapkit._native.sched import State
from swapkit._runtime.saved.taken_apart import TakenApart
from swapkit.errors import SavedTensorModified
from tests.programs.kinds import Loud, Pair, as_jagged
from tests.unit._runtime.rig import (
    AUTO,
    EVERYTHING,
    KEEP,
    SWAP,
    evict,
    group_of,
    make_swapper,
    numbers,
    save,
    scope,
    settle,
    state_of,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")
distributed: Any = torch.distributed

NBYTES = 8192


def pair(seed: int = 0) -> Pair:
    return Pair(numbers(NBYTES, seed), numbers(NBYTES, seed + 1))


def save_apart(swapper: Swapper, tensor: torch.Tensor) -> TakenApart:
    apart: object = save(swapper, tensor)
    assert isinstance(apart, TakenApart)
    return apart


def bring_back(apart: TakenApart) -> Any:
    return apart.unpack()


@pytest.fixture
def mesh() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


# ---- moving ------------------------------------------------------------------------------------


def test_wrapper_when_rescued_then_all_inside_goes_and_comes_back() -> None:
    swapper = make_swapper()
    tensor = pair()
    expected = tensor.one.clone(), tensor.two.clone()
    apart = save_apart(swapper, tensor)
    del tensor
    assert swapper.rescue_bytes(EVERYTHING) == 2 * NBYTES
    back = bring_back(apart)
    assert type(back) is Pair
    assert not back.requires_grad
    assert torch.equal(back.one, expected[0])
    assert torch.equal(back.two, expected[1])


def test_wrapper_when_used_in_inference_mode_then_it_is_an_ordinary_tensor() -> None:
    swapper = make_swapper()
    apart = save_apart(swapper, pair())
    evict(swapper, apart.parts[0])
    with torch.inference_mode():
        back = bring_back(apart)
        assert torch.is_inference_mode_enabled()
    assert not back.is_inference()
    assert not back.requires_grad
    assert torch.equal(back.one, numbers(NBYTES))


def test_wrapper_when_it_wraps_another_then_the_innermost_tensors_move() -> None:
    swapper = make_swapper()
    apart = save_apart(swapper, Pair(pair(), pair(2)))
    assert len(apart.parts) == 4
    assert swapper.rescue_bytes(EVERYTHING) == 4 * NBYTES
    back = bring_back(apart)
    assert torch.equal(back.two.one, numbers(NBYTES, 2))


def test_wrapper_when_plain_tensors_share_its_memory_then_one_group_moves_once() -> None:
    swapper = make_swapper()
    tensor = numbers(NBYTES)
    plain = save(swapper, tensor)
    first = save_apart(swapper, Pair(tensor.view_as(tensor), numbers(NBYTES, 1)))
    assert swapper.mover.copy_out(group_of(plain))
    second = save_apart(swapper, Pair(tensor.view_as(tensor), numbers(NBYTES, 2)))
    assert plain.group is first.parts[0].group is second.parts[0].group


def test_weight_when_it_is_a_wrapper_then_neither_it_nor_its_views_move(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    swapper = make_swapper()
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
    frozen = torch.nn.Parameter(weight.detach(), requires_grad=False)
    local: torch.Tensor = weight.to_local()  # type: ignore[attr-defined]
    views = [weight, frozen, weight.t(), frozen.t(), local, local.t(), local.t()[1:].view(-1, 64)]
    for tensor in views:
        for choice in (AUTO, SWAP):
            packed = save(swapper, tensor, choice)
            assert not isinstance(packed, TakenApart)
            assert packed.group is None


def test_wrapper_when_its_scope_keeps_or_it_is_of_no_use_apart_then_it_stays_whole() -> None:
    swapper = make_swapper()
    assert swapper.shared.shim.marks_count() == 0  # sweeps; marks may be inside
    assert not isinstance(save(swapper, pair(), KEEP), TakenApart)
    reluctant = Reluctant(numbers(NBYTES), numbers(NBYTES))
    others = [numbers(NBYTES).as_subclass(Loud), as_jagged(torch.randn(300, 64)), reluctant]
    for tensor in others:
        packed = save(swapper, tensor)
        assert not isinstance(packed, TakenApart)
        assert type(unpack(swapper, packed)) is type(tensor)


class Reluctant(Pair):
    """Comes back as something else."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return Reluctant(made.one, made.two) if isinstance(made, Pair) else made


# ---- changes in place ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_out", [False, True])
def test_wrapper_when_changed_in_place_then_backward_is_refused(mesh: Any, is_out: bool) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    swapper = make_swapper()
    tensor = DTensor.from_local(numbers(NBYTES), mesh, [Replicate()])
    apart = save_apart(swapper, tensor)
    if is_out:
        evict(swapper, apart.parts[0])
    tensor.add_(1)
    with pytest.raises(SavedTensorModified, match="is at version 1; expected version 0"):
        bring_back(apart)


def test_wrapper_when_changed_between_two_saves_then_the_second_has_the_new_bytes(
    mesh: Any,
) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    swapper = make_swapper()
    tensor = DTensor.from_local(numbers(NBYTES), mesh, [Replicate()])
    first = save_apart(swapper, tensor)
    assert swapper.mover.copy_out(group_of(first.parts[0]))
    tensor.add_(1)
    local = save(swapper, tensor.to_local())
    second = save_apart(swapper, tensor)
    groups = {id(each.group) for each in (first.parts[0], local, second.parts[0])}
    assert len(groups) == 3  # the first has a copy of the old bytes
    assert torch.equal(bring_back(second).to_local(), numbers(NBYTES) + 1)
    assert torch.equal(unpack(swapper, local), numbers(NBYTES) + 1)


@pytest.mark.parametrize("is_out", [False, True])
def test_inside_when_changed_unnoticed_by_torch_then_the_bytes_are_torchs_or_refused(
    is_out: bool,
) -> None:
    swapper = make_swapper()
    tensor = pair()
    apart = save_apart(swapper, tensor)
    if is_out:
        evict(swapper, apart.parts[0])
    inner = tensor.one
    inner.add_(1)
    assert torch.equal(bring_back(apart).one, numbers(NBYTES) + 1)  # as without swapkit
    if is_out:
        evict(swapper, apart.parts[0])
        del tensor, inner
        with pytest.raises(SavedTensorModified):
            bring_back(apart)


def test_wrapper_when_changed_in_backward_then_a_second_pass_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value * 2)
            return value * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            ctx.saved_tensors[0].add_(1)
            return grads[0]

    swapper = make_swapper()
    leaf = DTensor.from_local(numbers(NBYTES), mesh, [Replicate()]).requires_grad_()
    with scope(swapper, AUTO):
        loss = Careless.apply(leaf).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(SavedTensorModified):
        loss.backward()


# ---- autograd ------------------------------------------------------------------------------------


def second_derivatives(swapper: Swapper | None, mesh: Any) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor, Replicate

    seen: list[torch.Tensor] = []
    leaf = numbers(NBYTES).view(32, 64).requires_grad_()
    hidden: Any = DTensor.from_local(leaf * 1, mesh, [Replicate()])
    hidden.register_hook(lambda grad: seen.append(grad.to_local().clone()))

    around = contextlib.nullcontext() if swapper is None else scope(swapper, SWAP)
    with around:
        loss = (hidden.tanh() @ hidden.t()).sin().sum().to_local()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        again = torch.autograd.grad(loss, leaf, retain_graph=True)
    if swapper is not None:
        settle(swapper)
    return [loss, first, *again, *torch.autograd.grad(first.sum(), leaf), *seen]


def test_wrappers_when_differentiated_twice_then_bits_and_hooks_are_those_of_torch(
    mesh: Any,
) -> None:
    swapper = make_swapper()
    ours, plain = second_derivatives(swapper, mesh), second_derivatives(None, mesh)
    assert all(torch.equal(*each) for each in zip(ours, plain, strict=True))
    assert swapper.counters().copied_out_bytes > 0


def test_wrapper_when_its_graph_is_dropped_then_everything_is_freed() -> None:
    swapper = make_swapper()
    apart = save_apart(swapper, pair())
    groups = [weakref.ref(each.group) for each in apart.parts]
    del apart
    gc.collect()
    assert all(each() is None for each in groups)


# ---- collectives ---------------------------------------------------------------------------------


def test_result_when_nobody_has_waited_then_no_copy_begins_until_somebody_has() -> None:
    swapper = make_swapper()
    result: Any = collectives.AsyncCollectiveTensor(numbers(NBYTES))
    packer = swapper.mover.packer(SWAP)
    apart: Any = packer.pack(result)
    assert apart.parts[0].group is None
    packer.pack(numbers(NBYTES, 1))
    assert apart.parts[0].group is None  # an event, but nobody has waited
    result.trigger_wait()
    packer.pack(numbers(NBYTES, 2))
    assert group_of(apart.parts[0]).nbytes == NBYTES
    del result
    settle(swapper)
    assert state_of(apart.parts[0]) == State.OUT
    back = apart.unpack()
    assert type(back) is collectives.AsyncCollectiveTensor
    assert torch.equal(back.trigger_wait(), numbers(NBYTES))


def test_result_when_its_scope_ends_after_the_wait_then_it_leaves_with_the_rest() -> None:
    swapper = make_swapper()
    result: Any = collectives.AsyncCollectiveTensor(numbers(NBYTES))
    leaf = numbers(NBYTES, 1).requires_grad_()
    with scope(swapper, SWAP):
        loss = (leaf * result).sum()  # waits after the save
    del result
    settle(swapper)
    assert swapper.counters().copied_out_bytes == NBYTES
    (grad,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(grad, numbers(NBYTES))


def test_result_when_used_before_anybody_has_waited_then_it_comes_back_as_it_is() -> None:
    swapper = make_swapper()
    elem = numbers(NBYTES)
    result: Any = collectives.AsyncCollectiveTensor(elem)
    packer: Any = swapper.mover.packer(AUTO)
    apart: Any = packer.pack(result)
    assert packer.unpack(apart).elem.data_ptr() == elem.data_ptr()
    assert not result.completed
    del apart
    result.trigger_wait()
    packer.pack(numbers(NBYTES, 1))
    assert packer.awaited == []
