"""Meeting places: they match sessions of several ranks, even if some ranks have more sessions.

Sessions meet in rounds. Sessions that are open at the same time use different places. A round is
over once all ranks have spoken in it, or once a session that spoke in it ended before that. The
first rank to write the outcome to the store decides it, and the outcome never changes. So all ranks
pass through the same rounds: a session that only some ranks have uses up one round, and the
sessions after it meet in the next.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.distributed

from swapkit._runtime.torch_compat.internals import default_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.torch_compat.internals import Store

_log = logging.getLogger(__name__)
ALL, LEFT = "all", "left"  # the outcomes of a round
ANSWER_SECONDS = 10.0  # then a store counts as gone: torch's waits forever if its host hangs
_T = TypeVar("_T")


class _Answer(Generic[_T]):
    """A request to a store, on its own thread, which ends with the answer."""

    def __init__(self, ask: Callable[[], _T]) -> None:
        self._ask = ask
        self._answers: list[_T] = []
        self._error: BaseException | None = None
        # A daemon: a request that is never answered must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="swapkit-store", daemon=True)
        self._thread.start()

    @property
    def is_awaited(self) -> bool:
        """Whether there is no answer yet."""
        return not self._answers and self._error is None

    def take(self) -> _T:
        """Wait for the answer and return it, or raise the request's error."""
        self._thread.join(ANSWER_SECONDS)
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


class MeetingPlace:
    """A place where a rank's sessions speak, one at a time. Any thread."""

    def __init__(
        self, find_store: Callable[[], Store], *, rank: int, count: int, name: str
    ) -> None:
        """Begin with the first round.

        Args:
            find_store: returns the store that all ranks share.
            rank: this rank.
            count: the number of ranks.
            name: the place's name, the same on all ranks.
        """
        self.rank = rank
        self._find_store = find_store
        self._count = count
        self._name = name
        self._lock = threading.Lock()  # held during a request to the store, perhaps forever
        self._is_mute = False  # whether a request got no answer
        self._round = -1  # all earlier rounds are over
        self._go_on()
        # A weak reference: a session that is dropped never calls `leave`.
        self._find_holder: Callable[[], object] = lambda: None

    def _go_on(self) -> None:
        self._round += 1
        self._has_said = False
        prefix = f"{self._name}/{self._round}"
        self._over = f"{prefix}/over"
        self._keys = [f"{prefix}/rank-{rank}" for rank in range(self._count)]

    @property
    def is_free(self) -> bool:
        """Whether no session has this place."""
        return self._find_holder() is None

    def take(self, holder: object) -> None:
        """Give the place to a session."""
        self._find_holder = weakref.ref(holder)

    def leave(self, holder: object) -> None:
        """Free the place and withdraw the session's text, unless all ranks have read it."""
        if self._find_holder() is not holder:
            return
        try:
            if self._has_said:
                self._ask(self._end)
        except (RuntimeError, ValueError) as error:  # the group may end before its sessions
            _log.debug("cannot tell other ranks that a session ended: %s", error)
        self._find_holder = lambda: None

    def begin(self) -> None:
        """Leave the round of the previous session here, if that one was dropped without `leave`.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        if self._has_said:
            self._ask(self._end)

    def _ask(self, ask: Callable[[], _T]) -> _T:
        if self._is_mute:
            raise RuntimeError("the process group's store did not answer an earlier request")

        def ask_alone() -> _T:
            with self._lock:
                return ask()

        answer = _Answer(ask_alone)
        try:
            return answer.take()
        except RuntimeError:  # not on an interruption, which says nothing about the store
            self._is_mute = answer.is_awaited
            raise

    def _end(self) -> None:
        """Leave the round if this rank has spoken in it."""
        if self._has_said:
            self._find_store().compare_set(self._over, "", LEFT)
            self._go_on()

    def meet(self, holder: object, text: str) -> list[bytes]:
        """Speak in the first round that is not over; return all ranks' texts once all have spoken.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        return self._ask(partial(self._meet, holder, text))

    def _meet(self, holder: object, text: str) -> list[bytes]:
        store = self._find_store()
        while self._find_holder() is holder:
            if store.check([self._over]):
                if self._has_said and store.get(self._over) == ALL.encode():
                    return store.multi_get(self._keys)
                self._go_on()
                continue
            if not self._has_said:
                store.set(self._keys[self.rank], text)
                self._has_said = True
            if not store.check(self._keys):
                break
            store.compare_set(self._over, "", ALL)  # another rank may have left meanwhile
        return []

    def find_silent(self) -> list[int]:
        """Return the ranks that have not spoken in the round.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        return self._ask(self._find_silent)

    def _find_silent(self) -> list[int]:
        store = self._find_store()
        return [rank for rank, key in enumerate(self._keys) if not store.check([key])]


class MeetingPlaces:
    """All meeting places of one rank in one process group. Any thread."""

    def __init__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> None:
        """Begin without places. Arguments: see `MeetingPlace`."""
        self._find_store = find_store
        self._rank = rank
        self._count = count
        self._lock = threading.Lock()
        self._places: dict[str, MeetingPlace] = {}

    def take(self, holder: object) -> MeetingPlace:
        """Give the first free place to a session, and return it."""
        with self._lock:
            names = (f"swapkit/{number}" for number in itertools.count())
            place = next(each for each in map(self._find, names) if each.is_free)
            place.take(holder)
            return place

    def _find(self, name: str) -> MeetingPlace:
        if name not in self._places:
            self._places[name] = MeetingPlace(
                self._find_store, rank=self._rank, count=self._count, name=name
            )
        return self._places[name]


_finding = threading.Lock()
# By process group: in a new group all ranks start again.
_found: weakref.WeakKeyDictionary[object, MeetingPlaces] = weakref.WeakKeyDictionary()


def find_places() -> MeetingPlaces | None:
    """Return this rank's meeting places; None: there are no other ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, count = distributed.get_rank(), distributed.get_world_size()
    if count < 2:
        return None
    group = distributed.group.WORLD
    find_group = weakref.ref(group)

    def find_store() -> Store:
        if distributed.group.WORLD is not find_group():
            raise ValueError("the process group in which the session began no longer exists")
        store: Store = default_store()
        return store

    with _finding:
        return _found.setdefault(group, MeetingPlaces(find_store, rank=rank, count=count))
