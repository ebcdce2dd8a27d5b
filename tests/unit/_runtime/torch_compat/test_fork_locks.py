"""Locks that a forked child finds free."""

from __future__ import annotations

import textwrap

import pytest

from tests.support import run_python

# A thread holds the lock for a while, in which the process forks: the child needs the lock, too.
PROGRAM = """
import os, signal, threading, time
import torch, swapkit
{make}
held, done = threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        time.sleep(0.3)

threading.Thread(target=hold).start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)  # ends a child that hangs
    with lock:
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with lock:
    print("free")
"""

LOCKS = {
    "helper": """
        from swapkit._runtime.torch_compat.isolation import make_fork_lock
        lock = make_fork_lock()
    """,
    "modules": """
        from swapkit._runtime.process.runtime import get_runtime
        lock = get_runtime().tracker._lock
    """,
    "runtime": """
        from swapkit._runtime.process.runtime import get_runtime
        lock = get_runtime().lock
    """,
    "hooks": "from swapkit._runtime.saved.hooks import _detour_lock as lock",
    "listeners": """
        from swapkit._runtime.model import global_hooks
        lock = global_hooks.calls._lock
    """,
    "operators": "from swapkit._runtime.user_choices.operator_choices import _lock as lock",
    "sessions": "from swapkit._runtime.session.session import _lock as lock",
}


@pytest.mark.parametrize("make", list(LOCKS.values()), ids=list(LOCKS))
def test_fork_when_another_thread_holds_a_lock_then_the_child_finds_it_free(make: str) -> None:
    assert run_python(PROGRAM.format(make=textwrap.dedent(make))).split() == ["0", "free"]
