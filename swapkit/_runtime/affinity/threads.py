"""Binding of this process's threads to CPUs, and its undoing.

A new thread inherits the CPUs of the thread that creates it. So it suffices to bind the training
thread, and those threads that exist already and work for the device: torch's autograd threads and
swapkit's own. All other threads stay as they are.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from swapkit._runtime.torch_compat.fork_locks import make_fork_lock

TASKS = Path("/proc/self/task")
OWN = "swapkit"  # the name of swapkit's own threads
AUTOGRAD = "pt_autograd_{}"  # the name of torch's thread of a device
_lock = make_fork_lock()
_active: list[ThreadBinding] = []  # in the order of their beginnings


class ThreadBinding:
    """Threads that are bound until `undo`."""

    def __init__(self, cpus: frozenset[int], device_index: int) -> None:
        """Bind this thread, and those of the device that exist already.

        Threads that may use other CPUs than this thread, as bound by somebody else, stay.

        Args:
            cpus: the CPUs, at least one of which the process may use.
            device_index: torch's index of the device.
        """
        self.cpus = cpus
        with _lock:
            here = threading.get_native_id()
            self.before = frozenset(os.sched_getaffinity(0))
            names = (OWN, AUTOGRAD.format(device_index))
            self.others = set(list_threads())  # that exist already and stay
            for thread, name in list_threads().items():
                if thread == here or (name in names and _cpus_of(thread) == self.before):
                    _bind(thread, cpus)
                    self.others.discard(thread)
            _active.append(self)

    def undo(self) -> None:
        """Give the threads their CPUs back. Any thread may call it, also twice.

        Threads created meanwhile have inherited the binding: they get the CPUs back, too. Threads
        that somebody else has bound since stay.
        """
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            for later in _active:  # a binding on top of this one ends after it
                if later.before == self.cpus:
                    later.before = self.before
                    later.others &= self.others
            if any(other.cpus == self.cpus for other in _active):
                return  # that one gives the CPUs back
            for thread in list_threads():
                if thread not in self.others and _cpus_of(thread) == self.cpus:
                    _bind(thread, self.before)


def list_threads() -> dict[int, str]:
    """Return the names of this process's threads by their ids."""
    found = {}
    for task in TASKS.iterdir():
        with suppress(OSError):  # the thread has ended
            found[int(task.name)] = (task / "comm").read_text(encoding="utf-8").strip()
    return found


def _cpus_of(thread: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(thread))
    except OSError:
        return frozenset()


def _bind(thread: int, cpus: frozenset[int]) -> None:
    with suppress(OSError):  # the thread has ended, or the CPUs have been taken away
        os.sched_setaffinity(thread, cpus)
