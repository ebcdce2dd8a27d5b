"""Threads are bound and given back: this one, the device's, and those created meanwhile."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import Backend, CopyKind
from swapkit._runtime.affinity.threads import AUTOGRAD, OWN, ThreadBinding, list_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED = frozenset(os.sched_getaffinity(0))
ONE = frozenset({min(ALLOWED)})
OTHER = frozenset({max(ALLOWED)})
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


@pytest.fixture(autouse=True)
def _stays() -> Iterator[None]:
    yield
    assert os.sched_getaffinity(0) == ALLOWED


class Worker:
    """A thread that exists until it is stopped."""

    def __init__(self, name: str = "") -> None:
        self._stop = threading.Event()
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
        self._stop.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
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
        own = [thread for thread, name in list_threads().items() if name == OWN]
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
