"""Threads are bound and given back: this one, the device's, and those created meanwhile."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import pytest

from swapkit._native.backend import Backend, CopyKind
from swapkit._runtime.affinity import threads as module
from swapkit._runtime.affinity.system import System
from swapkit._runtime.affinity.threads import AUTOGRAD, OWN, Thread, ThreadBinding, list_threads
from tests.unit._runtime.rig import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALLOWED = frozenset(os.sched_getaffinity(0))
ONE = frozenset({min(ALLOWED)})
OTHER = frozenset({max(ALLOWED)})
_Result = TypeVar("_Result")
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


@pytest.fixture(autouse=True)
def _stays() -> Iterator[None]:
    yield
    assert module._active == []
    assert os.sched_getaffinity(0) == ALLOWED


class Worker:
    """A thread that exists until it is stopped."""

    def __init__(self, name: str = "") -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(name,))
        self._thread.start()
        self._started.wait()

    def _run(self, name: str) -> None:
        if name:
            path = f"/proc/self/task/{threading.get_native_id()}/comm"
            with open(path, "w", encoding="utf-8") as file:
                file.write(name)
        self._started.set()
        while (call := self._calls.get()) is not None:
            self._results.put(call())

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Return what a function returns on the thread."""
        self._calls.put(call)
        return cast("_Result", self._results.get())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)
        self._thread.join()

    @property
    def thread(self) -> int:
        return self._thread.native_id or 0

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(self.thread))


def bind(cpus: frozenset[int], device_index: int) -> ThreadBinding:
    binding = ThreadBinding(cpus, device_index)
    binding.apply()
    return binding


@pytest.mark.promise("D8")
def test_threads_when_bound_then_this_one_and_those_of_the_device_and_later_ones() -> None:
    with (
        Worker() as users,
        Worker(AUTOGRAD.format(2)) as others,
        Worker(AUTOGRAD.format(3)) as gradients,
        Worker(OWN) as copies,
    ):
        binding = bind(ONE, 3)
        with Worker() as later:
            assert os.sched_getaffinity(0) == gradients.cpus == copies.cpus == later.cpus == ONE
            assert users.cpus == others.cpus == ALLOWED
            binding.undo()
            assert gradients.cpus == copies.cpus == later.cpus == users.cpus == ALLOWED


@pytest.mark.promise("D8")
def test_worker_when_the_core_starts_it_then_found_by_its_name_and_bound() -> None:
    backend = Backend.cpu(copy_latency_ns=1)
    there, here = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    to, source = ctypes.addressof(there), ctypes.addressof(here)
    with backend.stream() as stream:
        backend.copy(to=to, source=source, nbytes=8, kind=CopyKind.DEVICE_TO_HOST, stream=stream)
        stream.synchronize()
        own = [thread.number for thread, name in list_threads().items() if name == OWN]
        assert own  # perhaps of other tests, too
        binding = bind(ONE, 0)
        assert all(os.sched_getaffinity(each) == ONE for each in own)
        binding.undo()
        assert all(os.sched_getaffinity(each) == ALLOWED for each in own)
    backend.close()


def test_threads_when_somebody_else_has_bound_them_then_they_stay() -> None:
    with Worker(OWN) as pinned, Worker(OWN) as moved, Worker() as there_already:
        os.sched_setaffinity(pinned.thread, OTHER)
        os.sched_setaffinity(there_already.thread, ONE)
        binding = bind(ONE, 0)
        assert pinned.cpus == OTHER
        os.sched_setaffinity(moved.thread, OTHER)
        binding.undo()
        assert pinned.cpus == moved.cpus == OTHER
        assert there_already.cpus == ONE


@pytest.mark.parametrize("inner_cpus", [ONE, OTHER])
@pytest.mark.parametrize("outer_first", [False, True])
def test_bindings_when_they_nest_then_the_last_undone_gives_the_cpus_back(
    inner_cpus: frozenset[int], outer_first: bool
) -> None:
    outer = bind(ONE, 0)
    inner = bind(inner_cpus, 1)
    assert os.sched_getaffinity(0) == inner_cpus
    first, last = (outer, inner) if outer_first else (inner, outer)
    first.undo()
    assert os.sched_getaffinity(0) == (inner_cpus if outer_first else ONE)
    last.undo()
    last.undo()
    assert os.sched_getaffinity(0) == ALLOWED


def test_binding_when_another_thread_undoes_it_then_given_back() -> None:
    binding = bind(ONE, 0)
    undoing = threading.Thread(target=binding.undo)
    undoing.start()
    undoing.join()
    assert os.sched_getaffinity(0) == ALLOWED


@pytest.mark.promise("D8")
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_threads_when_bound_to_the_same_cpus_then_both_get_theirs_back(
    first_ends_first: bool,
) -> None:
    with Worker() as one, Worker() as two, Worker(OWN) as copies:
        bindings = [worker.run(partial(bind, ONE, 0)) for worker in (one, two)]
        inherited = one.run(Worker)
        assert one.cpus == two.cpus == copies.cpus == inherited.cpus == ONE
        earlier, later = bindings if first_ends_first else bindings[::-1]
        earlier.undo()
        assert (one.cpus, two.cpus) == ((ALLOWED, ONE) if first_ends_first else (ONE, ALLOWED))
        assert copies.cpus == inherited.cpus == ONE
        later.undo()
        assert one.cpus == two.cpus == copies.cpus == inherited.cpus == ALLOWED
        inherited.__exit__()


@pytest.mark.parametrize("outer_first", [False, True])
def test_inherited_thread_when_bound_itself_then_the_last_undone_gives_the_cpus_back(
    outer_first: bool,
) -> None:
    outer = bind(ONE, 0)
    with Worker() as inherited:
        inner = inherited.run(partial(bind, OTHER, 1))
        first, last = (outer, inner) if outer_first else (inner, outer)
        first.undo()
        assert inherited.cpus == (OTHER if outer_first else ONE)
        last.undo()
        assert inherited.cpus == ALLOWED


@pytest.mark.parametrize("outer_first", [False, True])
def test_inherited_thread_when_bindings_nest_then_the_last_undone_gives_the_cpus_back(
    outer_first: bool,
) -> None:
    outer, inner = bind(ONE, 0), bind(OTHER, 1)
    with Worker() as inherited:
        first, last = (outer, inner) if outer_first else (inner, outer)
        first.undo()
        assert inherited.cpus == (OTHER if outer_first else ONE)
        last.undo()
        assert inherited.cpus == ALLOWED


def test_binding_when_another_thread_has_an_ended_ones_id_then_that_one_stays() -> None:
    with Worker() as stranger:
        binding = bind(ONE, 0)
        os.sched_setaffinity(stranger.thread, ONE)
        thread, _ = module._read_thread(stranger.thread)
        binding.held[Thread(thread.number, thread.started - 1)] = OTHER
        binding.undo()
        assert stranger.cpus == ONE


@pytest.mark.parametrize("name", [OWN, "a) 1 (b", ")) 2 3"])
def test_thread_when_read_then_its_name_and_start(name: str) -> None:
    earliest = clock_ticks()
    with Worker(name) as worker:
        thread, read = module._read_thread(worker.thread)
        assert (thread.number, read) == (worker.thread, name)
        assert earliest <= thread.started <= clock_ticks()


def clock_ticks() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def test_autograd_thread_when_it_inherited_another_devices_cpus_then_bound() -> None:
    outer = bind(ONE, 0)
    with Worker(AUTOGRAD.format(1)) as gradients, Worker(OWN) as copies, Worker() as user:
        os.sched_setaffinity(user.thread, ALLOWED)
        inner = user.run(partial(bind, OTHER, 1))
        assert gradients.cpus == OTHER
        assert copies.cpus == ONE  # they copy for the first device
        inner.undo()
        outer.undo()
        assert gradients.cpus == copies.cpus == user.cpus == ALLOWED


@pytest.mark.promise("D8")
def test_allowed_cpus_when_bound_then_those_from_before() -> None:
    system = System()
    binding = bind(ONE, 0)
    with Worker() as inherited, Worker() as pinned:
        assert system.allowed_cpus() == inherited.run(system.allowed_cpus) == ALLOWED
        os.sched_setaffinity(pinned.thread, OTHER)
        assert pinned.run(system.allowed_cpus) == OTHER
        nested = bind(OTHER, 1)
        assert system.allowed_cpus() == ALLOWED
        nested.undo()
        binding.undo()
        assert inherited.run(system.allowed_cpus) == ALLOWED


def test_binding_when_interrupted_anywhere_then_its_end_gives_the_cpus_back() -> None:
    with Worker(OWN) as copies:
        nth = 1
        binding = ThreadBinding(ONE, 0)
        while interrupts(nth, binding.apply):
            binding.undo()
            assert os.sched_getaffinity(0) == copies.cpus == ALLOWED, nth
            assert module._active == [], nth
            nth += 1
            binding = ThreadBinding(ONE, 0)
        assert nth > 50
        binding.undo()


def test_undoing_when_interrupted_anywhere_then_the_cpus_are_given_back() -> None:
    with Worker(OWN) as copies:
        nth = 1
        outer = bind(OTHER, 0)
        is_interrupted = True
        while is_interrupted:
            binding = bind(ONE, 0)
            is_interrupted = interrupts(nth, binding.undo)
            if nth == 1:  # as it is called: nothing is undone yet
                binding.undo()
            assert os.sched_getaffinity(0) == copies.cpus == OTHER, nth
            assert module._active == [outer], nth
            nth += 1
        assert nth > 50
        outer.undo()
        assert copies.cpus == ALLOWED
