"""A run that crashes is heard of, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swapkit.demo.children import Child, RunFailedError
from swapkit.demo.messages import Built, Command, OutOfMemory, RunAction, RunKind, RunSpec, Stepped

START_A_CHILD = """
import os, sys, time
from swapkit.demo.children import Child
from swapkit.demo.messages import Command, RunAction, RunKind, RunSpec
child = Child(RunSpec(label="a", kind=RunKind.TORCH, size="tiny", seed=0, threads=1,
                      parent_pid=os.getpid()))
child.ask(Command(action=RunAction.BUILD))
print(child.pid, flush=True)
time.sleep(60)
"""


BUILD = Command(action=RunAction.BUILD)


def make_spec(size: str = "tiny", kind: RunKind = RunKind.PLAIN) -> RunSpec:
    return RunSpec(
        label="a",
        kind=kind,
        size=size,
        seed=0,
        threads=1,
        parent_pid=os.getpid(),
    )


def test_child_when_it_crashes_then_the_error_holds_its_stderr() -> None:
    child = Child(make_spec("nosuchsize"))
    try:
        with pytest.raises(RunFailedError, match='run "a" ended with status 1') as caught:
            child.ask(BUILD)
    finally:
        child.kill()
    assert "KeyError: 'nosuchsize'" in str(caught.value)


def test_child_when_killed_then_the_next_question_fails() -> None:
    child = Child(make_spec())
    os.kill(child.pid, signal.SIGKILL)
    try:
        with pytest.raises(RunFailedError, match=r'run "a" (is gone|ended with status -9)'):
            child.ask(BUILD)
    finally:
        child.kill()


def test_child_when_well_then_answers_and_ends() -> None:
    child = Child(make_spec())
    try:
        assert isinstance(child.ask(BUILD), Built)
        answer = child.ask(Command(action=RunAction.STEP, watched=True))
        assert isinstance(answer, Stepped)
        assert answer.reserved_peak_bytes >= answer.allocated_peak_bytes > answer.state_bytes > 0
        assert max(nbytes for _, nbytes in answer.series) == answer.allocated_peak_bytes
        if sys.platform == "linux":
            assert 0 < child.witness.peak_bytes <= answer.reserved_peak_bytes
        looks = child.witness.looks
        assert isinstance(child.ask(Command(action=RunAction.STEP)), Stepped)
        assert child.witness.looks == looks, "a step that is not watched is left alone"
        child.end()
    finally:
        child.kill()


def test_child_when_the_pool_is_too_small_then_says_so_and_goes_on() -> None:
    child = Child(make_spec())
    try:
        child.ask(BUILD)
        whole = child.ask(Command(action=RunAction.STEP))
        assert isinstance(whole, Stepped)
        half = Command(action=RunAction.TRY, limit_bytes=whole.reserved_peak_bytes // 2)
        for _ in range(2):  # what a failed try leaves does not count in the next one
            answer = child.ask(half)
            assert isinstance(answer, OutOfMemory)
            assert answer.step == 1
        enough = Command(action=RunAction.TRY, limit_bytes=2 * whole.reserved_peak_bytes)
        assert isinstance(child.ask(enough), Stepped)
    finally:
        child.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_child_when_its_parent_is_killed_then_it_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", START_A_CHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        # Stopped, so that it cannot notice by itself that the pipe to its parent is closed.
        os.kill(child_pid, signal.SIGSTOP)
        parent.kill()
    deadline = time.monotonic() + 60  # it dies when it next has a turn
    while is_running(child_pid) and time.monotonic() < deadline:
        pass
    survived = is_running(child_pid)
    if survived:
        os.kill(child_pid, signal.SIGKILL)
    assert not survived


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
