"""Work on threads: what it raises is raised in the test, and no test waits for ever."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
PATIENCE_SECONDS = 60.0


class Worker(Generic[T]):
    """A thread that keeps what its work returns or raises."""

    def __init__(self, work: Callable[[], T], name: str | None = None) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        # A daemon: the interpreter does not wait for a thread that hangs.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised in `finish`
            self._error = error

    def finish(self, deadline: float | None = None) -> T:
        """Wait, by default for PATIENCE_SECONDS; return or raise what the work did.

        Args:
            deadline: until when to wait, in `time.monotonic()`.
        """
        if deadline is None:
            deadline = time.monotonic() + PATIENCE_SECONDS
        self.thread.join(max(0.0, deadline - time.monotonic()))
        self.raise_error()
        if self.thread.is_alive():
            frame = sys._current_frames().get(self.thread.ident or 0)
            stack = "".join(traceback.format_stack(frame))
            raise AssertionError(f"{self.thread.name} hangs:\n{stack}")
        return self._results.pop()

    def raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None  # its frames would hold this worker
            raise error


def on_thread(work: Callable[[], T], name: str | None = None) -> T:
    """Return what work returns on a thread of its own."""
    return Worker(work, name).finish()


def on_threads(*works: Callable[[], T]) -> list[T]:
    """Return what each work returns; they run at the same time, each on a thread of its own."""
    workers = [Worker(work) for work in works]
    deadline = time.monotonic() + PATIENCE_SECONDS
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.raise_error()  # before any that hangs: perhaps it waits for the one that failed
    return [worker.finish(deadline) for worker in workers]


@contextmanager
def alongside(work: Callable[[], object]) -> Iterator[None]:
    """Run work on a thread while the block runs; the block's end waits for it."""
    worker = Worker(work)
    yield
    worker.finish()


@contextmanager
def busy_thread() -> Iterator[None]:
    """Let a thread work with torch while the block runs: it never waits."""
    stop: list[bool] = []

    def spin() -> None:
        while not stop:
            torch.is_grad_enabled()

    with alongside(spin):
        try:
            yield
        finally:
            stop.append(True)
