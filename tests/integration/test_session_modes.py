"""Sessions below the modes of the user: each sees what it sees in plain training, and no longer."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.flop_counter import FlopCounterMode

import swapkit
from swapkit._runtime.torch_compat import dispatch_modes
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from tests.support.sessions import WIDTH, Training, make_training, train_plainly

STABLE_WITHIN = 8
SHARE = 0.5

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


@pytest.mark.usefixtures("late_modes")
@pytest.mark.parametrize("compiles", [False, True])
def test_steps_when_the_users_mode_is_around_the_forward_then_they_are_recorded_and_it_goes(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_modes, "may_compile", lambda: compiles)
    plain, training = train_plainly(make_training, STABLE_WITHIN), make_training()
    run, counts = training.forward, []

    def forward() -> torch.Tensor:
        with FlopCounterMode(display=False) as counter:
            loss = run()
        counts.append(counter.get_total_flops())
        return loss

    training.forward = forward  # type: ignore[method-assign]
    with swapkit.budget(plain.budget(SHARE), training.model, training.optimizer) as session:
        for _ in range(STABLE_WITHIN):
            training.step()
            assert not any(isinstance(mode, FlopCounterMode) for mode in mode_stack())
        assert session.plan is not None
    assert mode_stack() == []
    assert training.outcome() == plain.outcome
    assert len(set(counts)) == 1


class Calls(TorchFunctionMode):
    """Counts the calls of torch that a program makes."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["session", "checkpoint", "offload"])
def test_steps_when_a_function_mode_is_around_then_it_sees_the_programs_own_calls(way: str) -> None:
    def count(training: Training) -> list[collections.Counter[str]]:
        found = []
        for _ in range(STABLE_WITHIN):
            with Calls() as calls:
                training.step()
            found.append(calls.counts)
        return found

    training, plain = make_training(), train_plainly(make_training, 2)
    if way == "checkpoint":
        swapkit.checkpoint(next(training.model.children()))
    with (
        swapkit.budget(plain.budget(SHARE), training.model, training.optimizer)
        if way == "session"
        else swapkit.offload()
        if way == "offload"
        else contextlib.nullcontext()
    ):
        found = count(training)
    assert found == count(make_training())


class Bare(TorchDispatchMode):
    """A mode that goes on the stack without torch's `__enter__`, which torch allows."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Bare:
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("around", ["bare", "bare and counted", "fake"])
def test_forward_when_unusual_modes_are_around_then_the_stack_is_as_in_plain_training(
    around: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_modes, "may_compile", lambda: compiles)
    training = make_training()
    run = training.forward

    def forward() -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            if around == "fake":
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            else:
                stack.enter_context(Bare())
            if around != "bare":
                stack.enter_context(FlopCounterMode(display=False))
            if around != "fake":
                return run()
            training.model(torch.empty(4, WIDTH))
        return run()

    training.forward = forward  # type: ignore[method-assign]
    with swapkit.budget("1GiB", training.model, training.optimizer):
        for _ in range(4):
            training.step()
            assert not any(isinstance(mode, (Bare, FlopCounterMode)) for mode in mode_stack())
    assert mode_stack() == []


@pytest.mark.filterwarnings("ignore")  # torch's own about its hooks
def test_steps_when_they_end_in_a_compiled_call_then_they_are_recorded_and_torch_works_on() -> None:
    def make() -> Training:
        training = make_training()
        assert training.optimizer is not None
        training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")  # type: ignore[assignment, method-assign]
        return training

    plain, training = train_plainly(make, STABLE_WITHIN), make()
    with swapkit.budget(plain.budget(SHARE), training.model, training.optimizer) as session:
        for _ in range(STABLE_WITHIN):
            training.step()
            assert torch.ones(1).item() == 1
        assert session.plan is not None
    torch.compiler.reset()
    assert mode_stack() == []
    assert training.outcome() == plain.outcome


@pytest.mark.filterwarnings("ignore")  # torch's own about its hooks
def test_steps_when_each_ends_and_the_next_begins_in_one_compiled_call_then_torch_works_on() -> (
    None
):
    def train(steps: int, training: Training) -> Training:
        losses: list[torch.Tensor] = []

        def go_on() -> None:
            assert training.optimizer is not None
            training.optimizer.step()
            training.model.zero_grad()
            losses.append(training.forward())

        go_on = torch.compile(go_on, backend="eager")
        torch.manual_seed(0)
        losses.append(training.forward())
        for _ in range(steps):
            loss = losses.pop()
            loss.backward()
            training.results.append(float(loss.detach()).hex())
            del loss
            go_on()
            assert torch.ones(1).item() == 1
        return training

    plain = train(STABLE_WITHIN, make_training())
    training = make_training()
    budget = train_plainly(make_training, 2).budget(1.0)
    with swapkit.budget(budget, training.model, training.optimizer) as session:
        train(STABLE_WITHIN, training)
        assert session.stats.steps == STABLE_WITHIN
        assert session.plan is not None
    torch.compiler.reset()
    assert mode_stack() == []
    assert training.outcome() == plain.outcome()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mark_step", "close"])
def test_session_when_a_compiled_function_calls_it_then_the_compiler_leaves_it_alone(
    name: str,
) -> None:
    training = make_training()
    with swapkit.budget(1 << 30, training.model) as session:
        call = getattr(session, name)
        compiled = torch.compile(lambda: call(), backend="eager")  # noqa: PLW0108
        for _ in range(3):
            training.forward().backward()
            if name == "mark_step":
                compiled()
        if name == "close":
            compiled()
    torch.compiler.reset()
    assert session.stats.steps == (3 if name == "mark_step" else 0)
    assert mode_stack() == []
