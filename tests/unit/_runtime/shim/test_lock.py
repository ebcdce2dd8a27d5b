"""The runtime's lock: as Python's own reentrant one."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from swapkit._runtime.process.runtime import get_runtime
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.shim.types import Lock


@pytest.fixture
def lock() -> Lock:
    return get_runtime().shim.lock()


def test_lock_when_its_thread_takes_it_again_then_it_is_free_after_as_many_releases(
    lock: Lock,
) -> None:
    def try_it() -> bool:
        is_taken = lock.acquire(blocking=False)
        if is_taken:
            lock.release()
        return is_taken

    assert not lock.is_owned()
    with lock:
        with lock:
            assert lock.acquire()
            assert lock.acquire(blocking=False)
            lock.release()
            lock.release()
        assert lock.is_owned()
        assert not on_thread(try_it)
        assert not on_thread(lock.is_owned)
    assert not lock.is_owned()
    assert on_thread(try_it)


def test_lock_when_another_thread_has_it_then_it_is_waited_for(lock: Lock) -> None:
    order: list[str] = []
    begins = threading.Event()

    def wait() -> None:
        begins.set()
        with lock:
            order.append("waited")

    thread = threading.Thread(target=wait)
    with lock:
        thread.start()
        begins.wait()
        thread.join(timeout=0.05)
        order.append("had")
    thread.join()
    assert order == ["had", "waited"]


def test_release_when_this_thread_has_not_taken_it_then_refused(lock: Lock) -> None:
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()
    with lock, pytest.raises(RuntimeError, match="un-acquired"):
        on_thread(lock.release)


class Interrupted(Exception):
    """What the signal handler raises."""


@pytest.fixture
def raised() -> Iterator[threading.Event]:
    """Let the first signal raise; this tells that it did."""

    def handle(*_: object) -> None:
        if not has_raised.is_set():
            has_raised.set()
            raise Interrupted

    has_raised = threading.Event()
    former = signal.signal(signal.SIGINT, handle)
    yield has_raised
    signal.signal(signal.SIGINT, former)


def test_lock_when_a_signal_handler_raises_in_the_wait_then_it_is_not_taken(
    lock: Lock, raised: threading.Event
) -> None:
    has_it, begins, is_over = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has_it.set()
            is_over.wait()

    def interrupt() -> None:
        begins.wait()
        while not raised.wait(0.05):  # the wait may not have begun
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def take() -> None:
        begins.set()
        lock.acquire()

    threads = [threading.Thread(target=each) for each in (hold, interrupt)]
    for thread in threads:
        thread.start()
    has_it.wait()
    with pytest.raises(Interrupted):
        take()
    assert not lock.is_owned()
    is_over.set()
    for thread in threads:
        thread.join()
    with lock:
        assert lock.is_owned()


def test_lock_when_many_threads_take_it_then_one_has_it_at_a_time(lock: Lock) -> None:
    has_it: list[int] = []
    most = 0

    def work(number: int) -> None:
        nonlocal most
        for _ in range(50):
            with lock:
                has_it.append(number)
                time.sleep(0)  # lets another one try
                most = max(most, len(has_it))
                has_it.pop()

    threads = [threading.Thread(target=work, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 1
