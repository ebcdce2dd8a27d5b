"""What ranks write for each other in the store of their process group, as on a notice board.

A *topic* has a note of each rank, which only that rank writes (`publish`), or one for all ranks,
which the first to write decides for good (`decide`). A store may outlive a process group, and its
host may hang: no request waits longer than `ANSWER_SECONDS`, and after that none is made.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import fields
from functools import cache
from itertools import count as count_up
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import torch
import torch.distributed

from swapkit._runtime.model.ranks import count_ranks
from swapkit._runtime.torch_compat.internals import connect_again, default_store
from swapkit.errors import InvalidDocument
from swapkit.ir.documents import parse_document
from swapkit.units import MOST_BYTES, show

if TYPE_CHECKING:
    from swapkit._runtime.torch_compat.internals import Store

_T = TypeVar("_T")

# ---- notes ---------------------------------------------------------------------------------------
#
# A note is a value of a *form*: a dataclass (in JSON the list of its fields), `tuple[form, ...]`,
# `dict[str, form]`, `form | None`, `str`, `bool`, `int` or `float`. Numbers are not negative.

MOST_TEXT = 4 << 20  # bytes of a note: JSON takes 25 times as much memory, once read
_PLAIN = (str, bool, int, float)
_MOST: dict[object, float] = {int: MOST_BYTES, float: 1e9}  # an integer may not even fit a float
_hints_of = cache(get_type_hints)


def write(value: object) -> str:
    """Return the text of a note."""
    return json.dumps(value, default=lambda each: [getattr(each, at.name) for at in fields(each)])


def parse(text: bytes, form: type[_T], whose: str = "a rank") -> _T:
    """Return the note that another rank wrote. `whose`: names the rank in errors.

    Raises:
        InvalidDocument: the text is too long, or of another form.
    """
    try:
        made: _T = _make(form, parse_document(text if len(text) <= MOST_TEXT else b""))
    except (TypeError, ValueError) as error:
        raise InvalidDocument(
            f"{whose} published {show(text)}, which this version of swapkit cannot read. Use the "
            "same version on all ranks"
        ) from error
    return made


def _make(form: Any, value: Any) -> Any:  # noqa: ANN401 - any form
    if form in _PLAIN:
        _check(form, value)
        return value
    kind, of = get_origin(form), get_args(form)
    if kind is UnionType:
        return None if value is None else _make(of[0], value)
    if kind is dict and isinstance(value, dict):
        return {key: _make(of[1], each) for key, each in value.items()}
    if isinstance(value, list):
        return _make_of_several(form, value)
    raise TypeError(form)


def _make_of_several(form: Any, values: list[object]) -> Any:  # noqa: ANN401 - any form
    if get_origin(form) is tuple:
        return tuple(_make(get_args(form)[0], each) for each in values)
    if not hasattr(form, "__dataclass_fields__"):
        raise TypeError(form)
    pairs = zip(_hints_of(form).items(), values, strict=True)
    return form(**{name: _make(inner, each) for (name, inner), each in pairs})


def _check(form: object, value: Any) -> None:  # noqa: ANN401 - any value of JSON
    """Raise TypeError unless a plain value is of a form."""
    if type(value) is not form and not (form is float and type(value) is int):
        raise TypeError(form)
    if form in _MOST and not 0 <= value <= _MOST[form]:
        raise TypeError(value)


# ---- threads -------------------------------------------------------------------------------------
#
# Requests run on threads of their own: they may take forever. These are daemons, so that such a
# request does not keep the program from ending. But torch aborts the process if a request returns
# while the interpreter ends. So the interpreter first waits for the threads, as long as a server
# may take to answer.

ANSWER_SECONDS = 10.0  # then a store counts as gone: torch's waits forever if its host hangs
# In each of which the request's thread can run: a process that is suspended for longer than a store
# may take to answer still waits for most of that time afterwards.
_WAITS = 10

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


def begin(ask: Callable[[], _T]) -> Future[_T]:
    """Return what requests to a store will return, on a thread of their own."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            answer.set_exception(error)

    start(run, name="swapkit-store")
    return answer


# ---- boards --------------------------------------------------------------------------------------


class Board:
    """The notes of all ranks, as one of them sees them. Any thread.

    All methods that make requests raise RuntimeError or ValueError if the store is gone, and
    InvalidDocument, a ValueError, if a note is malformed.
    """

    def __init__(self, find_store: Callable[[], Store], *, rank: int, count: int) -> None:
        """Make no request yet.

        Args:
            find_store: returns the store that all ranks share; raises ValueError if it is gone.
            rank: this rank.
            count: the number of ranks.
        """
        self.rank = rank
        self.count = count
        self._find_store = find_store
        self._lock = threading.Lock()  # held during a request to the store, perhaps forever
        self._is_mute = False  # whether a request got no answer
        self._is_own = False  # whether requests run on the thread that makes them
        self._users_lock = threading.Lock()
        self._users: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()

    def connect(self) -> Board:
        """Return the board with a connection of its own, for one thread that may wait forever."""
        store = connect_again(self._find_store())
        board = Board(lambda: store, rank=self.rank, count=self.count)
        board._is_own = True
        return board

    def reserve(self, topic: str, user: object) -> str:
        """Return the first `topic/number` that nothing else on this rank uses, for `user`."""
        with self._users_lock:
            names = (f"{topic}/{number}" for number in count_up())
            name = next(each for each in names if each not in self._users)
            self._users[name] = user
            return name

    def release(self, name: str) -> None:
        """Undo `reserve`, as the end of the user does."""
        with self._users_lock:
            self._users.pop(name, None)

    # ---- requests --------------------------------------------------------------------------------

    def publish(self, topic: str, note: object) -> None:
        """Write this rank's note, in place of its former one."""
        self._ask(lambda store: store.set(f"{topic}/rank-{self.rank}", write(note)))

    def read(
        self, topic: str, form: type[_T], ranks: Iterable[int], *, needs_all: bool = True
    ) -> dict[int, _T]:
        """Return the notes of ranks, by rank; if one is missing, none or only those that exist."""
        keys = {rank: f"{topic}/rank-{rank}" for rank in ranks}

        def ask(store: Store) -> dict[int, bytes]:
            known = keys
            if not store.check(list(keys.values())):
                known = {at: keys[at] for at in keys if not needs_all and store.check([keys[at]])}
            texts = store.multi_get(list(known.values())) if known else []
            return dict(zip(known, texts, strict=True))

        found = self._ask(ask)
        return {rank: parse(text, form, f"rank {rank}") for rank, text in found.items()}

    def decide(self, topic: str, note: _T) -> _T:
        """Write a note unless there is one; return the one that there is, which never changes."""
        text = write(note)
        return parse(self._ask(lambda store: store.compare_set(topic, "", text)), type(note))

    def find(self, topic: str, form: type[_T]) -> _T | None:
        """Return what was decided; None: nothing yet."""
        text = self._ask(lambda store: store.get(topic) if store.check([topic]) else None)
        return None if text is None else parse(text, form)

    def _ask(self, ask: Callable[[Store], _T]) -> _T:
        if self._is_own:
            return ask(self._find_store())
        if self._is_mute:
            raise RuntimeError("the process group's store did not answer an earlier request")

        def ask_alone() -> _T:
            with self._lock:
                return ask(self._find_store())

        answer = begin(ask_alone)
        for _ in range(_WAITS):
            wait([answer], ANSWER_SECONDS / _WAITS)  # no longer than for the answer
        if not answer.done():
            self._is_mute = True
            raise RuntimeError(
                f"the process group's store has not answered for {ANSWER_SECONDS:.0f} seconds"
            )
        return answer.result()


def once_per_group(make: Callable[[Board], _T]) -> Callable[[], _T | None]:
    """Return a function that finds what each default process group has once.

    It returns None where there are no other ranks. In a new group all ranks start again.

    Args:
        make: takes the group's board. Called under a lock, so it must not wait.
    """
    found: weakref.WeakKeyDictionary[object, _T] = weakref.WeakKeyDictionary()
    lock = threading.Lock()

    def find() -> _T | None:
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

        with lock:
            if group not in found:
                found[group] = make(Board(find_store, rank=distributed.get_rank(), count=count))
            return found[group]

    return find
