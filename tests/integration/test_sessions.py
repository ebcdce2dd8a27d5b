"""Sessions that find their plan: the bits of plain training, within the budget."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.control import plan_maker
from swapkit._runtime.machine.measured_machine import measure_machine
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit.errors import InvalidArgument, SessionError
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import BEFORE, EventKind, Phase
from tests.support import MIB
from tests.support.sessions import (
    WIDTH,
    Training,
    make_training,
    settle,
    train,
    train_both,
    train_plainly,
)

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace

STEPS = 14
STABLE_WITHIN = 8
SHARE = 0.5
ALLOWED = {
    "auto": {Action.SWAP, Action.RECOMPUTE},
    "swap": {Action.SWAP},
    "recompute": {Action.RECOMPUTE},
}


pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


class SwapLargest:
    """A user's policy: everything of some size goes out, and comes back when it is needed."""

    def __init__(self, least_bytes: int = MIB // 8) -> None:
        self.least_bytes = least_bytes
        self.calls = 0

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        self.calls += 1
        backward = next(
            number for number, each in enumerate(trace.operators) if each.phase is Phase.BACKWARD
        )
        used = {
            event.storage
            for event in trace.events
            if event.kind is EventKind.USE and event.operator >= backward
        }
        decisions = tuple(
            Decision(storage=number, action=Action.SWAP)
            for number, each in enumerate(trace.storages)
            if each.is_saved and each.birth != BEFORE and number in used
            if each.nbytes >= self.least_bytes
        )
        return Plan(decisions=decisions, budget_bytes=machine.budget_bytes, policy="largest")


@pytest.mark.promise("C1")
@pytest.mark.promise("C6")
@pytest.mark.promise("A3")
@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
def test_training_when_a_plan_is_searched_then_same_bits_stable_soon_and_no_rescue_from_then_on(
    policy: str,
) -> None:
    share = 0.75 if policy == "recompute" else SHARE
    log = train_both(make_training, share, STEPS, policy=policy)
    assert log.stages[0] == "warmup"
    assert log.stages[1] in {"search", "stable"}  # stable: one plan alone fits at addresses
    assert log.stages[STABLE_WITHIN - 1 :] == ["stable"] * (STEPS - STABLE_WITHIN + 1)
    assert log.rescues[1] > 0
    assert log.rescues_since(STABLE_WITHIN - 1) == 0
    stats = log.session.stats
    assert log.session.plan is not None
    actions = {each.action for each in log.session.plan.decisions} - {Action.KEEP}
    assert actions <= ALLOWED[policy]
    assert actions
    assert Action.RECOMPUTE not in actions or stats.recomputed_regions > 0
    assert stats.predicted_peak_bytes is not None
    assert stats.predicted_peak_bytes <= stats.budget_bytes
    assert stats.predicted_step_seconds is not None
    assert stats.bound_step_seconds is not None
    assert stats.step_seconds is not None
    assert stats.predicted_step_seconds >= stats.bound_step_seconds * 0.999
    assert stats.unlimited_step_seconds is not None
    assert stats.bound_step_seconds >= stats.unlimited_step_seconds * 0.999


def test_training_when_a_user_plans_then_that_plan_is_followed() -> None:
    policy = SwapLargest()
    log = train_both(make_training, 0.6, STEPS, policy=policy)
    assert log.stages[1] == "stable"
    assert 1 <= policy.calls <= 5
    plan = log.session.plan
    assert plan is not None
    assert plan.policy == "largest"
    assert all(each.action is Action.SWAP for each in plan.decisions)
    assert "policy SwapLargest" in log.session.explain()


def test_training_when_a_users_plan_is_not_legal_then_the_step_says_so_and_the_next_go_on() -> None:
    class Wrong:
        def plan(self, trace: Trace, machine: Machine) -> Plan:
            moved = (Decision(storage=len(trace.storages) + 1, action=Action.SWAP),)
            return Plan(decisions=moved, budget_bytes=machine.budget_bytes)

    plain = train_plainly(make_training, 4)
    training = make_training()
    limit_bytes = plain.budget(SHARE)
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy=Wrong()) as session:
        training.step()
        with pytest.raises(InvalidArgument, match="plan is invalid"):
            training.step()
        training.model.zero_grad()
        training.steps_done += 1
        assert session.stage == "stable"
        training.step()
        training.step()
        assert "plan is invalid" in session.explain()
    assert training.outcome() == plain.outcome


@pytest.mark.promise("C4")
def test_stable_steps_when_they_run_then_nothing_is_recorded() -> None:
    plain = train_plainly(make_training, 2)
    training = make_training()
    modes: list[int] = []
    training.model[1].register_forward_hook(  # type: ignore[index]
        lambda *_: modes.append(len(mode_stack()))
    )
    with swapkit.budget(
        plain.budget(SHARE), training.model, training.optimizer, policy="swap"
    ) as session:
        settle(session, training, STABLE_WITHIN)
        assert modes[:2] == [0, 1]  # the second step was recorded
        modes.clear()
        assert session._active is not None
        packer = session._active.hooks.packer
        for _ in range(5):
            training.step()
            assert packer.observer is None
            assert len(mode_stack()) == 0
        assert modes == [0] * 5


def test_budget_when_everything_fits_then_the_plan_is_empty_and_nothing_moves() -> None:
    log = train_both(make_training, 1.6, 6)
    assert log.stages == ["warmup"] + ["stable"] * 5
    stats = log.session.stats
    assert log.session.plan is not None
    assert log.session.plan.decisions == ()
    assert stats.oom_rescues == stats.swapped_out_bytes == stats.recomputed_regions == 0
    assert stats.replans == 0


def test_budget_when_no_plan_fits_then_rescue_goes_on_and_it_is_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = train_both(make_training, 0.5, 6, policy=Nothing())
    assert log.stages[1:] == ["stable"] * 5
    assert log.rescues_since(3) > 0
    assert log.session.plan is None
    assert "no plan, rescue only: too little" in caplog.text
    assert "no plan, rescue only: too little" in log.session.explain()


@pytest.mark.usefixtures("user_cache")
def test_budget_when_it_leaves_no_room_to_measure_copies_then_rescue_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_maker, "measure_machine", measure_machine)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    plain = copy.deepcopy(model)

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(5):
            model(torch.randn(64, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(plain)
    limit = swapkit.memory_stats()["allocated_bytes.all.current"] + (420 << 10)
    with swapkit.budget(limit, model) as session:
        train(model)
    assert session.stats.peak_bytes <= limit
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert "no plan, rescue only: cannot measure the speed of copies" in session.explain()


class Nothing:
    """A policy that finds no plan."""

    def plan(self, _trace: Trace, machine: Machine) -> Plan:
        raise swapkit.errors.InfeasibleBudget("too little", least_bytes=2 * machine.budget_bytes)


def test_budget_when_the_planner_finds_no_plan_then_the_smallest_budget_is_named() -> None:
    plain = train_plainly(make_training, 2)
    training = make_training()
    limit_bytes = plain.budget(0.3)
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy="recompute") as s:
        train(s, training, 4)
        assert s.stage == "stable"
        assert "the smallest budget with a plan is" in s.explain()


def test_step_when_there_is_no_optimizer_then_it_ends_where_it_is_marked() -> None:
    def make() -> Training:
        training = make_training()
        return replace_optimizer(training, None)

    log = train_both(make, SHARE, STEPS)
    assert log.stages[STABLE_WITHIN - 1 :] == ["stable"] * (STEPS - STABLE_WITHIN + 1)
    assert log.rescues_since(STABLE_WITHIN - 1) == 0
    assert log.session.stats.steps == STEPS


def replace_optimizer(training: Training, optimizer: torch.optim.Optimizer | None) -> Training:
    return replace(training, optimizer=optimizer)


def test_session_when_no_model_is_given_then_a_plan_is_found_all_the_same() -> None:
    plain = train_plainly(make_training, STEPS)
    training = make_training()
    gc.collect()
    with swapkit.budget(plain.budget(0.6), optimizer=training.optimizer) as session:
        log = train(session, training, STEPS)
        assert session.plan is not None
        assert session.plan.decisions
    assert training.outcome() == plain.outcome
    assert log.stages[STABLE_WITHIN - 1 :] == ["stable"] * (STEPS - STABLE_WITHIN + 1)
    assert log.rescues_since(STABLE_WITHIN - 1) == 0


def test_model_when_its_root_is_never_called_then_a_plan_is_found_all_the_same() -> None:
    class Inside(Training):
        def forward(self) -> torch.Tensor:
            x = torch.randn(self.tokens, 64)
            for block in self.model:  # type: ignore[attr-defined]
                x = block(x)
            return x.square().mean()

    def make() -> Training:
        training = make_training()
        return Inside(training.model, training.optimizer)

    log = train_both(make, SHARE, STEPS)
    assert log.session.plan is not None
    assert log.session.plan.decisions
    assert log.stages[-1] == "stable"
    assert log.rescues_since(STABLE_WITHIN) == 0


def test_step_when_something_is_saved_before_the_models_forward_then_that_is_nobodys() -> None:
    class Prepared(Training):
        def forward(self) -> torch.Tensor:
            weight = self.model[0].norm.weight  # type: ignore[index]
            x = (torch.randn(self.tokens, WIDTH) * weight).sin()
            loss: torch.Tensor = self.model(x.detach()).square().mean() + x.mean()
            return loss

    def make() -> Training:
        training = make_training()
        return Prepared(training.model, training.optimizer)

    log = train_both(make, 0.6, STEPS)
    assert log.stages[STABLE_WITHIN - 1 :] == ["stable"] * (STEPS - STABLE_WITHIN + 1)
    assert "warmup" not in log.stages[1:]


def test_budgets_when_nested_then_the_inner_one_plans_and_the_outer_goes_on_afterwards() -> None:
    plain = train_plainly(make_training, 3 * STEPS)
    training = make_training()
    model, optimizer = training.model, training.optimizer
    roomy, tight = plain.budget(0.8), plain.budget(SHARE)
    with swapkit.budget(roomy, model, optimizer) as outer:
        train(outer, training, STEPS)
        assert outer.stage == "stable"
        replans = outer.stats.replans
        with swapkit.budget(tight, model, optimizer) as inner:
            log = train(inner, training, STEPS)
        assert log.stages[-1] == "stable"
        assert inner.plan is not None
        assert inner.plan.budget_bytes <= tight
        log = train(outer, training, STEPS)
        assert log.stages == ["stable"] * STEPS
        assert log.replans[-1] == replans
        assert log.rescues_since(0) == 0
    assert training.outcome() == plain.outcome
    assert outer.stats.steps == 3 * STEPS


def test_plan_when_there_is_none_yet_then_it_cannot_be_saved(tmp_path: Any) -> None:
    training = make_training()
    with (
        swapkit.budget("1GiB", training.model, training.optimizer) as session,
        pytest.raises(SessionError, match="recording"),
    ):
        session.save_plan(tmp_path / "plan.json")
