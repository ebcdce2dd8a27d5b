"""Where sessions of several ranks meet: which belong together, though some ranks have more.

The sessions of one kind meet in rounds. A round is over once all ranks have spoken in it, or once
a session that spoke there has ended before. Which of the two is decided in the store by whoever
comes first, and never again. So all ranks pass through the same rounds: a session that only some
have costs one, and those that follow meet in the next.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

_log = logging.getLogger(__name__)
ALL, LEFT = "all", "left"  # how a round ends


class Place:
    """Where a rank's sessions of one kind speak, one at a time. Any thread."""

    def __init__(
        self, find_store: Callable[[], Store], *, rank: int, count: int, name: str
    ) -> None:
        """Begin with the first round.

        Args:
            find_store: returns what all ranks share.
            rank: this one.
            count: how many there are.
            name: the same on all ranks.
        """
        self.rank = rank
        self._find_store = find_store
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._round = -1  # all before it are over
        self._go_on()
        # Weakly: a session that is dropped gives nothing back.
        self._find_holder: Callable[[], object] = lambda: None

    def _go_on(self) -> None:
        self._round += 1
        self._has_said = False
        prefix = f"{self._name}/{self._round}"
        self._over = f"{prefix}/over"
        self._keys = [f"{prefix}/rank-{rank}" for rank in range(self._count)]

    @property
    def is_free(self) -> bool:
        """Whether no session has it."""
        return self._find_holder() is None

    def take(self, holder: object) -> None:
        """Let a session have it."""
        with self._lock:
            self._find_holder = weakref.ref(holder)

    def leave(self, holder: object) -> None:
        """Give it back; what the session has said counts no more, unless all have heard it."""
        with self._lock:
            if self._find_holder() is not holder:
                return
            self._find_holder = lambda: None
            try:
                self._end()
            except (RuntimeError, ValueError) as error:  # the group may end before its sessions
                _log.debug("other ranks do not hear of a session's end: %s", error)

    def begin(self, holder: object) -> None:
        """Let a session speak from here on, and not the one before, should it have been dropped.

        Raises:
            RuntimeError, ValueError: there is no store any more.
        """
        with self._lock:
            if self._find_holder() is holder:
                self._end()

    def _end(self) -> None:
        """Leave the round if this rank has spoken in it."""
        if self._has_said:
            self._find_store().compare_set(self._over, "", LEFT)
            self._go_on()

    def meet(self, holder: object, text: str) -> list[bytes]:
        """Speak in the first round that is not over; return what all ranks say, if they do.

        Raises:
            RuntimeError, ValueError: there is no store any more.
        """
        with self._lock:
            while self._find_holder() is holder:
                store = self._find_store()
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
                store.compare_set(self._over, "", ALL)  # another rank may leave meanwhile
            return []

    def find_silent(self) -> list[int]:
        """Return the ranks that have not spoken in the round.

        Raises:
            RuntimeError, ValueError: there is no store any more.
        """
        with self._lock:
            store = self._find_store()
            return [rank for rank, key in enumerate(self._keys) if not store.check([key])]


class Places:
    """All places of one rank, in one process group. Any thread."""

    def __init__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> None:
        """Begin with none: see `Place`."""
        self._find_store = find_store
        self._rank = rank
        self._count = count
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}

    def take(self, kind: str, holder: object) -> Place:
        """Let a session have the first free place of its kind, and return it."""
        with self._lock:
            for number in itertools.count():
                name = f"swapkit/{kind}/{number}"
                place = self._places.get(name)
                if place is None:
                    place = Place(self._find_store, rank=self._rank, count=self._count, name=name)
                    self._places[name] = place
                if place.is_free:
                    place.take(holder)
                    break
            return place


_finding = threading.Lock()
# By the process group: in another one all ranks begin anew.
_found: weakref.WeakKeyDictionary[object, Places] = weakref.WeakKeyDictionary()


def find_places() -> Places | None:
    """Return this rank's places; None if there are no other ranks."""
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
            raise ValueError("the process group in which the session began is gone")
        store: Store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        return store

    with _finding:
        return _found.setdefault(group, Places(find_store, rank=rank, count=count))
