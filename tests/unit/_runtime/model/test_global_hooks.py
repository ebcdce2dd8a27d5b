"""Torch's global hooks: every listener hears of every thread and of each end of a call."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import nn

from swapkit._runtime.model import global_hooks
from tests.support.listeners import NotingListener, make_optimizer
from tests.support.threads import busy_thread


def test_listener_when_modules_and_optimizers_run_then_it_hears_of_them(
    listener: NotingListener,
) -> None:
    module, here = nn.Identity(), threading.get_ident()
    module(torch.ones(1))
    stepping = make_optimizer()
    stepping.step()
    assert listener.heard == [
        ("enter", module, here),
        ("leave", module, here),
        ("before", stepping, here),
        ("after", stepping, here),
    ]


def test_listener_when_another_thread_steps_then_it_is_told_there(listener: NotingListener) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(make_optimizer().step).result()
    assert {thread for _, _, thread in listener.heard}.isdisjoint({threading.get_ident()})
    assert [what for what, _, _ in listener.heard] == ["before", "after"]


def test_listener_when_a_forward_raises_then_it_hears_of_its_end(listener: NotingListener) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(3))
    assert [what for what, _, _ in listener.heard] == ["enter", "leave"]


class Failing(nn.Module):
    """Raises what it is given, or returns nothing."""

    def forward(self, error: Exception | None) -> None:
        if error is not None:
            raise error


@pytest.mark.usefixtures("foreign_hook")
def test_call_when_listeners_begin_inside_then_they_hear_of_it_once() -> None:
    listener = NotingListener()
    inner = nn.Identity()

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            global_hooks.calls.add(listener)
            try:
                with global_hooks.AnnouncedCall(self), global_hooks.AnnouncedCall(self):
                    result: torch.Tensor = inner(x)
                return result
            finally:
                global_hooks.calls.remove(listener)

    model = Model()
    with busy_thread():  # so the hooks stay: the end is the first that torch itself tells of
        model(torch.ones(1))
        around = [("enter", model), ("enter", inner), ("leave", inner), ("leave", model)]
        assert [each[:2] for each in listener.heard] == around
        listener.heard.clear()
        model(torch.ones(1))  # of which torch tells now, though nobody listens yet
        assert [each[:2] for each in listener.heard] == around[1:3]


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_call_when_listeners_begin_inside_and_it_raises_then_they_hear_of_its_end(
    listener: NotingListener, kind: type[BaseException]
) -> None:
    module, inner = nn.Identity(), nn.Identity()
    with suppress(kind), global_hooks.AnnouncedCall(module):
        global_hooks._enter(inner, ())  # and it is interrupted, unseen
        raise kind
    assert [each[:2] for each in listener.heard] == [
        ("enter", module),
        ("enter", inner),
        ("leave", inner),
        ("leave", module),
    ]
    call = global_hooks.this_call()
    assert call is not None
    assert call.has_raised


def test_call_when_an_error_is_handled_around_it_then_only_its_own_counts() -> None:
    class Noting(NotingListener):
        def enter(self, _module: nn.Module) -> None:
            begun.append(global_hooks.this_call())

        def leave(self, _module: nn.Module) -> None:
            call = global_hooks.this_call()
            assert call is begun.pop()
            assert call is not None
            ends.append(call.has_raised)

    begun: list[global_hooks.ModuleCall | None] = []
    ends: list[bool] = []
    noting, module = Noting(), Failing()
    global_hooks.calls.add(noting)
    try:
        int("no number")
    except ValueError as error:
        module(None)
        for own in (KeyError("own"), error):
            with suppress(KeyError, ValueError):
                module(own)
    module(None)
    global_hooks.calls.remove(noting)
    assert ends == [False, True, True, False]


class Interrupted(nn.Module):
    """Raises what torch runs no hooks for, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_due = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return x


def test_listener_when_a_forward_is_interrupted_then_it_hears_of_it_with_the_next_call(
    listener: NotingListener,
) -> None:
    inner = Interrupted()
    outer = nn.Sequential(inner)
    with pytest.raises(KeyboardInterrupt):
        outer(torch.ones(1))
    outer(torch.ones(1))
    enters, leaves = [("enter", outer), ("enter", inner)], [("leave", inner), ("leave", outer)]
    assert [heard[:2] for heard in listener.heard] == [*enters, *leaves] * 2


def test_listener_when_an_interruption_is_caught_inside_then_it_hears_of_both_ends(
    listener: NotingListener,
) -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Interrupted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with suppress(KeyboardInterrupt):
                self.inner(x)
            return x

    outer = Catching()
    outer(torch.ones(1))
    assert [heard[:2] for heard in listener.heard] == [
        ("enter", outer),
        ("enter", outer.inner),
        ("leave", outer.inner),
        ("leave", outer),
    ]


def test_listener_when_a_module_calls_itself_then_each_call_ends_once(
    listener: NotingListener,
) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            result: torch.Tensor = self(x, depth - 1) if depth else x
            return result

    Recursive()(torch.ones(1))
    assert [what for what, _, _ in listener.heard] == ["enter"] * 3 + ["leave"] * 3
