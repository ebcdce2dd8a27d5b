"""Threads that bypass module hooks: they miss nothing else, and other threads' hooks run."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from swapkit._native.pool import set_tag
from swapkit._runtime.model import global_hooks, hook_bypass
from swapkit._runtime.model.tracker import NO_MODULE, ModuleTracker, Need
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle

ONE = torch.ones(1)


class Model(nn.Module):
    """Runs two modules; between them it calls a function."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.first: nn.Module = nn.Identity()
        self.second: nn.Module = nn.Identity()
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.between()
        result: torch.Tensor = self.second(x)
        return result


class Listener:
    """Lets its thread bypass the hooks in each model, and notes what it hears."""

    may_bypass = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, nn.Module]] = []
        self.raised: list[bool] = []
        self.bypassed: list[bool] = []

    def enter(self, module: nn.Module) -> None:
        self.heard.append(("enter", module))
        if isinstance(module, Model):
            self.bypassed.append(global_hooks.bypass() is not None)

    def leave(self, module: nn.Module) -> None:
        self.heard.append(("leave", module))
        call = global_hooks.this_call()
        self.raised.append(call is not None and call.has_raised)


def calls_of(*modules: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(what, each) for each in modules for what in ("enter", "leave")]


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    listener = Listener()
    global_hooks.calls.add(listener)
    yield listener
    global_hooks.calls.remove(listener)
    assert not hook_bypass.is_active()


def test_thread_when_it_rests_then_it_hears_of_the_call_but_of_none_inside(
    listener: Listener,
) -> None:
    model = Model()
    for _ in range(2):
        listener.heard.clear()
        model(ONE)
        model.first(ONE)
        assert listener.heard == calls_of(model, model.first)
    assert listener.bypassed == [True, True]


def test_thread_when_another_one_rests_then_it_hears_of_all(listener: Listener) -> None:
    other = nn.Identity()
    model = Model(lambda: on_thread(lambda: other(ONE)))
    model(ONE)
    assert ("enter", other) in listener.heard
    assert ("enter", model.second) not in listener.heard


def test_forward_when_it_raises_on_a_thread_that_rests_then_its_end_is_heard(
    listener: Listener,
) -> None:
    model = Model(lambda: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        model(ONE)
    assert listener.heard == calls_of(model)
    assert listener.raised == [True]
    model.between = bool
    model(ONE)
    assert listener.raised == [True, False]


def test_forward_when_it_is_interrupted_then_modules_are_heard_of_once_the_rest_ends(
    listener: Listener,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model = Model(interrupt)
    with suppress(KeyboardInterrupt):
        model(ONE)
    hook_bypass.end()  # as a step does
    model.between = bool
    model(ONE)
    assert listener.heard == [("enter", model), ("leave", model)] * 2
    assert listener.raised == [True, False]


def test_module_when_it_has_hooks_of_its_own_then_they_are_called(listener: Listener) -> None:
    called: list[str] = []
    model = Model()
    model.second.register_forward_pre_hook(lambda *_: called.append("before"))
    model.second.register_forward_hook(lambda *_: called.append("after"))
    model(ONE)
    assert called == ["before", "after"]
    assert listener.heard == calls_of(model)


def test_model_when_it_calls_itself_then_each_call_is_heard_of(listener: Listener) -> None:
    def call_again() -> None:
        model.between = bool
        model(ONE)

    model = Model(call_again)
    model.register_forward_pre_hook(lambda *_: None)  # so that torch looks for hooks
    model(ONE)
    assert [what for what, each in listener.heard if each is model] == ["enter"] * 2 + ["leave"] * 2


def test_hook_when_a_user_adds_it_meanwhile_then_it_is_called_until_it_is_removed(
    listener: Listener,
) -> None:
    called: list[nn.Module] = []
    model = Model()
    model(ONE)
    handle = module_hooks.register_module_forward_hook(lambda module, *_: called.append(module))
    model(ONE)
    assert called == [model.first, model.second, model]
    handle.remove()
    model(ONE)
    assert len(called) == 3
    assert listener.bypassed == [True, False, True]


def test_hook_when_a_user_adds_it_inside_then_it_is_called_from_there_on(
    listener: Listener,
) -> None:
    called: list[nn.Module] = []

    def add() -> None:
        handles.append(
            module_hooks.register_module_forward_pre_hook(lambda module, _: called.append(module))
        )

    handles: list[RemovableHandle] = []
    model = Model(add)
    model(ONE)
    handles[0].remove()
    assert listener.bypassed == [True]
    assert called == [model.second]


@pytest.mark.parametrize("leaves", [False, True], ids=["comes", "leaves"])
def test_rest_when_a_listener_comes_or_leaves_then_it_is_over(
    listener: Listener, leaves: bool
) -> None:
    other = Listener()
    other.may_bypass = leaves

    def change() -> None:
        (global_hooks.calls.remove if leaves else global_hooks.calls.add)(other)

    if leaves:
        global_hooks.calls.add(other)
    model = Model(lambda: on_thread(change))
    model(ONE)
    global_hooks.calls.remove(other)
    assert ("enter", model.first) not in listener.heard
    assert listener.heard[1:3] == calls_of(model.second)


def test_rest_when_a_listener_needs_all_modules_then_there_is_none(listener: Listener) -> None:
    other = Listener()
    other.may_bypass = False
    global_hooks.calls.add(other)
    model = Model()
    model(ONE)
    global_hooks.calls.remove(other)
    assert listener.bypassed == [False]
    assert ("enter", model.first) in other.heard


def test_rest_when_the_compiler_was_used_then_there_is_none(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: True)
    model = Model()
    model(ONE)
    assert listener.bypassed == [False]
    assert len(listener.heard) == 6


def test_tables_when_the_last_listener_leaves_then_they_are_torchs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    listener = Listener()
    global_hooks.calls.add(listener)
    Model()(ONE)
    assert listener.bypassed == [True]
    assert all(type(getattr(module_hooks, name)) is not OrderedDict for name in names)
    global_hooks.calls.remove(listener)
    assert all(type(getattr(module_hooks, name)) is OrderedDict for name in names)
    assert not any(getattr(module_hooks, name) for name in names)


# ---- names ---------------------------------------------------------------------------------------


class Expecting:
    """Knows a place or not."""

    def __init__(self) -> None:
        self.needs_modules = False
        self.site: tuple[int, int] | None = None

    def find_site(self) -> tuple[int, int] | None:
        return self.site

    def set_blind(self, *, is_blind: bool) -> None:
        """Nobody asks."""


class Bypassing:
    """Lets its thread bypass the hooks in each model."""

    may_bypass = True

    def __init__(self, tracker: ModuleTracker) -> None:
        self.tracker = tracker
        self.sites = Expecting()

    def enter(self, module: nn.Module) -> None:
        if isinstance(module, Model):
            self.tracker.bypass(self.sites)

    def leave(self, module: nn.Module) -> None:
        """Nothing is to be done."""


@pytest.fixture
def bypassing_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bypassing]:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)
    tracker = ModuleTracker()
    tracker.start("test", Need.NAMES)
    listener = Bypassing(tracker)
    global_hooks.calls.add(listener)
    yield listener
    global_hooks.calls.remove(listener)
    tracker.stop("test")
    set_tag(NO_MODULE)


class Seeing(nn.Module):
    """Notes what the tracker knows while it runs."""

    def __init__(self, see: Callable[[], object]) -> None:
        super().__init__()
        self.see = see

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.see()
        return x


def test_module_when_its_thread_rests_then_it_is_named_all_the_same(
    bypassing_thread: Bypassing,
) -> None:
    tracker = bypassing_thread.tracker
    seen: list[str] = []
    see = lambda: seen.append(tracker.name(tracker.current()))  # noqa: E731
    model = Model(see)
    model.second = Seeing(see)
    model(ONE)
    see()
    assert seen == ["Model", "second", ""]


def test_site_when_the_thread_rests_then_the_expected_one_or_counted_by_module(
    bypassing_thread: Bypassing,
) -> None:
    tracker, sites = bypassing_thread.tracker, bypassing_thread.sites
    seen: list[tuple[str, int]] = []

    def save() -> None:
        tag, index = tracker.site()
        assert set_tag(tag) == tag  # what is taken from here on is labelled with it
        seen.append((tracker.name(tag), index))

    def save_twice() -> None:
        save()
        save()

    model = Model(save_twice)
    model.second = Seeing(save_twice)
    for _ in range(2):
        model(ONE)
    assert seen == [("Model", 0), ("Model", 1), ("second", 0), ("second", 1)] * 2
    seen.clear()
    sites.site = tracker.tag_named("second"), 7
    model(ONE)
    assert seen == [("second", 7)] * 4
    assert set_tag(NO_MODULE) == NO_MODULE  # the call has ended
    seen.clear()
    Seeing(save)(ONE)
    assert seen == [("Seeing", 0)]


def test_tracker_when_somebody_needs_modules_then_it_says_so_and_the_rest_is_over(
    bypassing_thread: Bypassing,
) -> None:
    tracker, sites = bypassing_thread.tracker, bypassing_thread.sites
    seen: list[tuple[str, bool]] = []
    model = Model(lambda: tracker.start("other"))
    model.second = Seeing(
        lambda: seen.append((tracker.name(tracker.current()), hook_bypass.is_active()))
    )
    model(ONE)
    assert sites.needs_modules
    assert not tracker.may_bypass
    assert seen == [("second", False)]
    tracker.stop("other")
    assert tracker.may_bypass
    sites.needs_modules = False
    model.between = lambda: on_thread(lambda: tracker.start("other"))
    model(ONE)
    assert not sites.needs_modules  # another thread's need
    tracker.stop("other")
