"""Programs that change while a session runs: the same bits throughout, and a plan for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit._runtime.execution.plan_executor import PlanExecutor, StepReport
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.tables.clocks import HostTimer
from swapkit.planning.selection.learner import Learner
from tests.support.sessions import (
    LAYERS,
    TOKENS,
    WIDTH,
    Block,
    Training,
    make_training,
    settle,
    train,
    train_both,
    train_plainly,
)

if TYPE_CHECKING:
    from swapkit.planning.selection.cases import Outcome
    from tests.support.sessions import Log

CHANGE = 9  # the step before which a program changes
STEPS = 24
SHARE = 0.5
CALM = 4  # steps at the end, by which everything is settled

pytestmark = [pytest.mark.promise("C5"), pytest.mark.usefixtures("installation", "steady_machine")]


def assert_settled_again(log: Log) -> None:
    """Stable before the change, another plan after it, and stable again."""
    assert log.stages[CHANGE - 1] == "stable"
    assert "warmup" in log.stages[CHANGE:]
    assert log.stages[-CALM:] == ["stable"] * CALM
    assert log.rescues_since(len(log.stages) - CALM) == 0


@pytest.mark.promise("C12")
def test_sequence_when_it_gets_longer_then_it_has_a_plan_of_its_own() -> None:
    def before(training: Training, step: int) -> None:
        training.tokens = TOKENS if step < CHANGE else 2 * TOKENS

    log = train_both(make_training, SHARE, STEPS, before)
    assert_settled_again(log)


@pytest.mark.promise("C12")
def test_sequence_when_lengths_alternate_then_each_keeps_its_plan() -> None:
    def before(training: Training, step: int) -> None:
        training.tokens = (TOKENS, TOKENS // 2)[step % 2]

    log = train_both(make_training, SHARE, STEPS, before)
    assert log.stages[-CALM:] == ["stable"] * CALM
    assert log.rescues_since(STEPS - CALM) == 0
    assert log.replans[-1] == log.replans[-CALM]


def test_sequence_when_recorded_times_are_doubtful_then_each_length_is_recorded_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    begin = Recorder.begin

    def before(training: Training, step: int) -> None:
        training.tokens = (TOKENS, TOKENS // 2)[step % 2]

        def note(recorder: Recorder) -> None:
            lengths.append(training.tokens)
            begin(recorder)

        monkeypatch.setattr(Recorder, "begin", note)

    monkeypatch.setattr(HostTimer, "doubtful", frozenset(range(10_000)))
    train_both(make_training, 0.8, 12, before)
    assert sorted(lengths) == [TOKENS // 2] * 2 + [TOKENS] * 2


@pytest.mark.promise("C12")
def test_sequence_when_each_length_comes_once_then_one_plan_serves_all() -> None:
    def before(training: Training, step: int) -> None:
        training.tokens = TOKENS // 2 + 97 * step % (TOKENS // 2)

    plain = train_plainly(make_training, STEPS, before)
    training = make_training()
    follows: list[bool] = []
    with swapkit.budget(plain.budget(SHARE), training.model, training.optimizer) as session:
        assert session._active is not None
        packer = session._active.hooks.packer
        training.model[2].register_forward_hook(  # type: ignore[index]
            lambda *_: follows.append(packer.follows)
        )
        train(session, training, STEPS, before)
    assert training.outcome() == plain.outcome
    assert follows == [False] * 5 + [True] * (STEPS - 5)


class MixtureOfExperts(nn.Module):
    """Sends each token to two of four experts, whichever it likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            weighted = expert(x[tokens]) * weights[tokens, places].unsqueeze(-1)
            mixed = mixed.index_add(0, tokens, weighted)
        return x + mixed


@pytest.mark.promise("C12")
def test_experts_when_routing_changes_every_step_then_one_plan_is_followed_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Training:
        return make_training(
            lambda: nn.Sequential(*[kind() for _ in range(3) for kind in (Block, MixtureOfExperts)])
        )

    reports: list[StepReport] = []
    end_step = PlanExecutor.end_step

    def note(executor: PlanExecutor) -> StepReport:
        reports.append(end_step(executor))
        return reports[-1]

    monkeypatch.setattr(PlanExecutor, "end_step", note)
    log = train_both(make, SHARE, STEPS)
    assert log.session.plan is not None
    assert log.session.stats.swapped_out_bytes > 0
    assert log.stages[-CALM:] == ["stable"] * CALM
    # Until sizes have differed twice; no other step is recorded.
    assert sum(each.deviation is not None for each in reports) == 2
    assert log.stages.count("warmup") == 1


def test_accumulation_when_it_goes_from_one_to_four_and_back_then_planned_again() -> None:
    back = 20

    def before(training: Training, step: int) -> None:
        training.microbatches = 4 if CHANGE <= step < back else 1

    log = train_both(make_training, 0.6, 32, before)
    assert_settled_again(log)
    assert log.stages[back - 1] == "stable"
    assert "warmup" in log.stages[back:]
    assert log.replans[-1] >= 2


@pytest.mark.parametrize("has_gradients", [False, True], ids=["no_grad", "grad"])
def test_evaluation_when_it_comes_in_between_then_the_plan_stays(has_gradients: bool) -> None:
    def before(training: Training, step: int) -> None:
        if step % 3 == 2:
            training.model.eval()
            with torch.set_grad_enabled(has_gradients):
                for _ in range(2):
                    training.forward()
            training.model.train()

    log = train_both(make_training, SHARE, STEPS, before)
    assert "search" not in log.stages[CHANGE:]
    assert "warmup" not in log.stages[1:]
    assert log.session.stats.swapped_out_bytes > 0


@pytest.mark.parametrize("profile_steps", [1, 2])
def test_recorded_step_when_it_makes_the_states_then_the_next_one_is_recorded_instead(
    profile_steps: int,
) -> None:
    def make() -> Training:
        training = make_training()
        training.optimizer = torch.optim.AdamW(training.model.parameters(), foreach=True)
        return training

    log = train_both(make, SHARE, STEPS, profile_steps=profile_steps)
    session = log.session
    parameters = sum(each.nbytes for each in make_training().model.parameters())
    assert log.stages[:2] == ["warmup", "search"]
    assert session.trace is not None
    assert session.trace.bytes_before >= 3 * parameters  # with both states of each
    assert log.stages[-CALM:] == ["stable"] * CALM
    assert log.replans[-1] == 0
    assert log.rescues_since(STEPS - CALM) == 0


def test_memory_when_more_is_in_use_between_steps_then_they_are_heavier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[bool] = []
    end = Learner.end

    def note(learner: Learner, outcome: Outcome) -> None:
        found.append(outcome.is_heavier)
        end(learner, outcome)

    monkeypatch.setattr(Learner, "end", note)
    training = make_training()
    with swapkit.budget("1GiB", training.model, training.optimizer) as session:
        settle(session, training, within=CHANGE)
        found.clear()
        training.step()
        more = torch.ones(1 << 22)
        training.step()
        training.step()
        del more
        training.step()
    assert found == [False, True, True, False]


class Warming(torch.optim.AdamW):
    """Does nothing for some steps: its states come late."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, lr=1e-3)  # type: ignore[arg-type]
        self.calls = 0

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls > CHANGE:
            super().step()


def test_optimizer_when_its_states_come_late_then_planned_again_with_them() -> None:
    def make() -> Training:
        training = make_training()
        training.optimizer = Warming(training.model.parameters())
        return training

    log = train_both(make, SHARE, STEPS)
    assert_settled_again(log)
    assert log.session.trace is not None
    plan = log.session.plan
    assert plan is not None
    assert plan.decisions


def test_parameters_when_some_are_frozen_then_planned_again() -> None:
    def before(training: Training, step: int) -> None:
        if step == CHANGE:
            for block in list(training.model)[:2]:  # type: ignore[call-overload]
                block.requires_grad_(False)

    log = train_both(make_training, SHARE, STEPS, before)
    assert_settled_again(log)
    assert log.replans[-1] > log.replans[CHANGE - 1]


class Checkpointed(nn.Module):
    """Blocks that the user recomputes, from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def test_checkpoints_when_they_are_switched_on_then_planned_again() -> None:
    def before(training: Training, step: int) -> None:
        training.model.is_checkpointed = step >= CHANGE  # type: ignore[assignment]

    log = train_both(lambda: make_training(Checkpointed), SHARE, STEPS, before)
    assert_settled_again(log)
    assert log.replans[-1] > log.replans[CHANGE - 1]


def test_step_when_a_single_one_is_odd_then_the_plan_stays() -> None:
    class Logging(Training):
        def forward(self) -> torch.Tensor:
            if self.steps_done % 4 == 3:
                super().forward()  # to look at: it has no backward
            return super().forward()

    def make() -> Training:
        training = make_training()
        return Logging(training.model, training.optimizer)

    log = train_both(make, 0.6, STEPS)
    assert "warmup" not in log.stages[1:]
    assert log.stages[-CALM:] == ["stable"] * CALM


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_forward_when_it_is_interrupted_then_the_step_begins_again_with_the_next(
    error: type[BaseException],
) -> None:
    def interrupt(*_: object) -> None:
        raise error

    def before(training: Training, step: int) -> None:
        if step in {CHANGE, CHANGE + 2}:
            handle = training.model[LAYERS // 2].register_forward_pre_hook(interrupt)  # type: ignore[index]
            with pytest.raises(error):
                training.step()
            handle.remove()

    log = train_both(make_training, SHARE, STEPS, before)
    assert log.stages[CHANGE - 1 :] == ["stable"] * (STEPS - CHANGE + 1)
    assert log.replans[-1] == log.replans[CHANGE - 1]
    assert log.rescues_since(CHANGE - 1) == 0


def test_steps_when_others_for_good_then_the_log_and_the_session_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def before(training: Training, step: int) -> None:
        training.microbatches = 2 if step >= CHANGE else 1

    with caplog.at_level("INFO", logger="swapkit"):
        log = train_both(make_training, 0.6, STEPS, before)
    (reason,) = {line for line in caplog.messages if "replanning" in line and "in a row" in line}
    assert "expected the step to end" in reason
    assert "the last time, 2 steps in a row deviated" in log.session.explain()
