"""Which ranks have what in common, and the meeting places of their sessions."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch.nn.parameter import is_lazy

from swapkit._runtime.control.rank_store import OnePerGroup, SharedStore, parse_said
from swapkit._runtime.model.tracker import find_weakly
from swapkit.errors import InvalidDocument
from swapkit.texts import get_logger
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from swapkit._runtime.torch_compat.internals import Store
    from swapkit.ir.traces import Trace

# ---- rank likeness -------------------------------------------------------------------------------
#
# What ranks have in common: texts that are equal on ranks that do the same.


def describe_parts(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> str:
    """Return a digest of what a session trains: classes, names and shapes of parameters.

    It is equal on replicas, and on ranks with shards of the same parameters, whatever other
    sessions each rank has.
    """
    return _digest(_list_parts(model, optimizers))


def describe_weakly(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Callable[[], str]:
    """Return a function that does `describe_parts` for those that still exist then."""
    find_model, known = find_weakly(model), [weakref.ref(each) for each in optimizers]

    def describe() -> str:
        return describe_parts(find_model(), [each for find in known if (each := find())])

    return describe


def _list_parts(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[str]:
    if model is not None:
        yield type(model).__qualname__
        for name, parameter in model.named_parameters():
            yield f"{name} {_describe(parameter)}"
    for optimizer in optimizers:
        yield type(optimizer).__qualname__
        for group in optimizer.param_groups:
            yield " ".join(map(_describe, group["params"]))


def _describe(parameter: torch.Tensor) -> str:
    shape = "" if is_lazy(parameter) else str(tuple(parameter.shape))
    return f"{parameter.dtype} {shape}"


def describe_step(trace: Trace) -> str:
    """Return a digest of what autograd saves and uses in a recorded step, in order.

    A plan decides about that. Operators do not count: those of the first steps differ, in which
    optimizers make their states and DDP sorts its buckets.
    """
    storages = trace.storages
    events = (
        f"{event.kind.value} "
        + ("" if event.storage is None else f"{storages[event.storage].nbytes}")
        for event in trace.events
    )
    return _digest(events)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# ---- rank meetings -------------------------------------------------------------------------------
#
# Meeting places: they match sessions of several ranks, even if some ranks have other sessions.
#
# Each rank lists its open sessions in the store: for each its *parts* (a text that says what it
# trains), its place, and the round in which it speaks there. Sessions with the same parts meet at
# places of their own. Those that are open at the same time use different places, in the order in
# which they first speak. So sessions of other parts, and sessions that never speak, do not matter
# to where a session meets.
#
# Sessions meet in rounds. A round is over once all ranks have spoken in it, except for those whose
# lists show that they will not. It is also over once a session that spoke in it ended before that.
# The first rank to write the outcome to the store decides it (which ranks have spoken, or `LEFT`),
# and the outcome never changes. So all ranks pass through the same rounds: a session that only some
# ranks have uses up one round, and the sessions after it meet in the next.

_log = get_logger(__name__)
LEFT = "left"  # the outcome of a round that a session has left
_NO_ROUND = -1
_T = TypeVar("_T")


@dataclass(slots=True)
class _Listed:
    """An open session, as its rank lists it."""

    parts: str
    place: str = ""  # none before the session first speaks
    round: int = _NO_ROUND  # in which it has spoken
    is_settled: bool = False  # it speaks in no other round

    def may_speak(self, other: _Listed) -> bool:
        """Return whether this session may yet speak in the round of another one."""
        if not self.place:
            return self.parts == other.parts
        return self.place == other.place and not self.is_settled


class _Place:
    """A place, as one rank sees it. Changed only in requests to the store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.round = 0  # all earlier rounds are over
        self.speaker: _Listed | None = None  # this rank's session that has spoken in the round

    @property
    def over(self) -> str:
        """The store's key of the round's outcome."""
        return f"{self.name}/{self.round}/over"

    def key_of(self, rank: int) -> str:
        """Return the store's key of what a rank says in the round."""
        return f"{self.name}/{self.round}/rank-{rank}"

    def go_on(self) -> None:
        """Go to the next round."""
        self.round += 1
        self.speaker = None


class MeetingPlaces:
    """All meeting places of one rank in one process group. Any thread.

    Without a store, `join`, `settle` and `leave` do nothing, and `meet` raises.
    """

    def __init__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> None:
        """Begin without sessions.

        Args:
            find_store: returns the store that all ranks share.
            rank: this rank.
            count: the number of ranks.
        """
        self.rank = rank
        self.count = count
        self._store = SharedStore(find_store)
        self._lists = [f"swapkit/sessions/rank-{each}" for each in range(count)]
        self._places: dict[str, _Place] = {}
        self._lock = threading.RLock()  # of the next; not held during requests to the store
        # Weak references: a session that is dropped never calls `leave`.
        self._sessions: weakref.WeakKeyDictionary[object, _Listed] = weakref.WeakKeyDictionary()

    def join(self, session: object, parts: str) -> None:
        """List a session that begins. `parts`: what it trains, for `_Listed`."""
        with self._lock:
            self._sessions[session] = _Listed(parts)
        self._tell(self._list)

    def settle(self, session: object) -> None:
        """Note that a session will speak in no other round."""
        listed = self._find(session)
        if listed is not None and not listed.is_settled:
            listed.is_settled = True
            self._tell(self._list)

    def leave(self, session: object) -> None:
        """End a session, and withdraw its text, unless the round is over."""
        with self._lock:
            listed = self._sessions.pop(session, None)
        if listed is not None:
            self._tell(partial(self._end, listed))

    def meet(self, session: object, text: str) -> dict[int, bytes]:
        """Speak in the first round that is not over; once it is over, return all texts by rank.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        listed = self._seat(session)
        return {} if listed is None else self._store.ask(partial(self._meet, listed, text))

    def find_silent(self, session: object) -> list[int]:
        """Return the ranks that may yet speak in the round of a session that has spoken.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        listed = self._find(session)
        return [] if listed is None else self._store.ask(partial(self._find_silent, listed))

    def name_round(self, session: object) -> str:
        """Return a key of the round in which a session has spoken, the same on all its ranks."""
        listed = self._find(session)
        return "" if listed is None else f"{listed.place}/{listed.round}"

    def ask(self, ask: Callable[[Store], _T], /) -> _T:
        """Return what `ask` returns, which makes requests to the store.

        Raises:
            RuntimeError, ValueError: the store is gone.
        """
        return self._store.ask(ask)

    # ---- this rank's sessions --------------------------------------------------------------------

    def _find(self, session: object) -> _Listed | None:
        with self._lock:
            return self._sessions.get(session)

    def _seat(self, session: object) -> _Listed | None:
        """Give a session the first free place of its parts; None: the session has ended."""
        with self._lock:
            listed = self._sessions.get(session)
            if listed is not None and not listed.place:
                taken = {each.place for each in self._sessions.values()}
                names = (f"swapkit/{listed.parts}/{number}" for number in itertools.count())
                listed.place = next(name for name in names if name not in taken)
                self._places.setdefault(listed.place, _Place(listed.place))
            return listed

    def _tell(self, tell: Callable[[Store], object]) -> None:
        try:
            self._store.ask(tell)
        except (RuntimeError, ValueError) as error:  # the group may end before its sessions
            _log.debug("cannot tell other ranks which sessions there are: %s", error)

    # ---- requests to the store -------------------------------------------------------------------

    def _list(self, store: Store) -> None:
        with self._lock:
            listed = [
                (each.parts, each.place, each.round, each.is_settled)
                for each in self._sessions.values()
            ]
        store.set(self._lists[self.rank], json.dumps(listed))

    def _end(self, listed: _Listed, store: Store) -> None:
        place = self._places.get(listed.place)
        if place is not None and place.speaker is listed:
            self._leave_round(place, store)
        self._list(store)

    def _leave_round(self, place: _Place, store: Store) -> None:
        """Leave the round in which this rank has spoken."""
        store.compare_set(place.over, "", LEFT)
        place.go_on()

    def _meet(self, listed: _Listed, text: str, store: Store) -> dict[int, bytes]:
        place = self._places[listed.place]
        if place.speaker is not None and place.speaker is not listed:
            self._leave_round(place, store)  # of a session that was dropped
        while self._is_open(listed):
            if store.check([place.over]):
                ranks = _read_outcome(store.get(place.over), self.count)
                if place.speaker is listed and self.rank in ranks:
                    texts = store.multi_get([place.key_of(rank) for rank in ranks])
                    return dict(zip(ranks, texts, strict=True))
                place.go_on()
                continue
            if place.speaker is None:
                self._speak(place, listed, text, store)
            if not self._decide(place, listed, store):
                break
        return {}

    def _speak(self, place: _Place, listed: _Listed, text: str, store: Store) -> None:
        store.set(place.key_of(self.rank), text)
        place.speaker, listed.round = listed, place.round
        self._list(store)  # after the text, which others read once they see this

    def _decide(self, place: _Place, listed: _Listed, store: Store) -> bool:
        """Write the outcome of a round if no rank is awaited in it; return whether it is over."""
        if not store.check(self._lists):
            return False
        here, awaited = _split(self._read_lists(store, range(self.count)), listed)
        if not awaited:
            store.compare_set(place.over, "", json.dumps(here))  # unless another rank did, or left
        return not awaited

    def _is_open(self, listed: _Listed) -> bool:
        with self._lock:
            return any(each is listed for each in self._sessions.values())

    def _find_silent(self, listed: _Listed, store: Store) -> list[int]:
        known = [rank for rank, key in enumerate(self._lists) if store.check([key])]
        unknown = [rank for rank in range(self.count) if rank not in known]
        _, awaited = _split(self._read_lists(store, known), listed)
        return sorted([*awaited, *unknown])

    def _read_lists(self, store: Store, ranks: Sequence[int]) -> dict[int, list[_Listed]]:
        """Return the open sessions of ranks that have listed theirs."""
        texts = store.multi_get([self._lists[rank] for rank in ranks])
        return dict(zip(ranks, map(_read_list, texts), strict=True))


def _read_list(text: bytes) -> list[_Listed]:
    """Return the sessions that a rank has listed; raises InvalidDocument for any other text."""
    found = parse_said(text)
    if isinstance(found, list) and all(map(_is_listed, found)):
        return [_Listed(*each) for each in found]
    raise InvalidDocument(f"a rank listed sessions in another form: {show(text)}")


def _is_listed(session: object) -> bool:
    match session:
        case [str(), str(), int(), bool()]:
            return True
    return False


def _read_outcome(outcome: bytes, count: int) -> list[int]:
    """Return the ranks that have spoken in a round that is over; none: a session has left it.

    Raises:
        InvalidDocument: the text has another form, or names other ranks than the first `count`.
    """
    if outcome == LEFT.encode():
        return []
    ranks = parse_said(outcome)
    if isinstance(ranks, list) and all(type(each) is int and 0 <= each < count for each in ranks):
        return ranks
    raise InvalidDocument(f"a rank ended a round in another form: {show(outcome)}")


def _split(lists: dict[int, list[_Listed]], own: _Listed) -> tuple[list[int], list[int]]:
    """Return the ranks that have spoken in the round of a session, and those that may yet.

    A rank without a session may yet begin one.
    """
    here, awaited = [], []
    for rank, listed in lists.items():
        if any((each.place, each.round) == (own.place, own.round) for each in listed):
            here.append(rank)
        elif not listed or any(each.may_speak(own) for each in listed):
            awaited.append(rank)
    return here, awaited


_places = OnePerGroup(MeetingPlaces)


def find_places() -> MeetingPlaces | None:
    """Return this rank's meeting places; None: there are no other ranks."""
    return _places.find()
