"""A session is closed on another thread than the one whose step it records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._runtime.control.plan_controller import PlanController
from swapkit._runtime.model import global_hooks
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from tests.support.sessions import make_training, train_plainly
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from typing import Any

    from swapkit._runtime.session.session import Session

OPERATORS = 20  # of the step, before the session is closed


pytestmark = pytest.mark.usefixtures("installation")


class Closing(TorchDispatchMode):
    """Closes a session elsewhere, in the middle of an operator that is recorded."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.left = OPERATORS

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.left -= 1
        if self.left == 0:
            on_thread(self.session.close)
        return func(*args, **(kwargs or {}))


def assert_nobody_listens() -> None:
    assert global_hooks.calls.now == ()
    assert global_hooks.steps.now == ()


def make_nothing(*_: object, **__: object) -> None:
    pytest.fail("nobody wants this trace")


def test_close_when_an_operator_is_being_recorded_then_both_threads_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = train_plainly(make_training, 1)
    training = make_training()
    monkeypatch.setattr(Recorder, "trace", make_nothing)
    session = swapkit.budget("1GiB", training.model, training.optimizer, profile_steps=1)
    with Closing(session) as closing, session:
        training.step()
        assert len(mode_stack()) == 1  # the one around
        assert closing.left < 0
    assert training.outcome() == plain.outcome
    assert_nobody_listens()


def test_close_when_it_fails_elsewhere_then_the_sessions_thread_takes_its_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_controller: PlanController) -> None:
        raise ValueError("no")

    monkeypatch.setattr(PlanController, "drop", fail)
    training = make_training()
    assert training.optimizer is not None
    with swapkit.budget("1GiB", training.model, training.optimizer, profile_steps=1) as session:
        training.forward().backward()
        with pytest.raises(ValueError, match="no"):
            on_thread(session.close)
        training.optimizer.step()
        assert len(mode_stack()) == 0
        assert_nobody_listens()
