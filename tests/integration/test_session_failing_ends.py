"""Sessions whose end fails, or is interrupted: the error is seen, and nothing stays."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime.model import global_hooks
from tests.support import MIB, installed
from tests.support.idle import assert_idle, budget_bytes, has_hooks
from tests.support.sessions import make_training
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture(autouse=True)
def installation() -> Iterator[Installation]:
    with installed() as installation:
        yield installation
        assert_idle(installation)


class Flaky:
    """Fails so many times."""

    def __init__(
        self, call: Callable[..., object], times: int = 1, error: type[BaseException] = OSError
    ) -> None:
        self.call, self.times, self.error = call, times, error

    def __call__(self, *args: object) -> object:
        self.times -= 1
        if self.times >= 0:
            raise self.error("no such luck")
        return self.call(*args)


def test_session_when_leaving_fails_half_way_then_it_can_still_be_left(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = swapkit.budget("64MiB").__enter__()
    monkeypatch.setattr(installation, "leave", Flaky(installation.leave, 2))  # also when retried
    with pytest.raises(OSError, match="no such luck"):
        session.close()
    assert not has_hooks()
    assert budget_bytes() == 64 * MIB
    session.close()
    assert budget_bytes() == 0
    assert session.stats.budget_bytes == 64 * MIB


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_block_when_leaving_fails_once_then_the_error_is_raised_and_nothing_is_left(
    error: type[BaseException], installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation.tracker, "stop", Flaky(installation.tracker.stop, error=error))
    training = make_training()
    with (
        pytest.raises(error, match="no such luck"),
        swapkit.budget("1GiB", training.model, training.optimizer) as session,
    ):
        pass
    assert_idle(installation)
    assert not session.is_active
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None  # `session` has dropped it


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_session_closed_elsewhere_when_its_thread_fails_to_leave_it_then_the_next_step_does(
    error: type[BaseException],
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = make_training()
    monkeypatch.setattr(installation.tracker, "stop", Flaky(installation.tracker.stop, error=error))
    session = swapkit.budget("1GiB", training.model, training.optimizer).__enter__()
    on_thread(session.close)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            training.step()
    else:
        training.step()
        assert "no such luck" in caplog.text
    assert installation.tracker._users
    training.step()
    assert_idle(installation)
    assert global_hooks.steps.now == ()


def test_block_when_it_raises_and_leaving_fails_then_its_own_error_is_seen(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "leave", Flaky(installation.leave))
    session = swapkit.budget("64MiB")
    with pytest.raises(KeyError) as caught, session:
        raise KeyError("of the block")
    notes = caught.value.__notes__
    assert notes == ["while swapkit's session ended: OSError: no such luck"]
    session.close()


def test_block_when_it_raises_on_another_thread_than_entered_then_its_own_error_is_seen() -> None:
    session = swapkit.budget("64MiB").__enter__()

    def leave() -> None:
        with contextlib.ExitStack() as stack:
            stack.push(session)
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        on_thread(leave)
    session.close()
