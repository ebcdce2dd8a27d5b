"""What the other threads of the process do."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch

from swapkit._runtime.torch_compat.thread_stacks import (
    backward_runs_elsewhere,
    others_wait,
    receivers,
    stacks,
    take_while,
)
from tests.support import run_fresh
from tests.support.threads import Worker, busy_thread

pytestmark = pytest.mark.usefixtures("installation")  # the shim reads stacks


def test_threads_when_they_wait_for_one_another_then_they_are_known_to() -> None:
    release, ready = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        release.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    while not others_wait():  # between the two lines of `wait`
        pass
    release.set()
    thread.join()
    assert others_wait()


def test_threads_when_they_belong_to_the_processes_of_compilers_then_they_wait() -> None:
    code = """
        import threading, time, torch
        from torch._inductor.compile_worker.subproc_pool import SubprocPool
        import swapkit
        from swapkit._runtime.torch_compat.thread_stacks import others_wait

        swapkit.install()
        pool = SubprocPool(1, quiesce=True)
        pool.timer.record_call()  # as with the first compilation
        print(threading.active_count() >= 3)
        end = time.monotonic() + 60
        while not others_wait() and time.monotonic() < end:
            time.sleep(0.01)
        print(others_wait())
        pool.shutdown()
    """
    assert run_fresh(code) == "True\nTrue\n"


def test_threads_when_one_computes_then_not_all_wait() -> None:
    with busy_thread():
        assert not others_wait()
        assert not backward_runs_elsewhere()


def test_threads_when_one_is_in_a_backward_pass_then_it_is_known_to() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(_grad: torch.Tensor) -> None:
        inside.set()
        go_on.wait()

    x = torch.ones(2, requires_grad=True)
    x.register_hook(wait)
    thread = threading.Thread(target=x.sum().backward)
    thread.start()
    inside.wait()
    assert backward_runs_elsewhere()
    go_on.set()
    thread.join()
    assert not backward_runs_elsewhere()


def test_items_when_others_wake_up_then_no_more_are_looked_at() -> None:
    answers = iter([True, False])
    seen = list(take_while(lambda: next(answers), range(1000)))
    assert 0 < len(seen) < 1000


def test_backward_when_it_is_this_threads_own_then_it_runs_not_elsewhere() -> None:
    found: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _grad: found.append(backward_runs_elsewhere()))
    x.sum().backward()
    assert found == [False]


def test_threads_when_one_computes_without_torch_then_it_does_not_count() -> None:
    """As the threads of a kernel for notebooks do, of a logger, or of a test's distributor."""
    namespace: dict[str, Any] = {"stop": []}
    exec("def spin():\n    while not stop:\n        pass", namespace)
    thread = threading.Thread(target=namespace["spin"])
    thread.start()
    try:
        assert others_wait()
    finally:
        namespace["stop"].append(True)
        thread.join()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there no call starts the collector")
def test_stacks_when_the_collector_is_due_then_it_waits_until_they_are_read() -> None:
    """Its finalizers let others run; a frame that had gone meanwhile was read, which crashed."""
    is_reading, runs = False, []
    thresholds = gc.get_threshold()

    def note(_phase: str, _info: object) -> None:
        runs.append(is_reading)

    gc.callbacks.append(note)
    with busy_thread():
        gc.set_threshold(1)
        try:
            for _ in range(100):
                is_reading = True
                found = stacks()
                is_reading = False
                assert [found, [], []]  # which are due for collection
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(note)
    assert runs
    assert True not in runs
    assert gc.isenabled()


class _Waiter:
    """Waits on a thread, four calls deep."""

    def __init__(self) -> None:
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def wait(self, depth: int = 3) -> None:
        if depth:
            self.wait(depth - 1)
        else:
            self.is_there.set()
            assert self.go_on.wait(10)


def test_receivers_when_a_thread_runs_methods_then_their_objects_are_found() -> None:
    waiter = _Waiter()
    worker = Worker(waiter.wait)
    assert waiter.is_there.wait(10)
    thread = worker.thread.ident or 0
    assert receivers(thread, _Waiter.wait.__code__) == [waiter] * 4
    assert receivers(thread, Worker.finish.__code__) == []
    assert receivers(0, _Waiter.wait.__code__) == []
    waiter.go_on.set()
    worker.finish()
