"""Sessions whose steps go as planned, or have room, hear of no module inside the model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.model import global_hooks, hook_bypass
from swapkit._runtime.model.tracker import NAMED_STEPS
from tests.support.sessions import (
    TOKENS,
    Block,
    Training,
    make_training,
    nothing,
    settle,
    train_both,
    train_plainly,
)
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

BLOCKS = 4
SETTLED = 16  # steps by which a session is stable
STEPS = 22
SHARE = 0.5
AMPLE = 2.0

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


class Listener:
    """Counts the blocks whose calls it hears of, by step."""

    may_bypass = True

    def __init__(self) -> None:
        self.blocks = [0]

    def enter(self, module: nn.Module) -> None:
        self.blocks[-1] += isinstance(module, Block)

    def leave(self, _module: nn.Module) -> None:
        """Nothing is to be done."""


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    listener = Listener()
    global_hooks.calls.add(listener)
    yield listener
    global_hooks.calls.remove(listener)


class Blocks(nn.Sequential):
    """Leaves blocks out, or runs one in a scope."""

    def __init__(self) -> None:
        super().__init__(*[Block() for _ in range(BLOCKS)])
        self.skips: set[int] = set()
        self.scoped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self):
            if number == self.scoped:
                with swapkit.offload():
                    x = block(x)
            elif number not in self.skips:
                x = block(x)
        return x


class Watched(Blocks):
    """Notes which of swapkit's functions of Python run while the blocks do, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[set[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called: set[str] = set()

        def note(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call" and "swapkit" in frame.f_globals.get("__name__", ""):
                called.add(frame.f_code.co_name)

        former = sys.getprofile()
        sys.setprofile(note)
        try:
            return super().forward(x)
        finally:
            sys.setprofile(former)
            self.called.append(called)


def counted(
    listener: Listener, before: Callable[[Training, int], object] = nothing
) -> Callable[[Training, int], None]:
    """Return what begins another count before a step."""

    def begin(training: Training, step: int) -> None:
        if step == 0:
            listener.blocks.clear()
        listener.blocks.append(0)
        before(training, step)

    return begin


def make() -> Training:
    return make_training(Blocks)


def test_modules_when_a_plan_is_followed_then_nobody_hears_of_them(listener: Listener) -> None:
    log = train_both(make, SHARE, STEPS, counted(listener))
    assert log.stages[SETTLED] == "stable"
    assert listener.blocks[:2] == [BLOCKS] * 2
    assert listener.blocks[SETTLED:] == [0] * (STEPS - SETTLED)
    assert log.session.trace is not None
    assert {each.module for each in log.session.trace.storages if each.is_saved} >= {"0", "3"}


@pytest.mark.usefixtures("listener")
def test_tensors_when_a_plan_moves_none_then_saving_them_takes_no_python() -> None:
    made: list[Training] = []

    def make_watched() -> Training:
        made.append(make_training(Watched))
        return made[-1]

    train_both(make_watched, AMPLE, STEPS)
    model = made[-1].model
    assert isinstance(model, Watched)
    assert model.called[SETTLED:] == [set()] * (STEPS - SETTLED)


def test_modules_when_a_step_goes_another_way_then_they_are_heard_of_from_there_on(
    listener: Listener,
) -> None:
    odd = SETTLED + 2

    def before(training: Training, step: int) -> None:
        assert isinstance(training.model, Blocks)
        training.model.skips = {2} if step == odd else set()

    log = train_both(make, SHARE, STEPS, counted(listener, before))
    assert log.replans[-1] == log.replans[SETTLED]
    # Left where the fourth block saves first, or the loss does; then all of a step that follows it.
    assert listener.blocks[SETTLED:odd] == [0, 0]
    assert listener.blocks[odd + 1] == BLOCKS
    assert listener.blocks[odd + 2 :] == [0] * (STEPS - odd - 2)


def test_modules_when_shapes_change_then_they_are_heard_of(listener: Listener) -> None:
    other = SETTLED + 2

    def before(training: Training, step: int) -> None:
        training.tokens = TOKENS // 2 if step == other else TOKENS

    train_both(make, SHARE, STEPS, counted(listener, before))
    assert listener.blocks[SETTLED:] == [0, 0, BLOCKS, BLOCKS, 0, 0]


def test_modules_when_one_of_several_forwards_is_run_then_each_is_followed(
    listener: Listener,
) -> None:
    def make_two() -> Training:
        training = make()
        training.microbatches = 2
        return training

    train_both(make_two, SHARE, STEPS, counted(listener))
    assert listener.blocks[SETTLED:] == [0] * (STEPS - SETTLED)


def test_modules_when_a_scope_needs_them_then_they_are_heard_of_after_one_step(
    listener: Listener,
) -> None:
    def before(training: Training, _step: int) -> None:
        assert isinstance(training.model, Blocks)
        training.model.scoped = 1

    log = train_both(make, 0.8, STEPS, counted(listener, before))
    assert log.stages[SETTLED] == "stable"
    assert listener.blocks[SETTLED:] == [BLOCKS] * (STEPS - SETTLED)


def test_modules_when_another_session_records_then_it_hears_of_its_own(listener: Listener) -> None:
    """On another thread, while this one bypasses the hooks."""
    plain = train_plainly(make_training, 3)

    def train_another() -> list[str]:
        training = make_training()
        with swapkit.budget("1GiB", training.model, training.optimizer, profile_steps=1) as session:
            settle(session, training, within=3)
        found = {each.module for each in session.trace.storages} if session.trace else set()
        assert any(name.startswith("1") for name in found)
        return training.outcome()[:2]

    training = make()
    with swapkit.budget("1GiB", training.model, training.optimizer) as session:
        settle(session, training, within=SETTLED)
        training.step()
        others: list[list[str]] = []
        handle = training.model[1].register_forward_hook(  # type: ignore[index]
            lambda *_: others.append(on_thread(train_another)) if not others else None
        )
        training.step()
        handle.remove()
        training.step()
        assert session.stage == "stable"
    assert others == [plain.outcome[:2]]
    assert listener.blocks[-1] > 0


@pytest.mark.parametrize("short", [5, 0])
def test_modules_when_a_session_without_plan_has_room_then_they_are_named_until_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    steps = 8

    def make_watched() -> Training:
        return make_training(Watched)

    def lengthen(training: Training, step: int) -> None:
        training.tokens = 4 * TOKENS if step == short else TOKENS

    usual = train_plainly(make_watched, 1)
    plain = train_plainly(make_watched, steps, lengthen)
    training = make_watched()
    rescues = []
    with swapkit.budget(
        usual.budget(AMPLE), training.model, training.optimizer, policy="rescue"
    ) as session:
        for step in range(steps):
            lengthen(training, step)
            training.step()
            rescues.append(session.stats.oom_rescues)
    assert training.outcome() == plain.outcome
    assert rescues == [0] * short + rescues[-1:] * (steps - short)
    assert rescues[-1] > 0
    assert isinstance(training.model, Watched)
    is_named = ["_enter" in called for called in training.model.called]
    # The first step may be short as it has states to make, or had weights to move.
    assert is_named == [step < NAMED_STEPS or 0 < short < step for step in range(steps)]
