"""Loops that libraries run, and loops of several optimizers: their steps are counted, and planned.

Each is compared with the same loop without a session: losses, whole states of models and
optimizers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import swapkit
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit.errors import InvalidArgument
from tests.support import MIB
from tests.support.sessions import step_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swapkit._runtime.session.session import Session

STEPS = 8
WIDTH = 64
ROWS = 512


pytestmark = pytest.mark.usefixtures("installation")


def count_modes() -> int:
    return len(mode_stack())


class Net(nn.Module):
    """As a model of `transformers`: a dict with the loss comes out."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.layers(x)
        return y if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def digest(*modules: nn.Module) -> str:
    states = [each for module in modules for each in module.state_dict().values()]
    content = b"".join(each.detach().contiguous().numpy().tobytes() for each in states)
    return hashlib.sha256(content).hexdigest()[:16]


def run_both(loop: Callable[[Net], None], **options: Any) -> Session:
    """Run a loop plainly and in a session that knows the model only; to the same parameters."""
    plain = make_net()
    loop(plain)
    model = make_net()
    with swapkit.budget("1GiB", model, **options) as session:
        loop(model)
    assert digest(model) == digest(plain)
    return session


def assert_planned(session: Session, steps: int = STEPS) -> None:
    assert session.stats.steps == steps
    assert session.stage == "stable"
    assert session.plan is not None


def test_trainer_when_it_makes_the_optimizer_itself_then_its_steps_count(tmp_path: Path) -> None:
    def loop(model: Net) -> None:
        rows = [{"x": x, "labels": -x} for x in batch(0)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()

    assert_planned(run_both(loop))


def test_accelerate_when_its_wrappers_are_given_then_steps_count() -> None:
    def loop(model: Net) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared = accelerator.prepare(model, optimizer)
        wrapped_model, wrapped = prepared
        if swapkit.sessions():
            return run_inside(accelerator, prepared)
        train(accelerator, wrapped_model, wrapped)
        return None

    def run_inside(accelerator: Accelerator, prepared: Any) -> None:
        with swapkit.budget("1GiB", *prepared) as session:
            train(accelerator, *prepared)
        assert_planned(session)

    def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        for step in range(2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    outer = run_both(loop)
    assert outer.stats.steps == STEPS


def test_loop_when_the_optimizer_is_made_inside_and_steps_with_a_closure_then_steps_count() -> None:
    class Task:
        """As a module of Lightning."""

        def __init__(self, model: Net) -> None:
            self.model = model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

        def training_step(self, step: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch(step)).square().mean()
            return loss

    def fit(model: Net) -> None:
        task = Task(model)
        optimizer = task.configure_optimizers()
        for step in range(STEPS):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                loss = task.training_step(step)
                loss.backward()
                return float(loss.detach())

            optimizer.step(closure)

    assert_planned(run_both(fit))


def test_loop_when_a_scaler_skips_an_update_then_the_next_one_ends_the_step() -> None:
    def loop(model: Net) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(STEPS):
            x = batch(step)
            if step in {2, 5}:
                x[0, 0] = float("inf")
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    session = run_both(loop)
    assert session.stats.steps == STEPS - 2


@pytest.mark.parametrize("gives", ["list", "tuple", "none"])
@pytest.mark.parametrize("critic_steps", [1, 3])
def test_gan_when_two_optimizers_are_given_then_a_step_has_both(
    gives: str, critic_steps: int
) -> None:
    def make() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        nets = nn.ModuleDict({"generator": Net(2), "critic": Net(2)})
        return nets, [torch.optim.Adam(nets[name].parameters()) for name in ("critic", "generator")]

    def loop(nets: nn.ModuleDict, optimizers: list[torch.optim.Optimizer]) -> None:
        for step in range(STEPS):
            for _ in range(critic_steps):
                fake = nets["generator"](batch(step)).detach()
                (nets["critic"](fake).mean() - nets["critic"](batch(-step)).mean()).backward()
                optimizers[0].step()
                nets.zero_grad()
            (-nets["critic"](nets["generator"](batch(step))).mean()).backward()
            optimizers[1].step()
            nets.zero_grad()

    plain, optimizers = make()
    loop(plain, optimizers)
    nets, optimizers = make()
    given = {"list": optimizers, "tuple": tuple(optimizers), "none": None}[gives]
    with swapkit.budget("1GiB", nets, given) as session:
        loop(nets, optimizers)
    assert digest(nets) == digest(plain)
    # Nobody gave the optimizers: each of the critic's first steps ended one.
    assert session.stats.steps == (STEPS if given else STEPS - 1 + critic_steps)
    assert session.plan is not None


def test_loop_when_the_library_makes_another_optimizer_than_given_then_its_steps_count() -> None:
    model = make_net()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    with swapkit.budget("1GiB", model, given) as session:
        remade = torch.optim.AdamW(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            remade.step()
            model.zero_grad()
    assert session.stats.steps == STEPS - 2
    assert session.plan is not None


@pytest.mark.parametrize("is_given", [True, False])
def test_loop_when_steps_end_in_backward_then_they_are_planned_without_the_model(
    is_given: bool,
) -> None:
    def loop(model: Net) -> None:
        step_in_backward(model)
        for step in range(STEPS):
            x = batch(step)
            model(x * x.sigmoid()).square().mean().backward()
            modes.append(count_modes())

    modes = [0]
    plain = make_net()
    loop(plain)
    model = make_net()
    with swapkit.budget("1GiB", model if is_given else None) as session:
        loop(model)
    assert modes[-1] == count_modes() == 0  # no recorder's stays
    assert digest(model) == digest(plain)
    assert session.stats.replans == 0
    assert_planned(session)


def test_loop_when_workers_load_data_then_their_processes_count_nothing() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(list(batch(0)), batch_size=128, num_workers=1)  # type: ignore[arg-type]
    with swapkit.budget("1GiB", model) as session:
        for x in loader:
            model(x).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    assert session.stats.steps == ROWS // 128


def test_budget_when_no_optimizer_is_in_what_is_given_then_refused() -> None:
    with pytest.raises(InvalidArgument, match="a wrapper that holds one"):
        swapkit.budget(64 * MIB, make_net(), object())  # type: ignore[arg-type]
