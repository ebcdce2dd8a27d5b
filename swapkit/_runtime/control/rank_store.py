"""The store that all ranks share, asked on threads of their own; what is kept for each group."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
import torch.distributed

from swapkit._runtime.model.ranks import count_ranks
from swapkit._runtime.torch_compat.internals import default_store
from swapkit.errors import InvalidDocument
from swapkit.ir.documents import parse_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.torch_compat.internals import Store

# ---- rank groups ---------------------------------------------------------------------------------
#
# What a process has once for each default process group: in a new group all ranks start again.

_Found = TypeVar("_Found")
_Made_co = TypeVar("_Made_co", covariant=True)


class _Make(Protocol[_Made_co]):
    def __call__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> _Made_co: ...


class OnePerGroup(Generic[_Found]):
    """Finds the object of the default process group. Any thread."""

    def __init__(self, make: _Make[_Found]) -> None:
        """Make nothing yet.

        Args:
            make: takes what returns the group's store (ValueError: the group no longer exists),
                this rank, and the number of ranks. Called under a lock, so it must not wait.
        """
        self._make = make
        self._lock = threading.Lock()
        self._found: weakref.WeakKeyDictionary[object, _Found] = weakref.WeakKeyDictionary()

    def find(self) -> _Found | None:
        """Return the present group's object; None: there are no other ranks."""
        count = count_ranks()
        if count < 2:
            return None
        distributed = torch.distributed
        group = distributed.group.WORLD
        find_group = weakref.ref(group)

        def find_store() -> Store:
            if distributed.group.WORLD is not find_group():
                raise ValueError("the process group in which the session began no longer exists")
            store: Store = default_store()
            return store

        with self._lock:
            found = self._found.get(group)
            if found is None:
                found = self._make(find_store, rank=distributed.get_rank(), count=count)
                self._found[group] = found
            return found

    def all(self) -> list[_Found]:
        """Return the objects of all groups that still exist."""
        return list(self._found.values())


# ---- store threads -------------------------------------------------------------------------------
#
# Threads that make requests to a store, which may take forever: their server may hang.
#
# The threads are daemons, so that such a request does not keep the program from ending. But torch
# aborts the process if a request returns while the interpreter ends. So the interpreter first waits
# for the threads, as long as a server may take to answer.

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


# ---- shared store --------------------------------------------------------------------------------
#
# Requests to the store that all ranks share, each on a thread of its own.

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
        self._thread = start(self._run, name="swapkit-store")

    @property
    def is_awaited(self) -> bool:
        """Whether there is no answer yet."""
        return not self._answers and self._error is None

    def take(self) -> _T:
        """Wait for the answer and return it, or raise the request's error."""
        for _ in range(LOOKS):
            self._thread.join(ANSWER_SECONDS / LOOKS)  # at once if it has ended
        if self._error is not None:
            raise self._error
        if not self._answers:
            raise RuntimeError(
                f"the process group's store has not answered for {ANSWER_SECONDS:.0f} seconds"
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
