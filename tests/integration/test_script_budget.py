"""The sessions of `swapkit run` find the model and the optimizers of a script by themselves."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import swapkit
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.step_counter import MOST_AHEAD
from swapkit.cli.script_budget import ScriptBudget
from swapkit.errors import PlanMismatch, SwapkitError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPTIONS = {"policy": "auto", "device": "cpu"}
LIMIT = "24MiB"
ROWS, WIDTH = 512, 64


@contextlib.contextmanager
def within(plan: str | None = None, **options: Any) -> Iterator[ScriptBudget]:
    refused: list[SwapkitError] = []

    def refuse(error: SwapkitError) -> None:
        refused.append(error)
        raise error

    budget = ScriptBudget(LIMIT, {**OPTIONS, **options}, plan=plan, refuse=refuse)
    try:
        yield budget
    finally:
        budget.close()
    assert budget not in (*global_hooks.calls.now, *global_hooks.steps.now)
    assert swapkit.sessions() == ()


def make() -> nn.Sequential:
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, rows: int = ROWS) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(rows, WIDTH)).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_new(model: nn.Module, steps: int) -> None:
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps)


def model_of(budget: ScriptBudget) -> nn.Module | None:
    return budget.find_model()


def test_script_when_it_trains_one_model_then_planned_from_the_second_step_on() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        with torch.no_grad():
            nn.Linear(4, 4)(torch.ones(4))  # a forward that trains nothing
        train(model, optimizer)
        assert budget.trainings == 1
        assert model_of(budget) is model
        assert list(budget.planned) == [optimizer]
        train(model, optimizer, 9)
        assert budget.totals().steps == 10
        assert budget.session.plan is not None
        assert budget.session.stage == "stable"
        assert budget.session.limit_bytes == 24 << 20


def test_script_when_it_has_two_optimizers_then_a_step_is_a_step_of_both() -> None:
    maker, judge = make(), make()
    first = torch.optim.SGD(judge.parameters(), 0.1)
    second = torch.optim.SGD(maker.parameters(), 0.1)
    with within() as budget:
        for number in range(8):
            loss_of(nn.Sequential(maker, judge)).backward()
            first.step()
            assert budget.trainings == (number > 0)
            loss_of(nn.Sequential(maker, judge)).backward()
            second.step()
            assert budget.trainings == 1
        assert budget.session.stats.steps == 7
        assert set(budget.planned) == {first, second}


def test_script_when_an_optimizer_never_steps_then_not_waited_for_forever() -> None:
    model = make()
    unused = torch.optim.SGD(make().parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        train(model, optimizer, 15)
        assert budget.trainings == 0
        train(model, optimizer)
        assert budget.trainings == 1
        assert unused not in budget.planned


def test_script_when_optimizers_step_in_backward_then_planned_from_the_next_forward_on() -> None:
    model = make()
    handles = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)

        def update(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        handles.append(parameter.register_post_accumulate_grad_hook(update))
    with within() as budget:
        loss_of(model).backward()
        assert budget.trainings == 0
        for _ in range(9):
            loss_of(model).backward()
        assert budget.trainings == 1
        assert budget.totals().steps == 10
        assert budget.session.plan is not None
    for handle in handles:  # else the optimizers would never be freed
        handle.remove()


def test_script_when_it_has_hooks_for_saved_tensors_then_planned_after_them() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        with torch.autograd.graph.save_on_cpu():
            train(model, optimizer, 2)
            assert budget.trainings == 0
        train(model, optimizer)
        assert budget.trainings == 1


def test_script_when_it_opens_a_session_then_that_one_plans() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        with swapkit.budget("16MiB", model, optimizer) as own:
            train(model, optimizer, 3)
        assert own.stats.steps == 3
        assert budget.has_own
        assert budget.trainings == 0


def test_script_when_it_trains_on_a_thread_then_planned_there() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        thread = threading.Thread(target=train, args=(model, optimizer, 8))
        thread.start()
        thread.join()
        assert budget.trainings == 1
        assert budget.totals().steps >= 7
        assert budget.session.plan is not None


def test_script_when_it_has_no_module_then_planned_all_the_same() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    with within() as budget:
        for _ in range(10):
            (torch.ones(ROWS, WIDTH) @ weight).tanh().sum().backward()
            optimizer.step()
        assert model_of(budget) is None
        assert budget.session.plan is not None
        assert budget.totals().steps == 10


def test_script_when_a_module_runs_again_in_backward_only_then_it_is_not_the_model() -> None:
    block, head = make(), make()
    optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()], 0.1)
    with within() as budget:
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        y.sum().backward()  # here the block first runs with gradients
        loss_of(head).backward()
        optimizer.step()
        assert budget.trainings == 1
        assert model_of(budget) is head


def test_memory_when_it_runs_out_in_the_first_step_then_rescued() -> None:
    model = nn.Sequential(*[make() for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        train(model, optimizer)
        assert budget.totals().rescues > 0
        assert budget.totals().peak_bytes <= 24 << 20


@pytest.mark.parametrize("is_same", [True, False])
def test_plan_when_given_then_followed_or_refused(is_same: bool, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    model = make()
    with within() as budget:
        train(model, torch.optim.SGD(model.parameters(), 0.1), 8)
        budget.session.save_plan(file)
    other = make() if is_same else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with within(plan=str(file)) as budget:
        if is_same:
            train(other, optimizer, 2)
            assert budget.session.stage == "stable"
            return
        with pytest.raises(PlanMismatch):
            train(other, optimizer)
        assert budget.session.is_active, "the budget holds until the script ends"


def test_plan_when_given_then_later_trainings_follow_it_where_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with within() as budget:
        train_new(make(), 8)
        budget.session.save_plan(file)
    with within(plan=str(file)) as budget:
        for number, other in enumerate([make(), make(), nn.Sequential(*list(make())[:6])]):
            train_new(other, 2)
            assert budget.trainings == number + 1
            assert (budget.session.stage == "stable") is (number < 2)
        train_new(other, 2 * MOST_AHEAD)
        assert budget.session.plan is not None


def test_session_when_the_script_drops_its_model_then_the_model_goes() -> None:
    with within() as budget:
        model = make()
        train_new(model, 10)
        assert budget.session.plan is not None
        assert budget.find_model() is model
        dropped = weakref.ref(model)
        del model
        gc.collect()
        assert dropped() is None
        assert not budget.planned


def test_script_when_another_model_trains_in_between_then_the_plan_stays() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with within() as budget:
        for _ in range(4):
            train(model, optimizer)
            train_new(make(), MOST_AHEAD - 1)
            assert budget.find_model() is model
        session = budget.session
        train(model, torch.optim.SGD(model.parameters(), 0.1), MOST_AHEAD)
        assert budget.session is session, "another optimizer of the same model"
        other = make()
        train_new(other, MOST_AHEAD)
        assert budget.find_model() is other
        assert budget.trainings == 2
        assert not session.is_active
        assert budget.totals().steps == session.stats.steps + budget.session.stats.steps + 1
