"""A session that is interrupted while it begins or ends: nothing of it stays."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.global_hooks import Listeners
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.operator_runs import RecordingMode
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.saved.hooks import Lending
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from tests.support.sessions import Plain, Training, make_training, train_plainly
from tests.unit._runtime.rig import count_places, interrupts

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.session.session import Session

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("C5")]

UNDOING = 600  # the last places of a session's end where it can be interrupted
PARTS = ("calls", "workspaces", "optimizers", "savings", "bytes", "storages")


@pytest.mark.parametrize("part", PARTS)
def test_recording_when_its_end_is_interrupted_then_the_rest_of_it_ends(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Recorder.begin

    def begin_doomed(recorder: Recorder) -> None:
        def interrupt() -> None:
            stop()
            if not interrupted:
                interrupted.append(part)
                raise KeyboardInterrupt

        interrupted: list[str] = []
        owner = getattr(recorder, part)
        stop = owner.stop
        owner.stop = interrupt
        begin(recorder)

    monkeypatch.setattr(Recorder, "begin", begin_doomed)
    limit = train_plainly(make_training, 1).budget(2.0)
    listeners = len(global_hooks.calls.now), len(global_hooks.steps.now)
    training = make_training()
    with swapkit.budget(limit, training.model, training.optimizer):
        training.step()
        with pytest.raises(KeyboardInterrupt):
            training.step()
    assert (len(global_hooks.calls.now), len(global_hooks.steps.now)) == listeners
    assert len(mode_stack()) == 0
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None
    assert torch.ones(2, requires_grad=True).exp().sum().requires_grad


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Lending, "start"), (Listeners, "add")],
    ids=["hooks", "calls"],
)
def test_session_when_interrupted_as_it_begins_then_no_listener_of_it_is_left(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = getattr(owner, name)
    training = make_training()
    listeners = global_hooks.calls.now, global_hooks.steps.now

    def begin_and_stop(*args: object) -> None:
        begin(*args)
        if not isinstance(args[-1], ModuleTracker):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, begin_and_stop)
        with (
            pytest.raises(KeyboardInterrupt),
            swapkit.budget("1GiB", training.model, training.optimizer),
        ):
            pass
    assert (global_hooks.calls.now, global_hooks.steps.now) == listeners
    training.step()


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let a method raise KeyboardInterrupt after its next call."""
    method, calls = getattr(owner, name), []

    def call(*args: object) -> None:
        calls.append(args)
        method(*args)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, call)


def train_steps(training: Training) -> None:
    for _ in range(8):
        training.step()


def count_operators() -> int:
    """Return the number of operators of a step."""
    training = make_training()
    with swapkit.budget(1 << 40, training.model, training.optimizer) as session:
        training.step()
        training.step()
        assert session.trace is not None
        return len(session.trace.operators)


@pytest.mark.parametrize(
    ("owner", "name", "steps"),
    [
        (RecordingMode, "leave", 1),
        (Recorder, "_read_times", 1),
        (PlanExecutor, "start", 1),
        (PlanExecutor, "_begin", 1),
        (PlanExecutor, "stop", 2),
    ],
)
def test_step_when_its_end_is_interrupted_and_training_goes_on_then_there_is_a_plan(
    owner: type, name: str, steps: int, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training()
    limit = plain.budget(0.6)
    operators = count_operators()
    with swapkit.budget(limit, training.model, training.optimizer, search_steps=4) as session:
        for _ in range(steps):
            training.step()
        interrupt_once(monkeypatch, owner, name)
        with pytest.raises(KeyboardInterrupt):
            train_steps(training)
        train_steps(training)
        assert session.stage == "stable"
        assert session.plan is not None
        assert session.trace is not None
        assert len(session.trace.operators) == operators


def traces_of_sessions(installation: Installation) -> tuple[object, ...]:
    """Return everything that a session changes while it is active."""
    return (
        global_hooks.calls.now,
        global_hooks.steps.now,
        tuple(thread_state.sessions),
        tuple(installation.runtime.active),
        tuple(installation.sessions),
        installation.pool.budget_bytes,
        len(mode_stack()),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        swapkit.sessions(),
    )


@pytest.fixture(scope="module")
def plain() -> Plain:
    swapkit.install()
    return train_plainly(make_training, 1)


def interrupt_end(nth: int, session: Session) -> bool:
    return interrupts(nth, session.close)


# Steps before the session ends, in the middle of the next one: recorded, then planned.
@pytest.mark.parametrize("steps", [1, 4], ids=["recording", "following"])
def test_session_when_its_end_is_interrupted_anywhere_then_closing_it_again_leaves_nothing(
    steps: int, installation: Installation, plain: Plain
) -> None:
    before = traces_of_sessions(installation)

    def end_in_a_step(end: Callable[[Session], int]) -> int:
        training = make_training()
        limit = plain.budget(0.95)
        session = swapkit.budget(limit, training.model, training.optimizer, search_steps=1)
        session.__enter__()
        for _ in range(steps):
            training.step()
        assert session.stage == ("warmup" if steps == 1 else "stable")
        loss = training.forward()
        result = end(session)
        session.close()
        loss.backward()
        assert traces_of_sessions(installation) == before
        model = weakref.ref(training.model)
        del training, loss
        gc.collect()
        assert model() is None
        return result

    places = end_in_a_step(lambda session: count_places(session.close))
    of_undoing = range(max(1, places - UNDOING), places, 24)  # the recording is read before
    earlier = range(1, of_undoing[0], 1 + of_undoing[0] // 6)
    tried = [*earlier, *of_undoing]
    raised = 0
    for nth in tried:
        raised += end_in_a_step(partial(interrupt_end, nth))
    assert raised > 0.9 * len(tried)


def test_rescue_when_interrupted_as_it_begins_then_it_is_made_and_the_error_is_raised() -> None:
    """Python runs a signal's handler as a function begins, before its body can keep the error."""
    plain = train_plainly(make_training, 3)
    interrupted: list[str] = []

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "sk_python_rescue" and not interrupted:
            interrupted.append(event)
            raise KeyboardInterrupt

    training = make_training()
    with swapkit.budget(
        plain.budget(0.6), training.model, training.optimizer, policy="rescue"
    ) as session:
        training.step()
        sys.settrace(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                training.step()
        finally:
            sys.settrace(None)
        assert interrupted
        assert session.stats.oom_rescues > 0
        training.step()
