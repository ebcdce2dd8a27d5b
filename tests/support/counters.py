"""Functions that count their calls, each in an object of another kind."""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import decimal
import functools
import io
import mmap
import os
import queue
import tempfile
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "COUNTED_CALLS"  # of the environment; whoever counts in it sets it to 0
# Whether a run has advanced these cannot be seen, so they count as advanced.
DOUBTFUL = frozenset({"iterated file", "pipe", "file for update"})
_LINES = "".join(f"{number}\n" for number in range(1, 99))


class Owner:
    """Holds a count; others refer to it weakly."""

    def __init__(self) -> None:
        self.counts = [0]


_owners: list[Owner] = []  # keeps them alive


def _owner() -> Owner:
    _owners.append(Owner())
    return _owners[-1]


class OwnError(ValueError):
    """Of the user's."""


class Unpickled(list[int]):
    """Shows nothing of its state to `pickle`."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Unpickled, ()


class Counted(type):
    """A metaclass whose method counts in the class."""

    calls = 0

    def count(cls) -> int:
        cls.calls += 1
        return cls.calls


def _in(held: Any, read: Callable[[Any], Any]) -> Callable[[], int]:
    """Count in the first item of what is read from an object."""

    def take() -> int:
        counts = read(held)
        counts[0] += 1
        return int(counts[0])

    read(held)  # fills caches
    return take


def _noted_error() -> Callable[[], int]:
    error: Any = KeyError("a")
    error.counts = [0]
    return _in(error, lambda held: held.counts)


def _in_context() -> Callable[[], int]:
    variable: contextvars.ContextVar[list[int]] = contextvars.ContextVar("variable")
    context = contextvars.copy_context()
    context.run(variable.set, [0])
    return _in(context, lambda held: next(each for key, each in held.items() if key is variable))


def _in_base_class() -> Callable[[], int]:
    class Base:
        counts = [0]  # noqa: RUF012 - of the class

    class Derived(Base):
        pass

    return _in(Derived, lambda held: held.counts)


def _in_class() -> Callable[[], int]:
    class Class(metaclass=Counted):
        pass

    return lambda: Class.count()  # noqa: PLW0108 - a function of the user's


def _in_simple_queue() -> Callable[[], int]:
    held: queue.SimpleQueue[int] = queue.SimpleQueue()
    held.put(0)

    def take() -> int:
        number = held.get() + 1
        held.put(number)
        return number

    return take


def _rewriting(held: Any) -> Callable[[], int]:
    """Count in the content of a file; its position stays."""

    def take() -> int:
        number = int(held.read()) + 1
        held.seek(0)
        text = f"{number:03}"
        held.write(text if isinstance(held, io.TextIOBase) else text.encode())
        held.seek(0)
        return number

    return take


def _temporary(text: str) -> Any:
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at exit
    file.write(text)
    file.seek(0)
    return _closed_at_exit(file)


def _closed_at_exit(file: Any) -> Any:
    atexit.register(file.close)
    return file


def _iterating() -> Callable[[], int]:
    lines = _closed_at_exit(os.fdopen(os.dup(_temporary("0\n" + _LINES).fileno())))
    next(lines)
    return lambda: int(next(lines))


def _reading_pipe() -> Callable[[], int]:
    reading, writing = os.pipe()
    os.write(writing, _LINES.encode())
    os.close(writing)
    lines = _closed_at_exit(os.fdopen(reading))
    return lambda: int(lines.readline())


def _in_environment() -> int:
    os.environ[VARIABLE] = str(int(os.environ[VARIABLE]) + 1)
    return int(os.environ[VARIABLE])


def _in_precision() -> Callable[[], int]:
    context = decimal.Context(prec=1)

    def take() -> int:
        context.prec += 1
        return context.prec - 1

    return take


# What makes a function that returns 1 when it is first called, then 2, and so on.
COUNTERS: dict[str, Callable[[], Callable[[], int]]] = {
    "weak reference": lambda: _in(weakref.ref(_owner()), lambda held: held().counts),
    "weak values": lambda: _in(
        weakref.WeakValueDictionary(a=_owner()), lambda held: held["a"].counts
    ),
    "weak set": lambda: _in(weakref.WeakSet([_owner()]), lambda held: next(iter(held)).counts),
    "cache": lambda: _in(functools.cache(lambda: [0]), lambda held: held()),
    "bounded cache": lambda: _in(functools.lru_cache(lambda: [0]), lambda held: held()),
    "map": lambda: _in(mmap.mmap(-1, 1), lambda held: held),
    "pointer": lambda: _in(ctypes.pointer(ctypes.c_int()), lambda held: held),
    "exception": lambda: _in(ValueError([0]), lambda held: held.args[0]),
    "own exception": lambda: _in(OwnError([0]), lambda held: held.args[0]),
    "noted exception": _noted_error,
    "view": lambda: _in({"a": [0]}.values(), lambda held: next(iter(held))),
    "proxy": lambda: _in(types.MappingProxyType({"a": [0]}), lambda held: held["a"]),
    "array of objects": lambda: _in(_objects(), lambda held: held[0]),
    "context": _in_context,
    "base class": _in_base_class,
    "class with a metaclass": _in_class,
    "simple queue": _in_simple_queue,
    "text": lambda: _rewriting(io.StringIO("000")),
    "bytes": lambda: _rewriting(io.BytesIO(b"000")),
    "file for update": lambda: _rewriting(_temporary("000")),
    "iterated file": _iterating,
    "pipe": _reading_pipe,
    "environment": lambda: _in_environment,
    "precision": _in_precision,
}


def _objects() -> Any:
    array = np.empty(1, object)
    array[0] = Unpickled([0])
    return array
