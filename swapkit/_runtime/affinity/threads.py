"""Binding of this process's threads to CPUs, and its undoing.

A new thread inherits the CPUs of the thread that creates it. So it suffices to bind the training
thread, and those threads that exist already and work for the device: torch's autograd threads and
swapkit's own. All other threads stay as they are.

Several bindings may hold a thread. Each notes the CPUs that the thread had before any of them, and
the last one to end gives those back. A thread that inherits its CPUs is held by the bindings that
hold the thread that bound itself to these CPUs last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from swapkit._runtime.torch_compat.isolation import make_fork_lock

TASKS = Path("/proc/self/task")
OWN = "swapkit"  # the name of swapkit's own threads
AUTOGRAD = "pt_autograd_{}"  # the name of torch's thread of a device
_START = 19  # the place of the start time in a thread's `stat`, counted from behind the name
_lock = make_fork_lock()
_active: list[ThreadBinding] = []  # in the order of their beginnings


class Thread(NamedTuple):
    """A thread of this process. The kernel gives ids of ended threads to new ones."""

    number: int
    started: int  # clock ticks since the machine's start


class ThreadBinding:
    """Threads that are bound from `apply` until `undo`. Any thread may call; both hold a lock."""

    def __init__(self, cpus: frozenset[int], device_index: int) -> None:
        """Prepare; no thread is bound yet.

        Args:
            cpus: the CPUs, at least one of which the process may use.
            device_index: torch's index of the device.
        """
        self.cpus = cpus
        self.held: dict[Thread, frozenset[int]] = {}  # their CPUs before any binding
        self._autograd = AUTOGRAD.format(device_index)
        self._here: Thread | None = None
        self._origin: frozenset[int] = frozenset()
        self._older: frozenset[Thread] = frozenset()  # cannot have inherited its CPUs

    def apply(self) -> None:
        """Bind this thread, and those of the device that exist already.

        Threads that may use other CPUs than this thread, as bound by somebody else, stay. If it is
        interrupted, `undo` restores the threads bound so far.
        """
        with _lock:
            threads = list_threads()
            _update(threads)
            here = _this_thread()
            before = _cpus_of(here)
            self._here, self._origin = here, _origin_of(here, before)
            self._older = frozenset(threads)
            _active.append(self)
            for thread, name in threads.items():
                if thread == here or self._is_ours(thread, name, before):
                    self.held[thread] = _origin_of(thread, _cpus_of(thread))  # first: for `undo`
                    _bind(thread, self.cpus)

    def undo(self) -> None:
        """Give the threads their CPUs back, or those of an earlier binding. It may be repeated.

        Threads created meanwhile have inherited the binding: they get the CPUs back, too. Threads
        that somebody else has bound since, or a later binding, stay. An interrupt is raised when
        the threads have their CPUs back.
        """
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        with _lock:
            if self not in _active:
                return
            threads = list_threads()
            _update(threads)
            for thread in threads:
                holders = _holders_of(thread)
                if self in holders[-1:]:
                    earlier = holders[:-1]
                    _bind(thread, earlier[-1].cpus if earlier else self.held[thread])
            _active.remove(self)  # last: until then, a repetition restores the rest

    def hold_inherited(self, thread: Thread) -> None:
        """Hold a thread that has inherited this binding's CPUs, in all that hold its creator."""
        for binding in _active:
            if binding.may_have_bequeathed(thread, self.cpus) or self._here in binding.held:
                binding.held[thread] = self._origin
            if binding is self:
                return

    def may_have_bequeathed(self, thread: Thread, cpus: frozenset[int]) -> bool:
        """Whether a thread with these CPUs may have inherited them from this binding."""
        return self.cpus == cpus and thread not in self._older

    def _is_ours(self, thread: Thread, name: str, before: frozenset[int]) -> bool:
        """Whether a thread works for the device and may use the same CPUs as this thread."""
        if name not in (OWN, self._autograd):
            return False
        cpus = _cpus_of(thread)
        if _origin_of(thread, cpus) != self._origin:
            return False
        # Torch starts the autograd threads of all devices at once, perhaps bound for another one.
        return name == self._autograd or cpus in (before, self.cpus, self._origin)


def unbound_cpus() -> frozenset[int]:
    """Return the CPUs that this thread may use, or might before swapkit bound it.

    Any thread; it holds a lock.
    """
    with _lock:
        if not _active:
            return frozenset(os.sched_getaffinity(0))
        here = _this_thread()
        _update((here,))
        return _origin_of(here, _cpus_of(here))


def list_threads() -> dict[Thread, str]:
    """Return the names of this process's threads."""
    found = {}
    for task in TASKS.iterdir():
        with suppress(OSError):  # the thread has ended
            thread, name = _read_thread(int(task.name))
            found[thread] = name
    return found


def _this_thread() -> Thread:
    return _read_thread(threading.get_native_id())[0]


def _read_thread(number: int) -> tuple[Thread, str]:
    """Return a thread and its name.

    Raises:
        OSError: it has ended.
    """
    stat = (TASKS / str(number) / "stat").read_text(encoding="utf-8", errors="replace")
    start, _, rest = stat.rpartition(")")  # a name may hold blanks and parentheses
    return Thread(number, int(rest.split()[_START])), start.partition("(")[2]


def _update(threads: Iterable[Thread]) -> None:
    """Note which threads inherited a binding's CPUs, and which somebody else has bound since."""
    for thread in threads:
        cpus, holders = _cpus_of(thread), _holders_of(thread)
        while holders and holders[-1].cpus != cpus:
            del holders.pop().held[thread]
        if holders:
            continue
        bequeathing = [each for each in _active if each.may_have_bequeathed(thread, cpus)]
        for latest in bequeathing[-1:]:
            latest.hold_inherited(thread)


def _holders_of(thread: Thread) -> list[ThreadBinding]:
    return [binding for binding in _active if thread in binding.held]


def _origin_of(thread: Thread, cpus: frozenset[int]) -> frozenset[int]:
    """Return the CPUs of a thread before any binding; without one, `cpus`, those that it has."""
    for binding in _holders_of(thread):
        return binding.held[thread]
    return cpus


def _cpus_of(thread: Thread) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(thread.number))
    except OSError:
        return frozenset()


def _bind(thread: Thread, cpus: frozenset[int]) -> None:
    with suppress(OSError):  # the thread has ended, or the CPUs have been taken away
        os.sched_setaffinity(thread.number, cpus)
