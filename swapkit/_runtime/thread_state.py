"""The state that swapkit keeps for each thread.

One object serves all layers, so that the order of everything open on a thread is in one place. Each
field belongs to one file. Only the thread itself adds to a list. Another thread may remove from a
list that it was handed, when it closes something that this thread opened (`process/scopes.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadState(threading.local):
    """The sessions, scopes, hooks and modes that are open on this thread, innermost last."""

    def __init__(self) -> None:
        # The swappers of the sessions that were entered here (`session/life.py`), or that lent a
        # call their hooks (`saved/hooks.py`).
        self.sessions: list[Any] = []
        # `process/scopes.py`: scopes, as `OpenScope`.
        self.scopes: list[Any] = []
        # `saved/hooks.py`: our pairs on torch's stack of saved-tensor hooks.
        self.hooks: list[Any] = []
        # Those that left it, since the program has disabled hooks.
        self.hooks_aside: list[Any] = []
        # `user_choices/operator_choices.py`: modules with choices for operators, while they run.
        self.operator_choices: list[Any] = []
        # `torch_compat/dispatch_modes.py`: dispatch modes that could not leave torch's stack yet.
        self.left_modes: list[Any] = []
        # `user_choices/wrapping.py`: whether choices are being pickled.
        self.is_pickling = False
        # Whether our own code asks for memory that it can do without: see `tries_memory`.
        self.tries_memory = False


thread_state = ThreadState()


@contextlib.contextmanager
def tries_memory() -> Iterator[None]:
    """Ask for memory that our own code can do without: nobody hears of a failure.

    The request may start a rescue, unlike a `tentative` one (`_native/pool.py`).
    """
    former, thread_state.tries_memory = thread_state.tries_memory, True
    try:
        yield
    finally:
        thread_state.tries_memory = former
