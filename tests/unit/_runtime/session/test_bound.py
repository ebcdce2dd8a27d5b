"""Sessions that end with the call that they belong to."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest

from swapkit._runtime.session import life
from swapkit._runtime.session.life import bind, close_left

pytestmark = pytest.mark.usefixtures("installation")  # the shim reads the stacks of threads


class Door:
    """Stands for a session."""

    limit_bytes = 1 << 20

    def __init__(self) -> None:
        self.is_active = True
        self.closers: list[int] = []

    def close(self) -> None:
        self.is_active = False
        self.closers.append(threading.get_ident())


def ask_deeper() -> None:
    close_left()


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but questions close sessions."""
    monkeypatch.setattr(life, "_watchers", [threading.current_thread()])


@pytest.mark.usefixtures("unwatched")
def test_session_when_its_call_runs_then_stays_and_afterwards_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()

    def loop() -> None:
        bind(door, sys._getframe())
        close_left()
        assert door.is_active
        ask_deeper()
        assert door.is_active

    loop()
    assert door.is_active
    with caplog.at_level(logging.WARNING, "swapkit"):
        close_left()
    assert not door.is_active
    assert "its budget of 1.00 MiB is lifted" in caplog.text


@pytest.mark.usefixtures("unwatched")
def test_session_when_another_thread_asks_then_closed_once_the_call_has_ended() -> None:
    door, may_end = Door(), threading.Event()

    def loop() -> None:
        bind(door, sys._getframe())
        is_bound.set()
        may_end.wait()

    is_bound = threading.Event()
    thread = threading.Thread(target=loop)
    thread.start()
    is_bound.wait()
    close_left()
    assert door.is_active
    may_end.set()
    thread.join()
    close_left()
    assert door.closers == [threading.get_ident()]


def test_session_when_nobody_asks_then_a_thread_closes_it_and_ends() -> None:
    door = Door()

    def loop() -> None:
        bind(door, sys._getframe())

    loop()
    while door.is_active or life._watchers:  # the suite's limit ends this
        time.sleep(0.01)
    assert door.closers != [threading.get_ident()]


@pytest.mark.usefixtures("unwatched")
def test_session_when_its_end_fails_then_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Door):
        def close(self) -> None:
            super().close()
            raise OSError("stuck")

    door = Stuck()

    def loop() -> None:
        bind(door, sys._getframe())

    loop()
    close_left()
    assert "cleanup failed after a session ended" in caplog.text
