"""What a user has computed again, in sessions: by capture in every phase, and as recorded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.recompute import captured, regions
from swapkit._runtime.recompute.region_findings import Known, RegionFinding, RegionWay
from swapkit._runtime.saved.device import Limits
from swapkit.ir.plans import Action
from swapkit.ir.traces import Phase
from swapkit.testing import planning_at_once
from tests.support.regions import MODELS, Block
from tests.support.sessions import (
    WIDTH,
    Training,
    digest,
    steady_machine_like,
    train,
    train_plainly,
)
from tests.support.threads import on_threads

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")

SHORT = ("some", "nested")  # models that all policies train, not in the slow tier alone
STEPS = 8
SHARE = 0.8
PLENTY = 3.0
# Of what takes most memory while it is computed again.
SHARES = {"blocks": 0.99, "nested": 0.95}


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a part runs twice, as in torch's checkpoint")


@pytest.fixture(autouse=True)
def only_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be known of regions that others have run, and none go torch's way."""
    monkeypatch.setattr(captured, "_known", Known())
    monkeypatch.setattr(regions, "checkpoint", _refuse)


@pytest.fixture
def deviations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events that were not as recorded."""
    found: list[str] = []
    deviated = PlanExecutor.deviated

    def note(self: PlanExecutor, event: Any) -> None:
        deviated(self, event)
        found.append(str(self._deviation))

    monkeypatch.setattr(PlanExecutor, "deviated", note)
    return found


def make_part(name: str) -> Training:
    torch.manual_seed(0)
    model = MODELS[name]()
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1))


def is_captured(model: nn.Module) -> bool:
    """Whether no part of a model has run twice."""
    return not captured._known._alike and all(not row.twice for row in swapkit.choices(model))


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *[(name, "auto") for name in MODELS],
        *[
            pytest.param(name, "swap", marks=() if name in SHORT else pytest.mark.slow)
            for name in MODELS
        ],
        ("some", "recompute"),
    ],
)
def test_training_when_parts_are_computed_again_then_same_bits_and_steps_as_recorded(
    name: str, policy: str, deviations: list[str]
) -> None:
    make = functools.partial(make_part, name)
    plain = train_plainly(make, STEPS)
    training = make()
    limit_bytes = plain.budget(SHARES.get(name, SHARE))
    with (
        planning_at_once(),
        swapkit.budget(limit_bytes, training.model, training.optimizer, policy=policy) as session,
    ):
        log = train(session, training, STEPS)
        has_plan = session.plan is not None
    assert training.outcome() == plain.outcome
    assert is_captured(training.model)
    assert deviations == []
    assert log.stages[-1] == "stable"
    assert has_plan or name == "blocks"  # of which little can move
    if has_plan and name != "blocks":
        assert log.rescues_since(STEPS - 2) == 0


def test_plan_when_its_step_was_recorded_outside_of_a_session_then_followed_with_parts(
    deviations: list[str],
) -> None:
    plain = train_plainly(lambda: make_part("saved"), STEPS)
    limit_bytes = plain.budget(0.7)
    training = make_part("saved")
    training.step()
    trace = swapkit.record(training.step, training.model, training.optimizer)
    machine = steady_machine_like(None, Limits(budget_bytes=int(limit_bytes * 0.9)))
    made = swapkit.plan(trace, machine=machine)
    training = make_part("saved")
    with swapkit.budget(limit_bytes, training.model, training.optimizer, plan=made) as session:
        log = train(session, training, STEPS)
    assert training.outcome() == plain.outcome
    assert log.stages == ["stable"] * STEPS
    assert deviations == []


def test_plan_when_parts_keep_what_the_user_saves_then_that_moves_and_the_rest_is_no_choice() -> (
    None
):
    training = make_part("saved")
    plain = train_plainly(lambda: make_part("saved"), 2)
    with (
        planning_at_once(),
        swapkit.budget(plain.budget(0.45), training.model, training.optimizer) as session,
    ):
        train(session, training, STEPS)
        trace, plan = session._active.status().trace, session.plan  # type: ignore[union-attr]
    assert trace is not None
    assert plan is not None
    inside = {
        number
        for operator in trace.operators
        if operator.module.startswith(("2", "6")) and operator.phase is Phase.FORWARD
        for number in operator.writes
    }
    chosen = {each.storage: each.action for each in plan.decisions if each.storage in inside}
    assert Action.SWAP in chosen.values()
    assert Action.RECOMPUTE not in chosen.values()


def test_step_when_a_part_runs_for_the_first_time_then_recorded_once_more() -> None:
    training = make_part("some")
    with planning_at_once(), swapkit.budget("1GiB", training.model, training.optimizer) as session:
        training.step()
        captured._known._found.clear()  # as of calls of another kind
        training.step()
        assert session.stage == "warmup"
        training.step()
        assert session.stage == "stable"


# ---- rescues -------------------------------------------------------------------------------------


class Rescuing(nn.Module):
    """Takes away all that can be, in forward and in backward, where what it is around has run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.session: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * 1
        self.rescue()
        if out.requires_grad:
            out.register_hook(lambda _: self.rescue())
        return out

    def rescue(self) -> None:
        if self.session is not None:
            self.session.rescue(1 << 40)


def _rescue_all(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, Rescuing(child))


@pytest.mark.parametrize(
    ("host_limit", "is_known"),
    [(None, True), (None, False), (0, False)],
    ids=["known", "looked_at", "no_host"],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in MODELS],
)
def test_states_when_all_is_rescued_time_and_again_then_same_bits(
    name: str, host_limit: int | None, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Training:
        training = make_part(name)
        _rescue_all(training.model)
        return training

    plain = train_plainly(make, 3)
    training = make()
    if is_known:  # else the first run, which is looked at, is rescued as well
        found = RegionFinding(RegionWay.CAPTURED)
        monkeypatch.setattr(captured._known, "find", lambda _: found)
    with swapkit.budget(
        plain.budget(PLENTY),
        training.model,
        training.optimizer,
        policy="rescue",
        host_limit=host_limit,
    ) as session:
        for module in training.model.modules():
            if isinstance(module, Rescuing):
                module.session = session
        log = train(session, training, 3)
    assert training.outcome() == plain.outcome
    assert is_captured(training.model)
    if host_limit is None:
        assert log.session.stats.swapped_out_bytes > 0


def test_first_run_when_it_cannot_all_be_held_then_a_rescue_moves_it() -> None:
    def make() -> nn.Module:
        return swapkit.checkpoint(nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 24))

    x = torch.randn(4096, WIDTH)
    expected = gradients(make(), x)
    captured._known._found.clear()
    captured._known._alike.clear()
    model = make()
    nbytes = x.untyped_storage().nbytes()
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    with swapkit.budget(before + 12 * nbytes, model) as session:
        found = gradients(model, x)
    assert session.stats.swapped_out_bytes > 12 * nbytes
    assert found == expected
    assert is_captured(model)


def gradients(model: nn.Module, x: torch.Tensor) -> str:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
        parameter.grad = None
    model(x).square().mean().backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    assert found
    return digest(found)


# ---- odd steps -----------------------------------------------------------------------------------


class RaisesError(nn.Module):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x).tanh()
        if self.raises:
            raise ValueError("on purpose")
        return hidden.sigmoid()


def test_step_when_a_part_raises_then_the_next_ones_are_right() -> None:
    @dataclass
    class Raising(Training):
        def step(self) -> None:
            middle = self.model.get_submodule("1")
            assert isinstance(middle, RaisesError)
            if self.steps_done % 3 == 1:
                middle.raises = True
                with pytest.raises(ValueError, match="on purpose"):
                    self.forward()
                middle.raises = False
            super().step()

    def make() -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), swapkit.checkpoint(RaisesError()), Block())
        return Raising(model, torch.optim.SGD(model.parameters(), lr=0.1))

    plain = train_plainly(make, STEPS)
    training = make()
    with (
        planning_at_once(),
        swapkit.budget(plain.budget(0.8), training.model, training.optimizer) as session,
    ):
        train(session, training, STEPS)
    assert training.outcome() == plain.outcome


@dataclass
class Repeated(Training):
    """Goes back more than once through each graph, and once through the gradients."""

    def step(self) -> None:
        torch.manual_seed(self.steps_done)
        x = torch.randn(self.tokens, WIDTH, requires_grad=True)
        loss = self.model(x).square().mean()
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        self.results.append(digest(_gradients(self.model)))
        assert self.optimizer is not None
        self.optimizer.step()
        self.model.zero_grad()
        self.steps_done += 1


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("policy", ["auto", "swap", "rescue"])
def test_graph_when_it_is_gone_through_more_than_once_then_same_bits(
    policy: str, deviations: list[str]
) -> None:
    def make() -> Training:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU()) for _ in range(4)]
        model = nn.Sequential(parts[0], *map(swapkit.checkpoint, parts[1:]), nn.Tanh())
        return Repeated(model, torch.optim.SGD(model.parameters(), lr=0.1))

    plain = train_plainly(make, STEPS)
    training = make()
    with (
        planning_at_once(),
        swapkit.budget(
            plain.budget(0.9), training.model, training.optimizer, policy=policy
        ) as session,
    ):
        train(session, training, STEPS)
    assert training.outcome() == plain.outcome
    assert is_captured(training.model)
    assert deviations == []


def test_parts_when_trained_on_several_threads_in_sessions_and_without_then_same_bits() -> None:
    results: list[list[str]] = []

    def inside() -> None:
        training = trainings.pop()
        with swapkit.budget("1GiB", training.model, training.optimizer):
            run(training)

    def outside() -> None:
        run(trainings.pop())

    def run(training: Training) -> None:
        generator = torch.Generator()
        for step in range(3):
            generator.manual_seed(step)
            loss = training.model(torch.randn(512, WIDTH, generator=generator)).square().mean()
            loss.backward()
            training.results.append(float(loss.detach()).hex())
            assert training.optimizer is not None
            training.optimizer.step()
            training.model.zero_grad()
        results.append(training.results)

    trainings = [make_plain() for _ in range(5)]
    run(trainings.pop())
    on_threads(inside, inside, outside, outside)
    assert all(each == results[0] for each in results)


def make_plain() -> Training:
    """Return layers without random numbers, which threads would share."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(parts[0], *map(swapkit.checkpoint, parts[1:]), nn.Tanh())
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
