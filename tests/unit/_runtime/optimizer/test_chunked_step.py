"""When states move: in a step, chunk by chunk or all at once, and at either end."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._runtime.optimizer.chunked_step import OptimizerStates, attach
from swapkit.errors import OutOfHostMemory, SessionError
from tests.support.offloading import (
    KIB,
    STATE,
    Recorder,
    add_gradients,
    are_equal,
    is_on_device,
    make_adam,
    make_params,
    moment,
    take_steps,
    values,
)

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture
def executor(installation: Installation) -> Recorder:
    return Recorder(installation)


def test_step_when_states_have_several_chunks_then_the_next_comes_while_one_is_worked_on(
    executor: Recorder,
) -> None:
    optimizer = make_adam(count=3)
    attach(optimizer, executor, chunk_bytes=2 * STATE)
    executor.asked.clear()
    take_steps(optimizer)
    assert executor.asked == ["in"] * 4 + ["out"] * 2 + ["in"] * 2 + ["out"] * 4


@pytest.mark.parametrize("steps_before", [0, 1])
def test_step_when_chunks_are_small_then_three_are_on_the_device_at_most(
    installation: Installation, executor: Recorder, steps_before: int
) -> None:
    optimizer = make_adam(count=12, steps=steps_before, fused=True)
    chunk_bytes = 3 * STATE  # one parameter's, as estimated before it has states
    attach(optimizer, executor, chunk_bytes=chunk_bytes)
    add_gradients(optimizer.param_groups[0]["params"])
    before = installation.pool.in_use_bytes()
    installation.pool.reset_peak()
    optimizer.step()
    peak = installation.pool.stats()["allocated_bytes.all.peak"]
    assert 4 * STATE <= peak - before <= 3 * chunk_bytes + 8 * KIB


def test_step_when_a_state_is_larger_than_a_chunk_then_it_is_alone_on_the_device(
    installation: Installation, executor: Recorder
) -> None:
    params = [*make_params(2), *make_params(2, nbytes=8 * STATE), *make_params(1)]
    optimizer = torch.optim.AdamW(params, fused=True)
    take_steps(optimizer)
    attach(optimizer, executor, chunk_bytes=STATE)
    add_gradients(params)
    before = installation.pool.in_use_bytes()
    installation.pool.reset_peak()
    optimizer.step()
    assert installation.pool.stats()["allocated_bytes.all.peak"] - before < 17 * STATE


def test_step_when_a_parameter_has_no_gradient_then_its_states_stay_on_the_host(
    executor: Recorder,
) -> None:
    optimizer = make_adam(count=3)
    attach(optimizer, executor)
    executor.asked.clear()
    add_gradients(optimizer.param_groups[0]["params"][:1])
    for param in optimizer.param_groups[0]["params"][1:]:
        param.grad = None
    optimizer.step()
    assert executor.asked == ["in"] * 2 + ["out"] * 2


def test_step_when_a_parameter_is_in_a_group_twice_then_it_is_treated_twice(
    executor: Recorder,
) -> None:
    results = []
    for is_offloaded in (False, True):
        params = make_params(3)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = torch.optim.SGD([*params, params[0]], lr=0.1, momentum=0.9)
        if is_offloaded:
            attach(optimizer, executor, chunk_bytes=STATE)
        take_steps(optimizer, 3)
        results.append(values(optimizer))
    assert are_equal(*results)


def test_groups_when_others_than_the_step_look_at_them_then_they_are_whole(
    executor: Recorder,
) -> None:
    optimizer = make_adam()
    attach(optimizer, executor, chunk_bytes=STATE)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    seen: list[Any] = []

    def look(*_: object) -> None:
        seen.append([each is group for each in optimizer.param_groups])

    def closure() -> float:
        look()
        return 1.0

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    add_gradients(group["params"])
    assert optimizer.step(closure) == 1.0
    assert seen == [[True]] * 3
    assert optimizer.param_groups is groups


def test_groups_when_the_step_changes_the_one_it_is_given_then_the_real_one_changes(
    executor: Recorder,
) -> None:
    class Counting(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["seen"] = group.get("seen", 0) + len(group["params"])
            return closure

        step.__module__ = "torch.optim.adam"

    optimizer = Counting(make_params())
    attach(optimizer, executor, chunk_bytes=STATE)
    take_steps(optimizer)
    assert optimizer.param_groups[0]["seen"] == 4
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_group_when_it_is_added_while_attached_then_its_states_are_offloaded(
    executor: Recorder,
) -> None:
    optimizer = make_adam()
    states = attach(optimizer, executor)
    optimizer.add_param_group({"params": make_params(2), "lr": 0.1})
    take_steps(optimizer)
    assert states.hosted_bytes == 12 * STATE


def test_group_when_it_is_added_within_a_step_then_it_stays(executor: Recorder) -> None:
    optimizer = make_adam()
    attach(optimizer, executor)
    add_gradients(optimizer.param_groups[0]["params"])

    def closure() -> float:
        optimizer.add_param_group({"params": make_params(1)})
        return 0.0

    optimizer.step(closure)
    assert type(optimizer.param_groups) is list
    assert len(optimizer.param_groups) == 2


def test_load_when_nobody_else_holds_the_states_then_they_are_offloaded_at_once(
    executor: Recorder,
) -> None:
    optimizer = make_adam(steps=0)
    states = attach(optimizer, executor)
    loaded = copy.deepcopy(make_adam().state_dict())
    for state in loaded["state"].values():
        state["exp_avg"] = state["exp_avg"].double()  # so that loading makes a tensor of its own
    optimizer.load_state_dict(loaded)
    assert states.hosted_bytes == 4 * STATE
    del loaded, state
    take_steps(optimizer)
    assert states.hosted_bytes == 8 * STATE


# ---- whole steps ---------------------------------------------------------------------------------


class Watching(torch.optim.AdamW):
    """An optimizer that is not torch's: it looks at the states before and after a step."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [self._states_on_device()]
        result = super().step(closure)
        self.seen.append(self._states_on_device())
        return result

    def _states_on_device(self) -> list[bool]:
        from swapkit._runtime.allocators.installation import installed_pool

        return [installed_pool().owns(s["exp_avg"].data_ptr()) for s in self.state.values()]


def test_step_when_the_optimizer_is_unknown_then_all_states_are_on_the_device_during_it(
    executor: Recorder,
) -> None:
    torch.optim.AdamW(make_params(1))  # hooks its step, so that hooks run twice in ours
    optimizer = Watching(make_params(2))
    states = attach(optimizer, executor)
    take_steps(optimizer, 2)
    assert optimizer.seen == [[True, True], [True, True]]
    assert states.hosted_bytes == 4 * STATE


def test_step_when_a_helper_is_overridden_then_it_is_not_divided(executor: Recorder) -> None:
    counts = []

    class Counting(torch.optim.AdamW):
        def _init_group(self, group: Any, *rest: Any) -> Any:
            counts.append(len(group["params"]))
            return super()._init_group(group, *rest)

    optimizer = Counting(make_params())
    attach(optimizer, executor, chunk_bytes=STATE)
    take_steps(optimizer)
    assert counts == [4]


def test_step_when_states_are_in_lists_then_they_are_offloaded_too(
    installation: Installation, executor: Recorder
) -> None:
    optimizer = torch.optim.LBFGS(make_params(1), max_iter=3)
    attach(optimizer, executor)
    param = optimizer.param_groups[0]["params"][0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (param.square().sum() * 1e-3).cos()
        loss.backward()
        return loss

    optimizer.step(closure)
    directions = optimizer.state[param]["old_dirs"]
    assert directions
    assert not any(is_on_device(installation, each) for each in directions)


# ---- the handle ----------------------------------------------------------------------------------


def test_attach_when_it_is_attached_already_then_it_is_refused(executor: Recorder) -> None:
    optimizer = make_adam()
    states = attach(optimizer, executor)
    with pytest.raises(SessionError, match="already"):
        attach(optimizer, executor)
    states.detach()
    attach(optimizer, executor)


def test_detach_when_states_are_on_the_host_then_they_are_back_and_stay(
    installation: Installation, executor: Recorder
) -> None:
    optimizer, plain = make_adam(), make_adam()
    states = attach(optimizer, executor)
    states.detach()
    states.detach()
    assert all(is_on_device(installation, moment(optimizer, index)) for index in range(4))
    assert states.hosted_bytes == 0
    executor.asked.clear()
    take_steps(optimizer)
    take_steps(plain)
    assert executor.asked == []
    assert are_equal(values(optimizer), values(plain))


def test_states_when_parameters_are_on_another_device_then_nothing_moves(
    executor: Recorder,
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(64, 64, device="meta"))])
    OptimizerStates(optimizer, executor)
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(64, 64, device="meta")
    optimizer.step()
    assert executor.asked == []


def test_copy_when_the_host_refuses_then_the_error_is_one_that_is_understood(
    installation: Installation,
) -> None:
    executor = Recorder(installation, host_limit_bytes=1)
    with pytest.raises(OutOfHostMemory, match="raise host_limit"):
        executor.copy_out(torch.zeros(STATE).untyped_storage())
