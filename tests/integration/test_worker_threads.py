"""A session whose steps run on another thread than the one that entered it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.model import global_hooks
from swapkit._runtime.saved.hooks import Lending
from swapkit._runtime.thread_state import thread_state
from tests.support import MIB, limit_above_reserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.allocators.installed_pool import Installation

WIDTH = 256
ROWS = 1024  # one activation is 1 MiB
LAYERS = 12
STEPS = 10


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.rand(ROWS, WIDTH)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.x).square().mean()
        return loss

    def finish(self, loss: torch.Tensor) -> float:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def step(self) -> float:
        return self.finish(self.forward())


def expected() -> list[float]:
    training = Training()
    return [training.step() for _ in range(STEPS)]


def run_there(function: Callable[[], float]) -> float:
    """Run a function on a thread of its own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


@pytest.mark.parametrize("policy", ["auto", "swap", "recompute", "rescue"])
def test_steps_when_an_executor_runs_them_then_they_fit_and_are_planned(
    installation: Installation, policy: str
) -> None:
    losses, training = expected(), Training()
    limit = limit_above_reserved(installation, 17 * MIB)  # what is saved takes 24 MiB
    with swapkit.budget(limit, training.model, training.optimizer, policy=policy) as session:
        with ThreadPoolExecutor(1) as executor:
            found = [executor.submit(training.step).result() for _ in range(STEPS)]
        assert session.stats.steps == STEPS
        if policy != "rescue":
            assert session.plan is not None
            assert session.stage == "stable"
    assert found == losses
    assert session.stats.peak_bytes <= limit


def test_steps_when_each_has_a_thread_of_its_own_then_they_are_planned(
    installation: Installation,
) -> None:
    losses, training = expected(), Training()
    limit = limit_above_reserved(installation, 16 * MIB)
    with swapkit.budget(limit, training.model, training.optimizer) as session:
        found = [run_there(training.step) for _ in range(STEPS)]
        assert session.plan is not None
    assert found == losses


def test_forward_when_it_ends_on_another_thread_then_no_hooks_stay_there(
    installation: Installation,
) -> None:
    training = Training()
    top = torch._C._autograd._top_saved_tensors_default_hooks

    def look() -> list[object]:
        before = top(True)
        training.forward()
        with pytest.raises(RuntimeError, match="shapes"):
            training.model(torch.ones(3))
        return [before, top(True), thread_state.sessions]

    limit = limit_above_reserved(installation, 64 * MIB)
    with (
        swapkit.budget(limit, training.model, training.optimizer),
        ThreadPoolExecutor(1) as executor,
    ):
        assert executor.submit(look).result() == [None, None, []]


@pytest.mark.parametrize("goes_on", [False, True])
def test_forward_when_it_is_interrupted_on_another_thread_then_the_next_session_plans_there(
    installation: Installation, goes_on: bool
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run_interrupted(training: Training) -> None:
        handle = training.model[3].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.step()
        handle.remove()

    with ThreadPoolExecutor(1) as executor:
        training = Training()
        limit = limit_above_reserved(installation, 64 * MIB)
        with swapkit.budget(limit, training.model, training.optimizer) as session:
            executor.submit(run_interrupted, training).result()
            found = [executor.submit(training.step).result() for _ in range(STEPS * goes_on)]
            assert (session.plan is not None) is goes_on
        assert found == expected()[: len(found)]
        assert thread_state.sessions == []
        assert executor.submit(lambda: thread_state.sessions).result() == []
        assert not any(isinstance(each, Lending) for each in global_hooks.calls.now)
        training = Training()
        with swapkit.budget(limit, training.model, training.optimizer) as session:
            found = [executor.submit(training.step).result() for _ in range(STEPS)]
            assert session.plan is not None
        assert found == expected()


def test_session_when_it_ends_in_the_middle_of_a_forward_then_that_gives_back_its_hooks(
    installation: Installation,
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            go_on.wait()
            return x.exp()

    model, x = nn.Sequential(Waiting()), torch.ones(MIB // 4, requires_grad=True)
    top = torch._C._autograd._top_saved_tensors_default_hooks

    def run() -> list[object]:
        model(x).sum().backward()
        return [top(True), thread_state.sessions]

    with ThreadPoolExecutor(1) as executor:
        with swapkit.budget(limit_above_reserved(installation, 64 * MIB), model):
            left = executor.submit(run)
            inside.wait()
        go_on.set()
        assert left.result() == [None, []]
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_step_when_its_backward_and_optimizer_run_on_the_sessions_thread_then_it_trains(
    installation: Installation,
) -> None:
    losses, training = expected(), Training()
    limit = limit_above_reserved(installation, 16 * MIB)
    found = []
    with (
        swapkit.budget(limit, training.model, training.optimizer) as session,
        ThreadPoolExecutor(1) as executor,
    ):
        for _ in range(STEPS):
            loss = executor.submit(training.forward).result()
            found.append(training.finish(loss))
        assert session.stats.steps == STEPS
    assert found == losses


def test_loss_when_a_worker_computes_it_outside_of_the_model_then_it_fits_too(
    installation: Installation,
) -> None:
    class LongLoss(Training):
        def forward(self) -> torch.Tensor:
            x = self.model[0](self.x)
            for weight in list(self.model.parameters())[2::2]:  # nobody's forward
                x = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight))
            loss: torch.Tensor = x.square().mean()
            return loss

    def train(training: LongLoss) -> list[float]:
        return [training.step() for _ in range(STEPS)]

    losses, training = train(LongLoss()), LongLoss()
    limit = limit_above_reserved(installation, 16 * MIB)
    with (
        swapkit.budget(limit, training.model, training.optimizer) as session,
        ThreadPoolExecutor(1) as executor,
    ):
        assert executor.submit(train, training).result() == losses
    assert session.stats.oom_rescues > 0
