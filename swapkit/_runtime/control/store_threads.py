"""Threads that make requests to a store, which may take forever: their server may hang.

The threads are daemons, so that such a request does not keep the program from ending. But torch
aborts the process if a request returns while the interpreter ends. So the interpreter first waits
for the threads, as long as a server may take to answer.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_SECONDS = 10.0  # then a store counts as gone: torch's waits forever if its host hangs

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(target: Callable[..., None], *args: object, name: str) -> threading.Thread:
    """Start a thread that makes requests to a store. Any thread."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _wait() -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
