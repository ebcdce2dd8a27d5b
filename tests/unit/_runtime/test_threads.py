"""What the other threads of the process do."""

from __future__ import annotations

import threading
from typing import Any

import torch

from swapkit._runtime.threads import backward_runs_elsewhere, others_wait, take_while
from tests.support.threads import busy_thread


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
