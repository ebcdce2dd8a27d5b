"""What a part changes outside of itself: a second run of its function would change that twice.

The objects that a function can reach are noted before its first run and compared after it: the
module and its submodules, the arguments, the variables and global names that the function and the
Python functions it names use, and the attributes of classes and modules by these names. For
tensors, the version counts, and that of the gradient; for files, the positions. What is written
elsewhere, such as the standard output, is not seen.
"""

from __future__ import annotations

import array
import collections
import collections.abc
import contextlib
import contextvars
import functools
import gc
import io
import marshal
import mmap
import pickle
import random
import sys
import threading
import types
import weakref
from _ctypes import _SimpleCData
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from swapkit._runtime.torch_compat.internals import NoFunctionModes, version_of
from swapkit._runtime.torch_compat.isolation import untraced

CData = _SimpleCData.__base__  # of all objects of ctypes
_MOST_OBJECTS = 20_000  # of one part; if there are more, they may have changed
_MOST_ITEMS = 5_000  # of one container; what the items of a larger one hold is not compared
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
# Modules of objects that are compared by a digest.
_DIGESTED = frozenset({"decimal", "numpy"})
_MOST_BYTES = 4 << 30  # of one array; a larger one may have changed
_MOST_COPIED = 256 << 20  # the same of a buffer that has to be copied
_PIECE = 1 << 20  # elements of an array that are read at once
_VALUES = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NUMBERS = frozenset({int, float, complex})
# Of libraries, and with a state of the user's in attributes. Objects of others cache there, too.
_OPEN = frozenset({"_thread", "_weakrefset", "argparse", "collections", "multiprocessing"}) | {
    "os", "queue", "tempfile", "threading", "torch", "types", "weakref",
}  # fmt: skip
# Modules of compiled classes, which hold what they refer to: methods, caches, views, exceptions.
_COMPILED = frozenset({"_contextvars", "_queue", "builtins", "functools"})
_STACK = (types.FrameType, types.TracebackType)  # where an exception was raised
# Their state is their own: code that only calls functions of these does not change it.
_LIBRARIES = (sys.stdlib_module_names | {"numpy", "swapkit", "torch"}) - {"__main__"}


class Surroundings:
    """The state of what a function can reach, before it runs. Its methods are not called."""

    @untraced
    def __init__(self, roots: Sequence[object]) -> None:
        self._roots = roots
        self._before = _walk(roots)
        self._numbers = _generators()

    @untraced
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the function can reach."""
        return [each for each, _ in self._before or () if issubclass(type(each), torch.Tensor)]

    @untraced
    def have_changed(self) -> bool:
        """Return whether something may have changed since; holds no tensor any more afterwards."""
        roots, before, numbers = self._roots, self._before, self._numbers
        self._roots, self._before = (), None
        now = _walk(roots)
        if before is None or now is None or numbers != _generators():
            return True
        return len(before) != len(now) or not all(map(_is_same, before, now))


def _is_same(one: tuple[Any, object], other: tuple[Any, object]) -> bool:
    if one[1] != other[1]:
        return False
    is_value = type(one[0]) in _VALUES and type(one[0]) is type(other[0])
    return one[0] is other[0] or (is_value and _bits(one[0]) == _bits(other[0]))


def _bits(values: Any) -> bytes:  # noqa: ANN401 - of _VALUES
    """Return the bytes of `_VALUES`: 0.0 equals -0.0, and the hash of -1 is that of -2."""
    return marshal.dumps(values, 2)  # later versions depend on the counts of references


def _walk(roots: Sequence[object]) -> list[tuple[Any, object]] | None:
    """Return what is reachable: each object once, with its state. None: it cannot be compared."""
    reach = _Reach(roots)
    while reach.waiting or reach.look_up_names():
        thing = reach.waiting.popleft()
        try:
            reach.take(thing)
        except Exception:  # noqa: BLE001 - of a class of the user's
            return None
        if len(reach.found) > _MOST_OBJECTS:
            return None
    return reach.found


class _Reach:
    """What has been reached so far, in an order that is the same while nothing changes."""

    def __init__(self, roots: Sequence[object]) -> None:
        self.found: list[tuple[Any, object]] = []
        self.waiting: collections.deque[object] = collections.deque(roots)
        self._seen: set[int] = set()
        self._names = {"forward": None}  # that the code reached so far uses
        # Of classes and modules only what the code names: the rest of a program is behind it. With
        # the number of names that were looked up.
        self._named: dict[int, tuple[Mapping[str, object], int]] = {}

    def look_up_names(self) -> bool:
        """Let the attributes of classes and modules wait that the code names; are there any?"""
        names = list(self._names)
        for number, (attributes, done) in self._named.items():
            self.waiting.extend(attributes[name] for name in names[done:] if name in attributes)
            self._named[number] = attributes, len(names)
        return bool(self.waiting)

    def take(self, thing: Any) -> None:  # noqa: ANN401 - anything
        """Note an object, and let what it holds wait."""
        kind = type(thing)
        if kind in _VALUES:
            self.found.append((thing, None))
        elif id(thing) not in self._seen:
            self._seen.add(id(thing))
            state, inside = self._read(thing, kind)
            self.found.append((thing, state))
            self.waiting.extend(inside)

    def _read(self, thing: Any, kind: type) -> tuple[object, list[object]]:  # noqa: ANN401
        """Return an object's own state, and what it holds."""
        state, inside = self._look_at(thing, kind)
        if len(inside) <= _MOST_ITEMS:
            return (state, len(inside)), inside
        held = hash(tuple(each if type(each) in _VALUES else id(each) for each in inside))
        # The hash of a text is that of its bytes.
        rest = [each if type(each) in _NUMBERS else type(each) is bytes for each in inside]
        return (state, held, crc32(_bits(rest))), []

    def _look_at(self, thing: Any, kind: type) -> tuple[object, list[object]]:  # noqa: ANN401
        for kinds, state_of, held_by in _STATES:
            if issubclass(kind, kinds):
                # Attributes first: an object may get its dictionary when this is read.
                own = _own_attributes(thing, kind)
                return state_of(thing), own + held_by(thing)
        if any(each.__module__.partition(".")[0] in _DIGESTED for each in kind.__mro__):
            digest, objects = _digest(thing)
            others = _attributes(thing, kind)
            if any(each.__name__ == "memmap" for each in kind.__mro__):  # its bytes are digested
                others = [each for each in others if not isinstance(each, mmap.mmap)]
            return digest, objects + others
        inside = _items(thing, kind)
        if inside is None:
            return None, self._inside(thing, kind)
        return None, inside + _own_attributes(thing, kind)

    def _inside(self, thing: Any, kind: type) -> list[object]:  # noqa: ANN401 - anything
        """Return what an object holds that is no container."""
        if kind is types.FunctionType:
            return self._inside_function(thing)
        if issubclass(kind, type | types.ModuleType):
            return self._add_names(thing, kind)
        is_own = not _is_of_library(kind.__module__)
        package = kind.__module__.partition(".")[0]
        inside: list[object] = [kind] if is_own else []
        if is_own or (package in _OPEN and not issubclass(kind, threading.Thread)):
            inside += _attributes(thing, kind)
        return inside + _referents(thing, kind)

    def _add_names(self, thing: Any, kind: type) -> list[object]:  # noqa: ANN401 - class, module
        """Reach the attributes of a class or a module, of no library, that the code names.

        Return what code reaches of a class without a name: its classes, and special methods.
        """
        is_class = issubclass(kind, type)
        owner: Any = type if is_class else types.ModuleType
        attributes = owner.__getattribute__(thing, "__dict__")
        if _is_of_library(owner.__getattribute__(thing, "__module__" if is_class else "__name__")):
            # All programs share the variables of the environment.
            attributes = {name: attributes[name] for name in ("environ",) if name in attributes}
        self._named[id(thing)] = attributes, 0
        special = [each for name, each in attributes.items() if name[:2] == "__"]
        return [kind, *thing.__mro__, *special] if is_class else []

    def _inside_function(self, function: types.FunctionType) -> list[object]:
        if _is_of_library(function.__module__):
            return []
        names = dict.fromkeys(_names_of(function.__code__))
        self._names.update(names)
        cells = [each.cell_contents for each in function.__closure__ or () if _is_filled(each)]
        found = [function.__globals__[name] for name in names if name in function.__globals__]
        own = (function.__defaults__, function.__kwdefaults__, vars(function))
        return [*cells, *found, *own]


def _referents(thing: object, kind: type) -> list[object]:
    """Return what an object of a compiled class refers to."""
    if all(each.__module__ not in _COMPILED for each in kind.__mro__[:-1]):
        return []
    found = [each for each in gc.get_referents(thing) if type(each) not in _STACK]
    # A cache has its items in the order of their last uses, which is no change.
    return sorted(found, key=id) if kind.__module__.startswith("functools") else found


def _items(thing: Any, kind: type) -> list[object] | None:  # noqa: ANN401 - anything
    """Return the items of a container; None: it is none."""
    if issubclass(kind, collections.OrderedDict):
        return [each for item in collections.OrderedDict.items(thing) for each in item]
    if issubclass(kind, dict):
        return [each for item in dict.items(thing) for each in item]
    if issubclass(kind, contextvars.ContextVar):
        return [thing.get(None)]
    for container in _CONTAINERS:
        if issubclass(kind, container):
            return list(container.__iter__(thing))
    return None


def _version(tensor: torch.Tensor) -> tuple[int, bool]:
    with NoFunctionModes():
        return 0 if tensor.is_inference() else version_of(tensor), tensor.requires_grad


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    with NoFunctionModes():
        return tensor.grad if tensor.is_leaf else None  # torch warns for others


def _sum(thing: Any) -> object:  # noqa: ANN401 - it has a buffer
    """Return a digest of a buffer, which is copied by one call with the GIL.

    So no other thread finds the buffer in use, and fails to change its size.

    Raises:
        BufferError: it is too large to be copied twice, or cannot be read.
    """
    copy: Callable[[Any], bytes | bytearray] = _copy_view
    kind = type(thing)
    if issubclass(kind, bytearray):
        nbytes, copy = bytearray.__len__(thing), _copy_bytes
    elif issubclass(kind, array.array):
        itemsize = vars(array.array)["itemsize"].__get__(thing)
        nbytes, copy = array.array.__len__(thing) * itemsize, array.array.tobytes
    elif kind is memoryview:
        try:
            nbytes = thing.nbytes
        except ValueError:  # it is released
            return None
        if thing.readonly and issubclass(type(thing.obj), bytes | mmap.mmap):
            return nbytes  # nothing can write to it
    else:
        nbytes = memoryview(thing).nbytes
    if nbytes > _MOST_COPIED or not _has_bytes(thing):
        raise BufferError
    return crc32(copy(thing))


def _copy_view(thing: Any) -> bytes:  # noqa: ANN401 - of a fixed size
    return memoryview(thing).tobytes()


def _copy_bytes(thing: bytearray) -> bytearray:
    return bytearray.__getitem__(thing, slice(None))


def _map(thing: mmap.mmap) -> object:
    """Return the state of a map: a new one each time if a run may have written to it.

    A map is not read beyond the end of its file, which others may have truncated: that would end
    the process.
    """
    with contextlib.suppress(ValueError):  # it is closed
        with memoryview(thing) as view:
            is_fixed, nbytes = view.readonly, view.nbytes
        if is_fixed:
            return mmap.mmap.tell(thing)
        if nbytes > _MOST_COPIED or not _is_whole(thing):
            return object()
        return mmap.mmap.tell(thing), crc32(mmap.mmap.__getitem__(thing, slice(None)))
    return None


def _has_bytes(thing: Any) -> bool:  # noqa: ANN401 - of a buffer
    """Return whether a buffer is no part of a map that may be longer than its file."""
    owners, seen = [thing], {id(thing)}
    for owner in owners:  # which grows; some own themselves
        if issubclass(type(owner), mmap.mmap) and not _is_whole(owner):
            return False
        new = [each for each in _owners(owner, type(owner)) if id(each) not in seen]
        seen.update(map(id, new))
        owners += new
    return True


def _is_whole(owner: mmap.mmap) -> bool:
    with memoryview(owner) as view:
        # Only its text has the offset: `length=8, pos=0, offset=0>`.
        end = view.nbytes + int(mmap.mmap.__repr__(owner).rpartition("=")[2][:-1])
    try:
        return mmap.mmap.size(owner) >= end
    except OSError:  # it has no file
        return True
    except ValueError:  # it does not know its file
        return False


def _owners(thing: Any, kind: type) -> Sequence[object]:  # noqa: ANN401 - of a buffer
    """Return what may own the bytes of a buffer; none: itself."""
    if kind is memoryview:
        return [thing.obj]
    if issubclass(kind, CData | dict):  # it keeps what it was made from, perhaps in a dictionary
        return gc.get_referents(thing)
    numpys = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "numpy"]
    bases = [vars(each)["base"].__get__(thing) for each in numpys if "base" in vars(each)]
    return bases or (_attributes(thing, kind) if numpys else [])


def _file(file: Any) -> object:  # noqa: ANN401 - of io.IOBase
    """Return the state of a file: a new one each time if a run may have changed it unseen."""
    if file is sys.stdout or file is sys.stderr:
        return None
    if _has_users_methods(file):
        return object()
    if file.closed:
        return None
    if isinstance(file, io.BytesIO | io.StringIO):
        return crc32(_bits(file.getvalue())), file.tell()  # no hash: bytes keep theirs
    with contextlib.suppress(OSError):  # a pipe has no position, nor has a text that is iterated
        if not (file.readable() and file.writable()):  # such a file can be rewritten in place
            return file.tell()
    return None if file.isatty() else object()


def _has_users_methods(file: object) -> bool:
    """Return whether a file, or one below it, is of a class of the user's."""
    while file is not None and _is_of_library(type(file).__module__):
        file = getattr(file, "buffer", getattr(file, "raw", None))
    return file is not None


def _nothing(_: object) -> list[object]:
    return []


# The states of objects, and what these hold besides.
_STATES: tuple[
    tuple[type | types.UnionType, Callable[[Any], object], Callable[[Any], list[object]]], ...
] = (
    (torch.Tensor, _version, lambda tensor: [*vars(tensor).values(), _gradient(tensor)]),
    (torch.Generator, lambda generator: bytes(generator.get_state().numpy()), _nothing),
    (random.Random, random.Random.getstate, _nothing),
    (mmap.mmap, _map, _nothing),
    (bytearray | array.array | memoryview | CData, _sum, gc.get_referents),
    (weakref.ref, lambda _: None, lambda reference: [weakref.ref.__call__(reference)]),
    (io.IOBase, _file, _nothing),
    (collections.abc.Iterator, lambda _: object(), _nothing),  # a run may have advanced it
)


def _names_of(code: types.CodeType) -> list[str]:
    """Return the names that code may use, nested functions and texts included."""
    nested = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    return [*code.co_names, *texts, *[name for each in nested for name in _names_of(each)]]


def _digest(thing: Any) -> tuple[object, list[object]]:  # noqa: ANN401 - of _DIGESTED
    """Return a digest of an object of numpy, and the objects in it that this does not cover.

    Large arrays are neither copied nor pickled.

    Raises:
        BufferError: an array is too large to be read twice, or cannot be read.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.ndarray):
        return _digest_array(numpy, numpy.ndarray.view(thing, numpy.ndarray))
    if not _has_bytes(thing):  # a record is a part of an array
        raise BufferError
    return pickle.dumps(thing), []


def _digest_array(numpy: Any, array: Any) -> tuple[object, list[object]]:  # noqa: ANN401
    form = array.shape, array.strides, str(array.dtype), array.flags.writeable
    if _is_fixed(array) or array.nbytes == 0:
        return form, []
    most_bytes = _MOST_COPIED if array.dtype.hasobject else _MOST_BYTES
    if array.nbytes > most_bytes or not _has_bytes(array):
        raise BufferError
    if array.dtype.hasobject:  # the bytes are those of fields, and the objects' addresses
        return (*form, array.dtype.names and crc32(array.tobytes())), _objects_in(array)
    pieces = numpy.nditer(
        array, ["external_loop", "buffered"], [["readonly", "contig"]], buffersize=_PIECE
    )
    sum_ = functools.reduce(lambda found, piece: crc32(piece.view("u1"), found), pieces, 0)
    return (*form, sum_), []


def _objects_in(array: Any) -> list[object]:  # noqa: ANN401 - of numpy
    names = array.dtype.names
    if names is None:
        return list(array.flat) if array.dtype.hasobject else []
    return [each for name in names for each in _objects_in(array[name])]


def _is_fixed(array: Any) -> bool:  # noqa: ANN401 - of numpy
    """Return whether nothing in this process can write to an array, through any view."""
    plain = type(array)  # a base may be of the user's
    while not plain.flags.__get__(array).writeable:
        base = plain.base.__get__(array)
        if not isinstance(base, plain):
            return isinstance(base, bytes | mmap.mmap) and memoryview(base).readonly
        array = base
    return False


def _attributes(thing: object, kind: type) -> list[object]:
    """Return the values of an object's attributes, slots included."""
    found = []
    try:
        owner: Any = threading.local if issubclass(kind, threading.local) else object
        attributes = owner.__getattribute__(thing, "__dict__")
    except AttributeError:
        attributes = {}
    for each in kind.__mro__:
        for slot in vars(each).values() if "__slots__" in vars(each) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it has no value
                    found.append(slot.__get__(thing, kind))
    return [*attributes.values(), *found] if type(attributes) is dict else found


def _own_attributes(thing: object, kind: type) -> list[object]:
    """Return the values of the attributes that a class of the user's gives an object."""
    return [] if _is_of_library(kind.__module__) else _attributes(thing, kind)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises while its variable has no value
    except ValueError:
        return False
    return True


def _is_of_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _generators() -> tuple[object, ...]:
    """Return the states of random numbers that a second run of a function does not restore."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))
