"""When torch has the hooks of the listeners: no thread's iteration over its hooks breaks."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from swapkit._runtime.model import global_hooks
from swapkit._runtime.torch_compat.thread_stacks import others_wait
from tests.support.listeners import NotingListener, make_optimizer
from tests.support.threads import busy_thread, on_thread
from tests.unit._runtime.rig import interrupts

if TYPE_CHECKING:
    from types import FrameType

TABLES = (
    (module_hooks, "_global_forward_pre_hooks"),
    (module_hooks, "_global_forward_hooks"),
    (optimizer_hooks, "_global_optimizer_pre_hooks"),
    (optimizer_hooks, "_global_optimizer_post_hooks"),
)


def tables() -> list[dict[int, object]]:
    return [getattr(torchs, name) for torchs, name in TABLES]


def sizes() -> list[int]:
    return [len(table) for table in tables()]


def test_listeners_when_they_come_and_go_in_a_step_then_the_step_goes_on(
    listener: NotingListener,
) -> None:
    """Torch iterates over its hooks meanwhile; a hook of somebody else's comes last."""

    class Restless(NotingListener):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().before_step(optimizer)
            global_hooks.steps.add(other)

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().after_step(optimizer)
            global_hooks.steps.remove(other)

    other, restless = NotingListener(), Restless()
    global_hooks.steps.add(restless)
    foreign = optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: None)
    make_optimizer().step()
    foreign.remove()
    global_hooks.steps.remove(restless)
    assert [what for what, _, _ in restless.heard] == ["before", "after"]
    assert [what for what, _, _ in other.heard] == ["after"]
    assert [what for what, _, _ in listener.heard] == ["before", "after"]


def test_listener_when_the_last_one_leaves_inside_a_step_then_the_step_goes_on() -> None:
    """Torch iterates over its hooks meanwhile, on this thread or on one that waits in a hook."""
    before, listener = sizes(), NotingListener()
    global_hooks.steps.add(listener)

    def leave(*_: object) -> None:
        on_thread(lambda: global_hooks.steps.remove(listener))
        global_hooks.steps.remove(listener)

    handles = [
        optimizer_hooks.register_optimizer_step_post_hook(each) for each in (leave, lambda *_: None)
    ]
    make_optimizer().step()
    for handle in handles:
        handle.remove()
    global_hooks.steps.add(listener)
    global_hooks.steps.remove(listener)  # outside of steps the hooks go
    assert sizes() == before


def test_hooks_when_the_last_listener_leaves_then_torch_has_none_of_ours() -> None:
    before, listener = sizes(), NotingListener()
    global_hooks.calls.add(listener)
    global_hooks.steps.add(listener)
    assert sizes() == [each + 1 for each in before]
    global_hooks.calls.remove(listener)
    global_hooks.steps.remove(listener)
    assert sizes() == before


def test_hooks_when_they_come_again_then_with_the_same_numbers() -> None:
    """Code that was compiled where torch has hooks is compiled for their numbers."""
    listener, found = NotingListener(), []
    for _ in range(2):
        for each in (global_hooks.calls, global_hooks.steps):
            each.add(listener)
        found.append([list(table) for table in tables()])
        assert list(module_hooks._global_forward_hooks_always_called) == found[-1][1]
        for each in (global_hooks.calls, global_hooks.steps):
            each.remove(listener)
    assert found[0] == found[1] != [[]] * len(TABLES)


def test_hooks_when_they_leave_then_an_iteration_over_torchs_tables_goes_on() -> None:
    """As another thread's `optimizer.step()`, or the end of a forward that raised."""
    listener = NotingListener()
    global_hooks.calls.add(listener)
    global_hooks.steps.add(listener)
    iterations = [iter(table.items()) for table in tables()]
    with busy_thread():
        global_hooks.calls.remove(listener)
        global_hooks.steps.remove(listener)
    assert [len(list(each)) for each in iterations] == [1] * len(TABLES)
    assert sizes() == [0] * len(TABLES)
    assert not module_hooks._global_forward_hooks_always_called


@pytest.mark.usefixtures("foreign_hook")
def test_hooks_when_a_user_has_one_and_another_thread_runs_then_torchs_tables_stay() -> None:
    """The thread may be iterating over them."""
    before, listener = sizes(), NotingListener()
    with busy_thread():
        global_hooks.calls.add(listener)
        inside = sizes()
        global_hooks.calls.remove(listener)
        assert sizes() == inside
        nn.Identity()(torch.ones(1))
        assert listener.heard == []
        global_hooks.calls.add(listener)
        assert sizes() == inside  # not twice
    global_hooks.calls.remove(listener)
    assert sizes() == before


def test_hooks_when_the_other_threads_wait_then_they_leave_with_the_last_listener() -> None:
    before, listener = sizes(), NotingListener()
    global_hooks.steps.add(listener)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(make_optimizer().step).result()
        while not others_wait():  # the executor's thread is about to wait for work
            pass
        global_hooks.steps.remove(listener)
    assert sizes() == before


def test_hooks_when_interrupted_anywhere_as_they_come_and_go_then_torch_keeps_none() -> None:
    """Not even a note on a hook that is gone, which torch takes for a hook."""
    first, second = NotingListener(), NotingListener()

    def come_and_go() -> None:
        for listeners in (global_hooks.calls, global_hooks.steps):
            listeners.add(first)
            listeners.remove(first)

    count = 0
    while interrupts(count + 1, come_and_go):
        count += 1
        for listeners in (global_hooks.calls, global_hooks.steps):
            listeners.remove(first)
        assert sizes() == [0] * len(TABLES)
        assert not module_hooks._has_any_global_hook()
        global_hooks.steps.add(second)
        make_optimizer().step()
        global_hooks.steps.remove(second)
    assert [what for what, _, _ in second.heard] == ["before", "after"] * count
    assert count > 50


def test_hooks_when_they_come_and_go_then_a_warning_is_shown_once_as_without() -> None:
    listener = NotingListener()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            global_hooks.calls.add(listener)
            warnings.warn("once", UserWarning, stacklevel=1)
            global_hooks.calls.remove(listener)
    assert [str(each.message) for each in shown] == ["once"]


def test_compiled_module_when_global_hooks_are_ours_then_torch_does_not_warn_of_them() -> None:
    listener, x = NotingListener(), torch.ones(2, 4)
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    global_hooks.calls.add(listener)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")  # of the user's, after our hooks
        compiled(x)
        assert not shown
        for register in (
            module_hooks.register_module_forward_hook,
            module_hooks.register_module_full_backward_hook,
        ):
            with register(lambda *_: None):
                compiled(x)
        global_hooks.calls.remove(listener)
        with module_hooks.register_module_forward_hook(lambda *_: None):
            compiled(x)
        compiled(x)
    assert ["there are global hooks" in str(each.message) for each in shown] == [True] * 3


@pytest.mark.parametrize(
    ("listeners", "register", "table"),
    [
        (global_hooks.calls, module_hooks.register_module_forward_hook, TABLES[1]),
        (global_hooks.steps, optimizer_hooks.register_optimizer_step_post_hook, TABLES[3]),
    ],
    ids=["module", "optimizer"],
)
def test_hook_of_a_user_when_registered_as_ours_leave_then_its_handle_removes_it(
    listeners: Any, register: Any, table: tuple[Any, str]
) -> None:
    """Torch makes the handle for a table, and reads the table again to add the hook."""
    listener = NotingListener()
    listeners.add(listener)
    has_handle, has_left = threading.Event(), threading.Event()

    def wait_inside(frame: FrameType, _event: str, _argument: object) -> Any:
        if frame.f_code is not register.__code__:
            return None
        if "handle" in frame.f_locals and not has_handle.is_set():
            has_handle.set()
            has_left.wait()
        return wait_inside

    def use() -> None:
        sys.settrace(wait_inside)
        handle = register(lambda *_: None)
        sys.settrace(None)
        handle.remove()

    user = threading.Thread(target=use)
    user.start()
    has_handle.wait()
    listeners.remove(listener)
    has_left.set()
    user.join()
    assert len(getattr(*table)) == 1  # ours: they leave with the next listener
    listeners.add(listener)
    listeners.remove(listener)
    assert not getattr(*table)


def test_hooks_when_the_last_listener_leaves_as_torch_handles_an_error_then_all_hooks_run() -> None:
    listener, ran = NotingListener(), []

    class Mine(ValueError):
        """Raised by the forward."""

    class Failing(nn.Module):
        def forward(self) -> None:
            raise Mine

    def leave(*_: object) -> None:
        global_hooks.calls.remove(listener)

    global_hooks.calls.add(listener)
    with (
        module_hooks.register_module_forward_hook(leave, always_call=True),
        module_hooks.register_module_forward_hook(lambda *_: ran.append(1), always_call=True),
        pytest.raises(Mine),
    ):
        Failing()()
    assert ran == [1]
    global_hooks.calls.add(listener)
    global_hooks.calls.remove(listener)
    assert sizes() == [0] * len(TABLES)
