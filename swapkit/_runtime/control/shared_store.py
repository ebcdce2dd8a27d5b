"""Requests to the store that all ranks share, each on a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from swapkit._runtime.control import store_threads
from swapkit.errors import InvalidDocument
from swapkit.ir.documents import parse_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.torch_compat.internals import Store

_T = TypeVar("_T")
# In each of which the request's thread can run: a process that is suspended for longer than a store
# may take to answer still waits for most of that time afterwards.
LOOKS = 10


MOST_BYTES = 4 << 20  # of a text from another rank: JSON takes 25 times as much memory, once read


def parse_said(text: bytes) -> object:
    """Return the content of JSON text that another rank wrote; raises InvalidDocument."""
    if len(text) > MOST_BYTES:
        raise InvalidDocument(f"a rank wrote {len(text)} bytes; at most {MOST_BYTES} are read")
    return parse_document(text)


class Answer(Generic[_T]):
    """A request to a store, on its own thread, which ends with the answer."""

    def __init__(self, ask: Callable[[], _T]) -> None:
        """Start the request."""
        self._ask = ask
        self._answers: list[_T] = []
        self._error: BaseException | None = None
        self._thread = store_threads.start(self._run, name="swapkit-store")

    @property
    def is_awaited(self) -> bool:
        """Whether there is no answer yet."""
        return not self._answers and self._error is None

    def take(self) -> _T:
        """Wait for the answer and return it, or raise the request's error."""
        for _ in range(LOOKS):
            self._thread.join(store_threads.ANSWER_SECONDS / LOOKS)  # at once if it has ended
        if self._error is not None:
            raise self._error
        if not self._answers:
            raise RuntimeError(
                "the process group's store has not answered for "
                f"{store_threads.ANSWER_SECONDS:.0f} seconds"
            )
        return self._answers[0]

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except BaseException as error:  # noqa: BLE001 - raised again by `take`
            self._error = error


class SharedStore:
    """The store that all ranks share, which gets one request at a time. Any thread."""

    def __init__(self, find_store: Callable[[], Store]) -> None:
        """Ask nothing yet. `find_store`: returns the store; raises ValueError if it is gone."""
        self._find_store = find_store
        self._lock = threading.Lock()  # held during a request to the store, perhaps forever
        self._is_mute = False  # whether a request got no answer

    def begin(self, ask: Callable[[Store], _T]) -> Answer[_T]:
        """Begin a request, and return at once. `ask`: makes it, on a thread of its own."""

        def ask_alone() -> _T:
            with self._lock:
                return ask(self._find_store())

        return Answer(ask_alone)

    def ask(self, ask: Callable[[Store], _T]) -> _T:
        """Return what `ask` returns, which makes the requests.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        if self._is_mute:
            raise RuntimeError("the process group's store did not answer an earlier request")
        answer = self.begin(ask)
        try:
            return answer.take()
        except RuntimeError:  # not on an interruption, which says nothing about the store
            self._is_mute = answer.is_awaited
            raise
