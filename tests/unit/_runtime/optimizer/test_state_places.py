"""What of an optimizer's states does not move is said, once and in `explain()`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.optimizer.chunked_step import attach
from tests.support import MIB
from tests.support.offloading import (
    STATE,
    Recorder,
    add_gradients,
    make_adam,
    make_params,
    moment,
    take_steps,
)

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture
def executor(installation: Installation) -> Recorder:
    return Recorder(installation)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="swapkit")
    return caplog


class Packed(torch.Tensor):
    """A tensor of a class of its own, as those of 8-bit optimizers."""


class Odd(torch.optim.Optimizer):
    """Keeps states as no optimizer of torch does."""

    def __init__(self, params: list[torch.nn.Parameter], kind: str) -> None:
        super().__init__(params, {})
        self.kind = kind

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for param in self.param_groups[0]["params"]:
            made = torch.zeros_like(param.detach())
            state = self.state[param]
            if not state and self.kind == "packed":
                state["moment"] = made.as_subclass(Packed)
            elif not state and self.kind == "views":
                whole = torch.zeros(2, *param.shape)
                state["first"], state["second"] = whole[0], whole[1]
            elif not state and self.kind == "nested":
                state["shampoo"] = {"left": made, "right": [{"deep": torch.zeros_like(made)}]}


def make_odd(kind: str) -> Odd:
    params = make_params(2)
    add_gradients(params)
    return Odd(params, kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("packed", "128.00 KiB (is a Packed, torch.strided)"),
        ("views", "256.00 KiB (shares its memory with other tensors)"),
    ],
)
def test_step_when_its_states_cannot_move_then_that_is_said_once(
    executor: Recorder, told: pytest.LogCaptureFixture, kind: str, reason: str
) -> None:
    optimizer = make_odd(kind)
    states = attach(optimizer, executor)
    optimizer.step()
    optimizer.step()
    text = f"states of Odd: 0 B on the host; on the device stay {reason}"
    assert [record.getMessage() for record in told.records] == [f"offload(optimizer): {text}"]
    assert str(states.places()) == text


def test_step_when_an_optimizer_has_no_states_then_that_is_said(
    executor: Recorder, told: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD(make_params(), 0.1)
    attach(optimizer, executor)
    take_steps(optimizer, 2)
    assert told.messages == ["offload(optimizer): SGD has no states to keep on the host"]


def test_step_when_all_large_states_move_then_nothing_is_said(
    executor: Recorder, told: pytest.LogCaptureFixture
) -> None:
    optimizer = make_adam(steps=0)
    states = attach(optimizer, executor)
    take_steps(optimizer, 2)
    assert not told.messages
    assert str(states.places()) == "states of AdamW: 512.00 KiB on the host"


def test_places_when_the_host_is_full_then_they_say_so_after_the_one_warning(
    installation: Installation, told: pytest.LogCaptureFixture
) -> None:
    optimizer = make_adam(steps=0)
    states = attach(optimizer, Recorder(installation, host_limit_bytes=4 * STATE))
    take_steps(optimizer)
    assert len(told.messages) == 1
    text = "256.00 KiB on the host; on the device stay 256.00 KiB (finds no room on the host)"
    assert str(states.places()) == f"states of AdamW: {text}"


def test_states_when_they_are_in_nested_containers_then_they_move(
    executor: Recorder, told: pytest.LogCaptureFixture
) -> None:
    optimizer = make_odd("nested")
    states = attach(optimizer, executor)
    optimizer.step()
    assert states.hosted_bytes == 4 * STATE
    assert not told.messages


def test_states_when_they_are_kept_by_another_key_than_a_parameter_then_they_move(
    executor: Recorder,
) -> None:
    optimizer = make_odd("none")
    optimizer.state["all"] = {"moment": torch.zeros(STATE // 4)}  # type: ignore[index]
    assert attach(optimizer, executor).hosted_bytes == STATE


def test_places_when_a_step_is_under_way_then_they_are_not_known(executor: Recorder) -> None:
    optimizer = make_adam()
    states = attach(optimizer, executor)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(states.places()))
    take_steps(optimizer)
    assert seen == [None]


@pytest.mark.usefixtures("installation")
def test_explain_when_states_are_offloaded_then_it_says_where_they_are() -> None:
    optimizer = make_adam(steps=0)
    kept: list[torch.Tensor] = []
    with swapkit.budget(64 * MIB, optimizer=optimizer, policy="rescue") as session:
        assert "states of" not in session.explain()
        swapkit.offload(optimizer)
        take_steps(optimizer)
        assert "\nstates of AdamW: 512.00 KiB on the host\n" in session.explain() + "\n"
        next(iter(optimizer.state.values()))["exp_avg"] = torch.zeros(STATE // 4 // 64, 64)
        kept.append(moment(optimizer))
        take_steps(optimizer)
        text = "448.00 KiB on the host; on the device stay 64.00 KiB (is referenced elsewhere)"
        assert text in session.explain()
