"""Which states move, and what is read while they are on the host."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.optimizer.chunked_step import attach
from tests.support.offloading import (
    STATE,
    Recorder,
    add_gradients,
    are_equal,
    is_on_device,
    make_adam,
    moment,
    take_steps,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.optimizer.state_slots import HostBuffer, HostCopy


@pytest.fixture
def executor(installation: Installation) -> Recorder:
    return Recorder(installation)


def test_attach_when_there_are_states_then_their_device_memory_is_free(
    installation: Installation, executor: Recorder
) -> None:
    optimizer = make_adam()
    before = installation.pool.in_use_bytes()
    states = attach(optimizer, executor)
    assert before - installation.pool.in_use_bytes() == 8 * STATE
    assert states.hosted_bytes == 8 * STATE


def test_step_when_states_are_made_in_it_then_they_are_on_the_host_afterwards(
    installation: Installation, executor: Recorder
) -> None:
    optimizer = make_adam(steps=0)
    states = attach(optimizer, executor)
    take_steps(optimizer)
    assert states.hosted_bytes == 8 * STATE
    assert not is_on_device(installation, moment(optimizer))


def test_states_when_they_are_on_the_host_then_every_way_to_read_them_gives_their_values(
    executor: Recorder,
) -> None:
    optimizer, plain = make_adam(), make_adam()
    attach(optimizer, executor)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    expected = values(plain)
    assert are_equal(values(optimizer), expected)
    assert are_equal(values(copy.deepcopy(optimizer)), expected)
    for readable in (optimizer.state_dict(), torch.load(file)):
        other = make_adam(steps=0)
        other.load_state_dict(readable)
        assert are_equal(values(other)[4:], expected[4:])


def test_state_when_a_view_of_it_outlives_the_optimizer_then_its_bytes_stay(
    executor: Recorder,
) -> None:
    optimizer = make_adam(count=1)
    attach(optimizer, executor)
    view = moment(optimizer).view(-1)
    expected = view.clone()
    del optimizer
    others = [executor.copy_out(torch.zeros(STATE // 4).untyped_storage()) for _ in range(4)]
    executor.scheduler.drain()
    assert torch.equal(view, expected)
    del others


def test_state_when_its_strides_are_unusual_then_they_stay(executor: Recorder) -> None:
    param = torch.nn.Parameter(torch.randn(8, 16, 16, 4).permute(0, 3, 1, 2))
    optimizer = torch.optim.AdamW([param])
    attach(optimizer, executor)
    take_steps(optimizer, 2)
    assert moment(optimizer).stride() == param.stride()


def test_state_when_somebody_keeps_it_then_it_follows_the_steps(executor: Recorder) -> None:
    optimizer, plain = make_adam(), make_adam()
    attach(optimizer, executor)
    kept = moment(optimizer)
    take_steps(optimizer, 2)
    take_steps(plain, 2)
    assert torch.equal(kept, moment(plain))
    assert kept is moment(optimizer)


def test_state_when_it_is_changed_in_place_between_steps_then_the_step_uses_it(
    executor: Recorder,
) -> None:
    optimizer, plain = make_adam(), make_adam()
    attach(optimizer, executor)
    for each in (optimizer, plain):
        moment(each).mul_(3)
        take_steps(each)
    assert are_equal(values(optimizer), values(plain))


def test_state_when_its_data_are_replaced_between_steps_then_the_step_uses_the_new_ones(
    executor: Recorder,
) -> None:
    optimizer, plain = make_adam(), make_adam()
    attach(optimizer, executor)
    for each in (optimizer, plain):
        moment(each).data = torch.ones_like(moment(each))
        take_steps(each)
    assert are_equal(values(optimizer), values(plain))


@pytest.mark.parametrize("is_kept", [True, False])
def test_state_when_it_is_replaced_between_steps_then_the_step_uses_the_new_one(
    installation: Installation, executor: Recorder, *, is_kept: bool
) -> None:
    optimizer, plain = make_adam(), make_adam()
    attach(optimizer, executor)
    kept = []
    for each in (optimizer, plain):
        replacement = torch.ones_like(moment(each))
        next(iter(each.state.values()))["exp_avg"] = replacement
        if is_kept:
            kept.append(replacement)
        del replacement
        take_steps(each)
    assert are_equal(values(optimizer), values(plain))
    assert is_on_device(installation, moment(optimizer)) is is_kept
    if is_kept:
        assert kept[0] is moment(optimizer)
        kept.clear()
        take_steps(optimizer)
        assert not is_on_device(installation, moment(optimizer))


def test_optimizer_when_it_goes_then_the_host_memory_goes_without_the_garbage_collector(
    executor: Recorder,
) -> None:
    optimizer = make_adam()
    attach(optimizer, executor)
    take_steps(optimizer)
    executor.scheduler.drain()
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert executor.scheduler.stats().host_bytes == 0
    finally:
        gc.enable()


def _view_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor])[: tensor.shape[0]]


def _conjugate_of(tensor: torch.Tensor) -> torch.Tensor:
    conjugate = torch.complex(tensor, tensor)
    torch._C._set_conj(conjugate, True)
    return conjugate


def _part_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.cat([tensor, tensor]).untyped_storage()
    return torch.empty(0).set_(storage, 0, tensor.size(), tensor.stride())


def _subclass_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = tensor.clone().share_memory_()
    return shared


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor[:1, :1].expand(tensor.shape),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
        _conjugate_of,
        lambda tensor: tensor[0, :8].clone(),
        _view_of,
        _part_of,
        _subclass_of,
        _shared,
        _with_gradient,
    ],
    ids=[
        "expanded",
        "sparse",
        "meta",
        "conj",
        "small",
        "view",
        "part",
        "subclass",
        "shared",
        "gradient",
    ],
)
def test_state_when_it_is_not_plain_then_it_is_left_alone(
    executor: Recorder, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    optimizer = make_adam(count=1)
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = change(state["exp_avg"])
    kept = id(state["exp_avg"])
    attach(optimizer, executor)
    assert id(moment(optimizer)) == kept
    assert executor.asked == ["out"]  # of the other


def test_state_when_two_parameters_share_it_then_it_is_left_alone(executor: Recorder) -> None:
    optimizer = make_adam(count=2)
    first, second = optimizer.state.values()
    second["exp_avg"] = first["exp_avg"]
    second["exp_avg_sq"] = first["exp_avg_sq"].view(-1)
    attach(optimizer, executor)
    assert executor.asked == []
    assert moment(optimizer, 0) is moment(optimizer, 1)


@pytest.mark.usefixtures("installation")
def test_step_when_interrupted_anywhere_then_the_grad_mode_is_as_before() -> None:
    """The traceback keeps frames of generators; what they restore must not come late."""
    optimizer = make_adam(count=2)
    swapkit.offload(optimizer)
    add_gradients(optimizer.param_groups[0]["params"])
    optimizer.step()
    enter = contextlib._GeneratorContextManager.__enter__
    begun = 0

    def enter_and_stop(context: Any) -> Any:
        nonlocal begun
        entered = enter(context)
        begun += "swapkit" in context.gen.gi_code.co_filename
        if begun == wanted:
            begun += 1
            raise KeyboardInterrupt
        return entered

    for wanted in range(1, 9):
        begun = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contextlib._GeneratorContextManager, "__enter__", enter_and_stop)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
        assert torch.is_grad_enabled(), wanted
        assert not torch.is_inference_mode_enabled()


class Late(Recorder):
    """Lets go of each arrived storage a moment after its copy is done, as a thread held up does."""

    def __init__(self, installation: Installation) -> None:
        super().__init__(installation)
        self.held: list[torch.Tensor] = []

    def copy_in(self, host: HostBuffer, storage: torch.UntypedStorage) -> HostCopy:
        copied = super().copy_in(host, storage)
        self.held.append(torch.empty(0).set_(storage))
        timer = threading.Timer(0.01, self.held.clear)
        wait, copied_wait = timer.start, copied.wait
        return SimpleNamespace(  # type: ignore[return-value]
            host=copied.host, wait=lambda: (copied_wait(), wait())
        )


def test_state_when_the_copying_thread_lets_go_of_it_late_then_it_still_leaves_after_the_step(
    installation: Installation,
) -> None:
    optimizer = make_adam(count=1)
    states = attach(optimizer, Late(installation))
    take_steps(optimizer)
    assert str(states.places()) == "states of AdamW: 128.00 KiB on the host"
