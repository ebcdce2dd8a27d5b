"""No test meets what another left behind, garbage, threads or sessions: a pytest plugin."""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_SECONDS = 10.0  # for a thread that is about to end when its test has ended
STATUS = pytest.StashKey[int]()

# ---- garbage -------------------------------------------------------------------------------------
# A collection in the middle of a test would free what earlier tests left in cycles: memory of the
# pool, marks, hooks. So what is left is freed before each test; and all that lives on, modules
# above all, is frozen, which makes a collection cost microseconds instead of a tenth of a second.
# Tests import, too: torch's compiler alone is some hundred thousand objects. What is frozen between
# two tests of a module may belong to its fixtures, so it is collectable again when the module ends.

MANY_OBJECTS = 20_000  # a collection of fewer costs a few milliseconds


def collect_and_freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    collect_and_freeze()


@dataclass
class Frozen:
    """Whether anything was frozen since the module's first test began."""

    between_tests: bool = False


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[Frozen]:
    """Freeze what the module before imported, too."""
    collect_and_freeze()
    frozen = Frozen()
    yield frozen
    if frozen.between_tests:
        gc.unfreeze()  # the next module collects it


@pytest.fixture(autouse=True)
def _no_garbage_of_others(_few_objects: Frozen) -> None:
    gc.collect()
    if len(gc.get_objects()) > MANY_OBJECTS:  # those that are frozen are not among them
        gc.freeze()
        _few_objects.between_tests = True


# ---- lost threads --------------------------------------------------------------------------------


def list_blocking_threads() -> set[threading.Thread]:
    """Return the threads that the interpreter waits for when it exits."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    }


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """A thread that outlives its test fails the test, which is named; not the one after it."""
    before = list_blocking_threads()
    yield
    lost = list_blocking_threads() - before
    for thread in lost:
        thread.join(GRACE_SECONDS)
    names = sorted(thread.name for thread in lost if thread.is_alive())
    if names:
        pytest.fail(f"threads outlive the test: {', '.join(names)}")


# ---- lost sessions -------------------------------------------------------------------------------


def list_listeners() -> tuple[object, ...]:
    """Return those that listen to all modules: running sessions, recorders, trackers."""
    hooks = sys.modules.get("swapkit._runtime.model.global_hooks")
    return () if hooks is None else hooks.calls.now


@pytest.fixture(autouse=True)
def _no_session_left_behind() -> Iterator[None]:
    """A session that outlives its test holds memory, and its hooks run in other tests."""
    before = list_listeners()
    yield
    lost = [each for each in list_listeners() if each not in before]
    if lost:
        names = ", ".join(sorted({type(each).__name__ for each in lost}))
        pytest.fail(f"{len(lost)} listeners outlive the test: {names}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process though a thread is lost: the interpreter would wait for it for ever."""
    lost = [thread for thread in list_blocking_threads() if thread.is_alive()]
    is_worker = hasattr(config, "workerinput")  # which its controller ends
    if lost and not is_worker:
        names = ", ".join(sorted(thread.name for thread in lost))
        sys.stderr.write(f"threads still run, the process ends without them: {names}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(STATUS, 1))
