"""Training with offloaded optimizer states: the bits of plain training, without their memory."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.optimizer.chunked_step import OptimizerStates, attach
from swapkit._runtime.optimizer.state_slots import HostCopies
from swapkit._runtime.process.runtime import get_runtime
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._native.sched import Scheduler
    from swapkit._runtime.allocators.installed_pool import Installation

WIDTH = 96
CHUNK_BYTES = 64 << 10  # less than a layer's states: every step has several chunks
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, amsgrad": ("AdamW", {"amsgrad": True, "maximize": True}),
    "Adam": ("Adam", {"weight_decay": 0.1}),
    "SGD": ("SGD", {"momentum": 0.9}),
    "SGD, foreach": ("SGD", {"momentum": 0.9, "dampening": 0.1, "foreach": True}),
    "SGD, fused": ("SGD", {"momentum": 0.9, "fused": True}),
    "Adafactor": ("Adafactor", {}),
    "Adafactor, foreach": ("Adafactor", {"foreach": True}),
}


class Trainer:
    """A small model, its optimizer, and the batches that belong to each step."""

    def __init__(self, kind: str, *, groups: bool = False, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=kind != "Muon") for _ in range(4)]
        self.model = nn.Sequential(*layers)
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / WIDTH**0.5)
        params: Any = list(self.model.parameters())
        if groups:
            params = [
                {"params": list(layers[0].parameters()), "lr": 0.003, "weight_decay": 0.0},
                {"params": [p for layer in layers[1:3] for p in layer.parameters()], "lr": 0.001},
                {"params": list(layers[3].parameters()), "eps": 1e-6},
            ]
        self.is_sparse = kind == "SparseAdam"
        self.needs_closure = kind == "LBFGS"
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(params, **options)
        self.losses: list[float] = []

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.losses))
        batch = torch.randn(8, WIDTH, generator=generator)
        result: torch.Tensor = self.model(batch).square().mean()
        return result

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if self.is_sparse:
            for param in self.model.parameters():
                param.grad = None if param.grad is None else param.grad.to_sparse()
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            if self.needs_closure:
                closure: Any = self.closure
                loss: Any = self.optimizer.step(closure)
            else:
                loss = self.closure()
                self.optimizer.step()
            self.losses.append(loss.item())


class Outcome(NamedTuple):
    losses: list[float]
    tensors: list[torch.Tensor]


def outcome(trainer: Trainer) -> Outcome:
    """Return all numbers of a training run."""
    state = trainer.optimizer.state_dict()["state"]
    values = [value for each in state.values() for value in each.values()]
    states = [value for value in values if torch.is_tensor(value)]
    return Outcome(trainer.losses, [*trainer.model.state_dict().values(), *states])


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    a, b = outcome(ours), outcome(theirs)
    assert a.losses == b.losses
    assert len(a.tensors) == len(b.tensors)
    assert all(map(torch.equal, a.tensors, b.tensors))


@pytest.fixture
def scheduler(installation: Installation) -> Scheduler:
    return installation.device.new_scheduler()


def copies_over(scheduler: Scheduler) -> HostCopies:
    return HostCopies(scheduler, get_runtime().cpu)


@pytest.fixture
def offload(scheduler: Scheduler) -> Callable[[Trainer], Trainer]:
    """Offload the states of a trainer's optimizer."""

    def offload(trainer: Trainer) -> Trainer:
        # Even the vectors that Adafactor keeps for these small matrices.
        OptimizerStates(
            trainer.optimizer,
            copies_over(scheduler),
            chunk_bytes=CHUNK_BYTES,
            min_bytes=128,
        )
        return trainer

    return offload


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_when_states_are_offloaded_then_the_bits_are_those_of_plain_torch(
    scheduler: Scheduler, offload: Callable[[Trainer], Trainer], kind: str
) -> None:
    options = OPTIMIZERS[kind]
    ours, plain = offload(Trainer(kind, **options)), Trainer(kind, **options)
    for trainer in (ours, plain):
        trainer.train(3)
    assert_same(ours, plain)
    assert scheduler.stats().copied_in_bytes > 0


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "three groups"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_when_it_is_long_then_the_bits_are_those_of_plain_torch(
    offload: Callable[[Trainer], Trainer], variant: str, *, groups: bool
) -> None:
    kind, options = VARIANTS[variant]
    groups = groups and kind == "AdamW"
    ours, plain = (Trainer(kind, groups=groups, **options) for _ in range(2))
    offload(ours)
    for trainer in (ours, plain):
        trainer.train(10)
    assert_same(ours, plain)


def test_training_when_gradients_accumulate_then_the_bits_are_those_of_plain_torch(
    offload: Callable[[Trainer], Trainer],
) -> None:
    ours, plain = offload(Trainer("AdamW")), Trainer("AdamW")
    for trainer in (ours, plain):
        for _ in range(3):
            for _ in range(2):
                loss = trainer.loss()
                loss.backward()
                trainer.losses.append(loss.item())
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    assert_same(ours, plain)


def test_training_when_a_closure_computes_the_loss_then_the_bits_are_those_of_plain_torch(
    offload: Callable[[Trainer], Trainer],
) -> None:
    ours, plain = offload(Trainer("AdamW")), Trainer("AdamW")
    for trainer in (ours, plain):
        trainer.needs_closure = True
        trainer.train(4)
    assert_same(ours, plain)


def test_training_when_some_parameters_are_frozen_for_a_while_then_the_bits_are_the_same(
    offload: Callable[[Trainer], Trainer],
) -> None:
    ours, plain = offload(Trainer("AdamW")), Trainer("AdamW")
    for trainer in (ours, plain):
        for step in range(6):
            trainer.model[1].requires_grad_(step % 2 == 0)
            trainer.train(1)
    assert_same(ours, plain)


@pytest.mark.parametrize("order", ["before", "after"])
def test_scheduler_when_it_is_made_before_or_after_then_it_sees_every_step(
    offload: Callable[[Trainer], Trainer], order: str
) -> None:
    ours, plain = Trainer("AdamW"), Trainer("AdamW")
    for trainer in (ours, plain):
        if trainer is ours and order == "after":
            offload(trainer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, 0.1, total_steps=6)
        if trainer is ours and order == "before":
            offload(trainer)
        for _ in range(5):
            trainer.train(1)
            scheduler.step()
    assert_same(ours, plain)
    assert ours.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_scaler_when_a_step_overflows_then_it_is_skipped_as_in_plain_torch(
    offload: Callable[[Trainer], Trainer], options: dict[str, Any]
) -> None:
    ours, plain = offload(Trainer("AdamW", **options)), Trainer("AdamW", **options)
    for trainer in (ours, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            trainer.optimizer.zero_grad()
            loss = trainer.loss() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
            trainer.losses.append(scaler.get_scale())
    assert_same(ours, plain)
    assert ours.losses[2] < ours.losses[1]


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_state_dict_when_it_is_loaded_elsewhere_then_training_goes_on_with_the_same_bits(
    offload: Callable[[Trainer], Trainer], *, is_offloaded: bool
) -> None:
    plain = Trainer("AdamW", groups=True, amsgrad=True)
    plain.train(6)
    first = offload(Trainer("AdamW", groups=True, amsgrad=True))
    first.train(3)
    second = Trainer("AdamW", groups=True, amsgrad=True)
    if is_offloaded:
        offload(second)
        second.train(1)  # what is loaded replaces states that are on the host
    second.losses = list(first.losses)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.train(3)
    assert_same(second, plain)


def test_detach_when_training_goes_on_then_the_bits_are_the_same(scheduler: Scheduler) -> None:
    ours, plain = Trainer("AdamW"), Trainer("AdamW")
    states = attach(ours.optimizer, copies_over(scheduler), chunk_bytes=CHUNK_BYTES)
    ours.train(3)
    states.detach()
    copied_bytes = scheduler.stats().copied_in_bytes
    ours.train(2)
    plain.train(5)
    assert_same(ours, plain)
    assert scheduler.stats().copied_in_bytes == copied_bytes


def test_step_when_it_is_compiled_then_the_numbers_are_right(scheduler: Scheduler) -> None:
    ours, plain = Trainer("SGD", momentum=0.9), Trainer("SGD", momentum=0.9)
    attach(ours.optimizer, copies_over(scheduler), chunk_bytes=CHUNK_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own hooks
        for trainer in (ours, plain):
            step = torch.compile(trainer.optimizer.step, backend="eager")
            for _ in range(3):
                trainer.losses.append(float(trainer.closure()))
                step()
    torch.compiler.reset()
    assert_same(ours, plain)


def test_session_when_states_are_offloaded_then_a_budget_without_them_is_enough(
    installation: Installation,
) -> None:
    def train(*, is_offloaded: bool) -> tuple[Trainer, int]:
        gc.collect()
        installation.pool.trim()
        before = installation.pool.stats()["reserved_bytes.all.current"]
        trainer = Trainer("AdamW")
        trainer.train(1)
        if is_offloaded:
            copies = copies_over(installation.device.new_scheduler())
            attach(trainer.optimizer, copies, chunk_bytes=CHUNK_BYTES)
        installation.pool.trim()
        limit_bytes = installation.pool.stats()["reserved_bytes.all.current"] + MIB // 2
        with swapkit.budget(limit_bytes, trainer.model, trainer.optimizer) as session:
            trainer.train(3)
        assert session.stats.peak_bytes <= limit_bytes
        assert session.stats.steps == 3
        return trainer, limit_bytes - before

    ours, our_bytes = train(is_offloaded=True)
    plain, plain_bytes = train(is_offloaded=False)
    assert_same(ours, plain)
    assert our_bytes < plain_bytes


class Peaks(NamedTuple):
    allocated_bytes: int
    reserved_bytes: int


def train_large(installation: Installation, scheduler: Scheduler | None) -> Peaks:
    """Train 64 layers of 1 MiB under AdamW; return the peaks, without what there was before."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(64)])
    optimizer = torch.optim.AdamW(model.parameters())
    if scheduler is not None:
        attach(optimizer, copies_over(scheduler))
    installation.pool.trim()
    before = installation.pool.stats()
    installation.pool.reset_peak()
    for _ in range(2):
        model(torch.ones(4, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = installation.pool.stats()
    return Peaks(
        *(
            after[f"{name}_bytes.all.peak"] - before[f"{name}_bytes.all.current"]
            for name in ("allocated", "reserved")
        )
    )


def test_peak_when_states_are_offloaded_then_it_is_less_by_the_bytes_of_the_states(
    installation: Installation, scheduler: Scheduler
) -> None:
    states_bytes = 2 * 64 * MIB
    gc.collect()
    plain = train_large(installation, None)
    gc.collect()
    ours = train_large(installation, scheduler)
    for saved in (p - o for p, o in zip(plain, ours, strict=True)):
        assert abs(saved - states_bytes) <= 0.02 * states_bytes
