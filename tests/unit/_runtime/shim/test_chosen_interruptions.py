"""Choices for operators: interruptions while one is looked up, and ends on other threads."""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import innermost_placement
from swapkit._runtime.user_choices.operator_choices import ChosenOperators, mark_operators
from swapkit.ir.plans import Action
from swapkit.registry import Recompute
from tests.support.captured import capture, choosing, is_captured, pack, unpack
from tests.support.operators import rows_of
from tests.support.threads import on_thread
from tests.unit.scoped import assert_gone

if TYPE_CHECKING:
    from collections.abc import Callable

aten: Any = torch.ops.aten
pytestmark = pytest.mark.usefixtures("installation")


def numbers() -> torch.Tensor:
    return torch.rand(32, 32, generator=torch.Generator().manual_seed(0))


# ---- being interrupted ---------------------------------------------------------------------------


class Stopped(Exception):
    """What a signal handler raises."""


class Handler:
    """A signal handler that is an object."""

    def __init__(self, handle: Callable[[int, Any], None]) -> None:
        self._handle = handle

    def __call__(self, number: int, frame: object) -> None:
        self._handle(number, frame)


def once(handle: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return a handler that takes itself off."""

    def handle_once(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        handle(number, frame)

    return handle_once


@pytest.mark.parametrize("make", [lambda handle: handle, Handler, functools.partial, once])
@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
def test_operator_when_a_signal_handler_raises_while_it_is_looked_up_then_that_is_raised(
    error: type[BaseException], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def stop(number: int, _frame: object) -> None:
        calls.append(number)
        raise error

    def current() -> int:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError

    def run() -> None:
        with choosing():
            monkeypatch.setattr(get_runtime().tracker, "current", current)
            x * 2.0
            for _ in range(2):  # as soon as Python goes on
                len(calls)

    former = signal.signal(signal.SIGUSR1, make(stop))
    x = numbers()
    try:
        with pytest.raises(error):
            run()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert calls == [signal.SIGUSR1]
    (packed,), (made,) = capture(aten.mul.Tensor, x, 2.0)
    assert torch.equal(unpack(packed), made)


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
def test_operator_when_its_thread_is_stopped_while_it_is_looked_up_then_that_thread_stops(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> int:
        monkeypatch.undo()
        number = ctypes.c_ulong(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(error))
        for _ in range(2):  # as soon as Python goes on
            len("")
        raise AssertionError

    def run() -> None:
        with choosing():
            monkeypatch.setattr(get_runtime().tracker, "current", stop)
            numbers() * 2.0
            for _ in range(2):
                len("")

    def expect() -> None:
        with pytest.raises(error):
            run()

    on_thread(expect)


# ---- ending --------------------------------------------------------------------------------------


def test_choosing_when_it_ends_while_an_operator_is_looked_up_then_it_holds_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = numbers()
    rows = ChosenOperators(rows_of({"add": Recompute()}))
    forgotten = mark_operators(rows)
    tracker = get_runtime().tracker

    def current() -> int:
        monkeypatch.undo()
        forgotten.__exit__(None, None, None)
        return tracker.current()

    with choosing("add") as outer:
        forgotten.__enter__()
        monkeypatch.setattr(tracker, "current", current)
        x + 1
        assert is_captured(pack(x + 1))
        assert (sum(rows.seen.values()), sum(outer.seen.values())) == (0, 1)


def test_choosing_when_another_thread_ends_it_then_it_holds_no_more_and_the_others_do() -> None:
    x = numbers()
    rows = ChosenOperators(rows_of({"add": Recompute()}))

    def end() -> None:
        with choosing("add"):
            forgotten.__exit__(None, None, None)
            assert is_captured(pack(x + 1))

    with choosing("add") as outer:
        forgotten = mark_operators(rows)
        forgotten.__enter__()
        on_thread(end)
        assert is_captured(pack(x + 1))
        assert (sum(rows.seen.values()), sum(outer.seen.values())) == (0, 1)
    assert not is_captured(pack(x + 1))


def test_choosing_when_a_thread_with_a_scope_ends_it_then_that_scope_stays() -> None:
    forgotten = mark_operators(ChosenOperators(rows_of({"add": Recompute()})))
    forgotten.__enter__()

    def end() -> None:
        with swapkit.offload():
            forgotten.__exit__(None, None, None)
            choice = innermost_placement()
            assert choice is not None
            assert choice.action is Action.SWAP

    on_thread(end)
    assert innermost_placement() is None
    with choosing():  # what is left of it goes where this thread next looks
        pass
    assert_gone()
