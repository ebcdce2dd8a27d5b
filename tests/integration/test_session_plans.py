"""Plans that are saved and followed again, and sessions that end at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit._runtime.control import plan_maker
from swapkit._runtime.execution import plan_compiler as fitting
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit.errors import PlanMismatch
from swapkit.planning.placed import make_placed_plans
from tests.support.sessions import (
    WIDTH,
    Block,
    Plain,
    Training,
    make_training,
    settle,
    train,
    train_plainly,
)

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

STABLE_WITHIN = 8
# The search is over at once if, with the times of the recorded step, there is one candidate only.
STAGES = {"recording": {"warmup"}, "search": {"search", "stable"}}
SHARE = 0.5
PIECES = 512


pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


# ---- saved plans ---------------------------------------------------------------------------------


class Saved(NamedTuple):
    path: Path
    plan: Plan
    plain: Plain


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A plan that a session has found, and the training without a budget that it is for."""
    plain = train_plainly(make_training, 6)
    training = make_training()
    path = tmp_path / "plan.json"
    with swapkit.budget(
        plain.budget(SHARE), training.model, training.optimizer, policy="swap"
    ) as session:
        settle(session, training, STABLE_WITHIN)
        session.save_plan(path)
        assert session.plan is not None
        return Saved(path, session.plan, plain)


def test_plan_when_a_session_makes_it_then_the_ends_of_its_memory_have_room(
    saved: Saved,
) -> None:
    spare_bytes = 2 * 64 * 1024
    assert saved.plan.budget_bytes <= saved.plain.budget(SHARE) - spare_bytes


def test_plan_when_blocks_between_steps_lie_apart_then_what_is_lost_there_stays_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(trace: Trace, *, share: float, **options: Any) -> tuple[Plan, ...]:
        shares.append(share)
        return make_placed_plans(trace, share=share, **options)

    shares: list[float] = []
    monkeypatch.setattr(plan_maker, "make_placed_plans", make)
    plain, training = train_plainly(make_training, 6), make_training()
    device = require_installation().device
    granule = device.backend.granule_bytes
    budget_bytes = plain.budget(SHARE) + PIECES * 2 * granule
    with swapkit.budget(budget_bytes, training.model, training.optimizer) as session:
        training.step()
        pieces = [torch.empty(3 * granule // 2, dtype=torch.uint8) for _ in range(PIECES)]
        del pieces[::2]  # of each one's neighbours; the others' granules are partly lost
        settle(session, training, STABLE_WITHIN)
    assert device.pool is not None
    device.pool.trim()
    lost_bytes = device.pool.stats()["reserved_bytes.all.current"] - device.in_use_bytes()
    assert device.lost_bytes() == lost_bytes > plan_maker.spare_bytes(device)
    assert shares[0] <= 1 - 0.9 * lost_bytes / budget_bytes  # small blocks lie elsewhere by now


def test_saved_plan_when_it_fits_then_followed_from_the_first_step_on(saved: Saved) -> None:
    training = make_training()
    with swapkit.budget(
        saved.plain.budget(SHARE), training.model, training.optimizer, plan=saved.path
    ) as session:
        assert session.stage == "stable"
        assert session.plan == saved.plan
        log = train(session, training, 6)
        assert session.plan is not None
        assert session.stats.replans == 0
        assert session.stats.swapped_out_bytes > 0
    assert log.stages == ["stable"] * 6
    assert log.rescues_since(0) == 0
    assert training.outcome() == saved.plain.outcome


def test_saved_plan_when_for_a_larger_budget_then_refused_and_nothing_has_changed(
    saved: Saved,
) -> None:
    training = make_training()
    limit_bytes = saved.plan.budget_bytes - 1
    session = swapkit.budget(limit_bytes, training.model, training.optimizer, plan=saved.path)
    with pytest.raises(PlanMismatch, match="more than"), session:
        pytest.fail("was entered")
    assert require_installation().sessions == []
    assert "forward" not in vars(training.model)


def test_saved_plan_when_for_another_model_then_refused_with_the_module_that_is_missing(
    saved: Saved,
) -> None:
    other = nn.ModuleDict({"first": Block()})
    session = swapkit.budget("1GiB", other, plan=saved.path)
    with pytest.raises(PlanMismatch, match=r"another model: its module 0\.norm saves"), session:
        pytest.fail("was entered")


def test_saved_plan_when_no_model_is_given_then_refused(saved: Saved) -> None:
    with (
        pytest.raises(PlanMismatch, match="needs its model"),
        swapkit.budget("1GiB", plan=saved.path),
    ):
        pytest.fail("was entered")


def test_saved_plan_when_its_signature_is_without_frozen_norms_then_followed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Training:
        made = make_training(lambda: nn.Sequential(*[Block() for _ in range(5)]))
        made.model.get_submodule("0").eval()
        return made

    plain = train_plainly(make, 3)
    limit_bytes, path = plain.budget(SHARE), tmp_path / "plan.json"
    training = make()
    with monkeypatch.context() as former:  # as signatures were
        former.setattr(fitting, "_find_switched", lambda _: [])
        with swapkit.budget(limit_bytes, training.model, training.optimizer) as session:
            settle(session, training, STABLE_WITHIN)
            session.save_plan(path)
    training = make()
    with swapkit.budget(limit_bytes, training.model, training.optimizer, plan=path) as session:
        log = train(session, training, 3)
    assert log.stages == ["stable"] * 3
    assert "given plan" not in caplog.text
    assert training.outcome() == plain.outcome


@pytest.mark.promise("C5")
def test_saved_plan_when_the_first_steps_differ_then_plans_again_and_goes_on(saved: Saved) -> None:
    class More(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    def make() -> Training:
        return make_training(lambda: nn.Sequential(*[More() for _ in range(5)]))

    steps = 14
    plain = train_plainly(make, steps)
    training = make()
    with swapkit.budget(
        plain.budget(SHARE), training.model, training.optimizer, plan=saved.path
    ) as session:
        log = train(session, training, steps)
        assert session.plan != saved.plan
    assert log.stages[-1] == "stable"
    assert 1 <= log.replans[-1] <= 3
    assert log.rescues_since(steps - 3) == 0
    assert training.outcome() == plain.outcome


# ---- the end of a session ------------------------------------------------------------------------


class End(Exception):
    """What ends a session in the middle of a step."""


def steps_before(stage: str) -> int:
    """Return how many steps bring a session of two profile steps to a stage."""
    return {"warmup": 0, "recording": 1, "search": 2, "stable": STABLE_WITHIN}[stage]


class Interrupted(nn.Module):
    """A block that raises, if it is told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.raises_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        if self.raises_in == "forward":
            raise End
        if self.raises_in == "backward":
            y.register_hook(self.end)
        return y

    def end(self, _gradient: torch.Tensor) -> None:
        raise End


def make_interrupted() -> Training:
    return make_training(lambda: nn.Sequential(Block(), Block(), Interrupted(), Block(), Block()))


@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
@pytest.mark.parametrize("stage", ["warmup", "recording", "search", "stable"])
@pytest.mark.parametrize("policy", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_session_when_it_ends_at_any_moment_then_everything_is_as_before(
    policy: str, stage: str, moment: str
) -> None:
    plain = train_plainly(make_interrupted, 2)
    training = make_interrupted()
    model = training.model
    choices = str(swapkit.choices(model))
    share = SHARE if policy == "swap" else 0.75
    limit_bytes = plain.budget(share)
    session = swapkit.budget(limit_bytes, model, training.optimizer, policy=policy)

    def run() -> None:
        with session:
            for _ in range(steps_before(stage)):
                training.step()
            assert session.stage in STAGES.get(stage, {stage})
            if stage == "stable" and policy == "recompute":
                assert str(swapkit.choices(model)) != choices
            model[2].raises_in = moment  # type: ignore[index]
            if moment != "between":
                training.step()
            raise End

    with pytest.raises(End):
        run()
    model[2].raises_in = ""  # type: ignore[index]
    assert_as_before(model, choices)
    check_other_training()


def assert_as_before(model: nn.Module, choices: str) -> None:
    assert str(swapkit.choices(model)) == choices
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert len(mode_stack()) == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    installation = require_installation()
    assert installation.sessions == []
    assert not installation.tracker._users


def check_other_training() -> None:
    """Train something else without a budget; the same training twice gives the same."""
    outcomes = []
    for _ in range(2):
        other = make_training(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
        other.step()
        outcomes.append(other.outcome())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("has_model", [True, False], ids=["model", "no model"])
def test_user_modes_when_they_surround_each_step_then_all_modes_end_properly(
    has_model: bool,
) -> None:
    """A mode is ended by taking whichever is on top off the stack."""
    plain = train_plainly(make_training, 10)
    training = make_training()
    seen: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
            seen.append(1)
            return func(*args, **(kwargs or {}))

    limit_bytes = plain.budget(SHARE)
    model = training.model if has_model else None
    with swapkit.budget(limit_bytes, model, training.optimizer, policy="swap") as session:
        for _ in range(10):
            with Counting():
                training.step()
                assert seen
            assert len(mode_stack()) == 0
            seen.clear()
            torch.ones(4).add(1)
            assert not seen
        assert session.stage == ("stable" if has_model else "warmup")
    assert training.outcome() == plain.outcome


def test_user_mode_when_it_begins_in_the_recorded_step_and_ends_after_it_then_none_is_left() -> (
    None
):
    training = make_training()

    class Late(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
            return func(*args, **(kwargs or {}))

    mode = Late()
    hook = training.model[0].register_forward_hook(  # type: ignore[index]
        lambda *_: mode.__enter__() and None
    )
    with swapkit.budget("1GiB", training.model, training.optimizer, profile_steps=1) as session:
        training.step()
        hook.remove()
        mode.__exit__(None, None, None)
        training.step()
        assert len(mode_stack()) == 0
        assert session.stage == "stable"
    assert len(mode_stack()) == 0
