"""Parts that change what is outside of them never run twice."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import functools
import io
import mmap
import os
import queue
import random
import re
import sys
import threading
import types
import warnings
import weakref
from array import array as typed_array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import swapkit
from swapkit._runtime.recompute.surroundings import Surroundings
from tests.programs import assert_same_bits
from tests.support.counters import COUNTERS, DOUBTFUL, VARIABLE
from tests.unit._runtime.recompute.test_captured import RUNS, SIDE, gradient, leaf, plainly

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("installation")


class Counting(torch.nn.Module):
    """Changes what is outside of it, of which most could only be made again by a second run."""

    average: torch.Tensor

    def __init__(self, *, unseen: bool) -> None:
        super().__init__()
        self.calls, self.log, self.unseen = 0, [0.0], unseen
        self.register_buffer("average", torch.zeros(SIDE))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(float(value.detach().sum()))
        with torch.no_grad():
            self.average.lerp_(value.mean(0), 0.1)
        hidden = value * (2 + self.average)
        if self.unseen:
            hidden.detach().numpy()[:] += 1
        for _ in range(3):
            hidden = (hidden * 2).relu_()
        return hidden.sin()


@pytest.mark.parametrize("unseen", [False, True])
def test_region_when_it_changes_what_is_outside_then_it_runs_once_and_warns_of_what_it_keeps(
    unseen: bool,
) -> None:
    part, plain = swapkit.checkpoint(Counting(unseen=unseen)), Counting(unseen=unseen)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(RUNS + 1):
            assert_same_bits([gradient(plainly, part)], [gradient(plainly, plain)])
            assert_same_bits([part.average], [plain.average])
            assert (part.calls, part.log) == (plain.calls, plain.log)
    assert len(warned) == 1
    assert re.search("keeps more.*changes objects or tensors", str(warned[0].message))
    assert ("MiB of it" in str(warned[0].message)) is not unseen


class Cache:
    """A user's cache of keys."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


def test_region_when_a_users_cache_grows_in_it_then_it_grows_once() -> None:
    def gradients(wrap: Any) -> list[torch.Tensor]:
        def attend(value: torch.Tensor, cache: Cache) -> torch.Tensor:
            keys = cache.update(value * 3)
            return (value @ keys.t() / SIDE).softmax(-1) @ keys

        found, layer = [], wrap(attend)
        for _ in range(RUNS):
            x, cache = leaf(), Cache()
            (layer(x[:400], cache).sum() + layer(x[400:], cache).square().sum()).backward()
            assert cache.keys is not None
            assert cache.keys.shape == (SIDE, SIDE)
            assert x.grad is not None
            found.append(x.grad)
        return found

    assert_same_bits(gradients(swapkit.checkpoint), gradients(lambda function: function))


def test_outside_when_only_its_own_objects_change_then_it_may_run_twice() -> None:
    cell, module = [1], torch.nn.Linear(2, 2)
    namespace = types.SimpleNamespace(deep={"list": [module]})

    def function() -> object:
        return cell, namespace

    for change in (
        lambda: cell.append(2),
        lambda: setattr(module, "note", 3),
        namespace.deep["list"].clear,
        random.random,
    ):
        around = Surroundings((function, {"x": (torch.ones(2),)}))
        assert not around.have_changed()
        around = Surroundings((function,))
        change()
        assert around.have_changed()


class Slotted:
    """Keeps its state in a slot, or in its class."""

    __slots__ = ("calls",)
    total = 0

    def __init__(self) -> None:
        self.calls = 0

    def __iadd__(self, number: int) -> Slotted:
        type(self).total += number
        return self


@functools.cache
def cached(number: int) -> int:
    return number


def set_gradient(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones(2)


def named() -> None:
    pass


def swap(array: Any) -> None:
    array[0, 0], array[0, 1] = array[0, 1].copy(), array[0, 0].copy()


def view_of(array: Any) -> Any:
    view = array[:]
    view.flags.writeable = False
    return view


class Owned(dict[str, int]):
    calls = 0


LARGE = np.arange(3 << 18, dtype=np.float64).reshape(3, -1)
MASKED = np.ma.masked_array(np.zeros(3), mask=np.zeros(3, np.bool_))
ORDERED = collections.OrderedDict.fromkeys("abc")
CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "large dict": (dict.fromkeys(range(9_000), 0), lambda held: held.update({5: 1})),
    "user dict": (collections.UserDict(calls=0), lambda held: held.update(calls=1)),
    "bytes": (bytearray(4), lambda held: held.append(1)),
    "array": (np.zeros(4).view(np.recarray), lambda held: held.fill(1)),
    "thread": (threading.local(), lambda held: setattr(held, "calls", 1)),
    "context": (contextvars.ContextVar("calls"), lambda held: held.set(1)),
    "large array": (LARGE, swap),
    "base of an array": (view_of(LARGE), lambda _: swap(LARGE)),
    "mask": (MASKED, lambda held: held.mask.__setitem__(0, 1)),
    "order": (ORDERED, lambda held: held.move_to_end("a")),
    "attribute of a dict": (Owned(), lambda held: setattr(held, "calls", 1)),
    "file": (io.StringIO(), lambda held: held.write("line")),
    "part of an array": (LARGE[:, ::2], lambda held: held.__setitem__((1, 7), 1)),
    "array of objects": (np.array([[1]], object), lambda held: held.fill(2)),
    "function": (named, lambda held: setattr(held, "calls", 1)),
    "cache": (cached, lambda held: held(1)),
    "queue": (queue.Queue(), lambda held: held.put(1)),
    "simple queue": (queue.SimpleQueue(), lambda held: held.put(1)),
    "number of C": (ctypes.c_int(), lambda held: setattr(held, "value", 1)),
    "memory": (memoryview(bytearray(2)), lambda held: held.__setitem__(0, 1)),
    "generator": (torch.Generator(), lambda held: torch.rand(1, generator=held)),
    "tensor": (torch.zeros(2), lambda held: setattr(held, "calls", 1)),
    "gradient": (torch.zeros(2, requires_grad=True), set_gradient),
    "optimizer": (
        torch.optim.SGD([torch.zeros(2)]),
        lambda held: held.param_groups[0].update(lr=2.0),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_outside_when_an_object_of_any_kind_changes_then_it_is_seen(kind: str) -> None:
    held, change = CHANGES[kind]
    around = Surroundings((held,))
    assert not around.have_changed()
    around = Surroundings((held,))
    change(held)
    assert around.have_changed()


@pytest.mark.parametrize("kind", COUNTERS)
def test_outside_when_a_count_is_in_an_object_without_attributes_then_its_change_is_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    take = COUNTERS[kind]()
    assert Surroundings((take,)).have_changed() == (kind in DOUBTFUL)
    around = Surroundings((take,))
    assert (take(), around.have_changed()) == (1, True)
    assert take() == 2


@functools.lru_cache
def cached_list(number: int) -> list[int]:
    return [number]


def read(held: Any) -> None:
    """Use objects without a change of them."""
    cached(7)
    cached_list(1)  # is now the one used last
    with contextlib.suppress(ValueError):
        raise held["error"]
    _ = held["map"][0], held["text"].getvalue(), held["error"].args, held["queue"].qsize()
    _ = list(held["weak"]), held["bytes"].getvalue(), held["file"].name, held["view"].mapping
    _ = os.environ.get("HOME"), held["class"].factor, held["objects"][0]


def test_outside_when_an_object_is_only_read_then_it_has_not_changed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    released = memoryview(bytearray(2))
    released.release()
    closed = mmap.mmap(-1, 1)
    closed.close()
    owner = Cache()
    held: dict[str, Any] = {
        "released": [released, closed],
        "thread": threading.Thread(),
        "arrays": [np.arange(9)[::-2], np.zeros((0, 3)), np.str_("a")],
        "error": ValueError([0]),
        "map": mmap.mmap(-1, 1, access=mmap.ACCESS_READ),
        "text": io.StringIO("text"),
        "bytes": io.BytesIO(b"text"),
        "output": [sys.stdout, sys.stderr],
        "queue": queue.SimpleQueue(),
        "weak": weakref.WeakSet([owner]),
        "view": {"a": 1}.keys(),
        "class": Part,
        "objects": np.array([lambda: None], object),
    }
    cached(7)
    for number in range(3):
        cached_list(number)
    with (tmp_path / "text").open() as held["file"]:
        around = Surroundings((read, held))
        read(held)
        assert not around.have_changed()


def test_outside_when_another_thread_extends_a_buffer_then_it_never_finds_it_in_use() -> None:
    held, errors, is_over = bytearray(8 << 20), [], threading.Event()

    def extend() -> None:
        while not is_over.is_set():
            try:
                held.append(0)
            except BufferError as error:
                errors.append(error)

    thread = threading.Thread(target=extend)
    thread.start()
    for _ in range(20):
        Surroundings((held,)).have_changed()
    is_over.set()
    thread.join()
    assert errors == []


def test_outside_when_an_object_says_that_it_is_of_another_class_then_it_is_not_asked() -> None:
    class Lazy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise AssertionError("evaluated")

    assert not Surroundings(([Lazy()],)).have_changed()


class OwnFile(io.RawIOBase):
    """A file of the user's that notes each question."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _note(self, name: str) -> bool:
        self.asked.append(name)
        return True

    def __eq__(self, other: object) -> bool:
        return not self._note("__eq__")

    def __hash__(self) -> int:
        return self._note("__hash__")

    @property
    def closed(self) -> bool:
        return not self._note("closed")

    def readable(self) -> bool:
        return self._note("readable")

    def writable(self) -> bool:
        return self._note("writable")

    def tell(self) -> int:
        return self._note("tell")

    def write(self, data: Any) -> int:
        self._note("write")
        return len(data)


@pytest.mark.parametrize("around", ["nothing", "a buffer", "a text"])
def test_outside_when_a_file_is_of_a_users_class_then_it_is_not_asked_and_may_have_changed(
    around: str,
) -> None:
    own = OwnFile()
    held: Any = own
    if around != "nothing":
        held = io.BufferedWriter(own)
    if around == "a text":
        held = io.TextIOWrapper(held)
        held.write("not flushed yet")
    del own.asked[:]
    assert Surroundings((held,)).have_changed()
    assert own.asked == []
    if around == "a text":
        held = held.detach()
    if around != "nothing":
        held.detach()  # its finalizer would flush


class OwnMap(mmap.mmap):
    def tell(self) -> int:
        raise AssertionError("asked")

    size = tell


class OwnNumbers(typed_array):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("asked")

    @property
    def itemsize(self) -> int:
        raise AssertionError("asked")


class Point(ctypes.Structure):
    """Has no dictionary before it is asked for one."""

    _fields_ = (("x", ctypes.c_int),)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("asked")


class Unpicklable:
    def __reduce__(self) -> str:
        raise AssertionError("asked")


def records() -> Any:
    kinds = [("number", int), ("inner", [("item", object, (2,))])]
    return np.array([(1, ([Unpicklable(), [0]],))], kinds)


@pytest.mark.parametrize(
    "make", [lambda: OwnMap(-1, 8), lambda: OwnNumbers("d", [1.0]), Point, records]
)
def test_outside_when_an_object_of_a_users_class_is_read_then_it_is_not_asked(make: Any) -> None:
    assert not Surroundings((make(),)).have_changed()


@pytest.mark.parametrize("kind", ["number", "item"])
def test_outside_when_a_record_with_objects_changes_then_it_is_seen(kind: str) -> None:
    held = records()
    around = Surroundings((held,))
    if kind == "number":
        held["number"] += 1
    else:
        held["inner"]["item"][0, 1].append(1)
    assert around.have_changed()


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (0j, complex(0, -0.0)), (-1, -2)])
@pytest.mark.parametrize("count", [1, 6000])
def test_outside_when_a_number_gets_other_bits_then_it_is_seen(
    one: complex, other: complex, count: int
) -> None:
    held = [one] * count
    around = Surroundings((held,))
    held[0] = other
    assert around.have_changed()


def test_outside_when_an_array_is_too_large_to_read_then_it_may_have_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table"
    held = np.memmap(path, np.uint8, "w+", shape=5 << 30)  # a sparse file
    assert Surroundings((held,)).have_changed()
    assert Surroundings((held.base,)).have_changed()
    held = np.memmap(path, np.uint8, "r", shape=5 << 30)  # a part cannot write to it
    assert not Surroundings((held, held.base)).have_changed()


users: Any = types.ModuleType("users")


class Part:
    """Each method changes something, which its code names."""

    factor = 1.0
    held: Any = Slotted()

    def slot(self) -> None:
        self.held.calls += 1

    def of_class(self) -> None:
        Slotted.total += 1

    def own_class(self) -> None:
        self._count()

    def _count(self) -> None:
        type(self).factor += 1

    def module(self) -> None:
        users.calls = 1

    def text(self) -> None:
        setattr(users, "texts", 2)  # noqa: B010 - what is tested

    def operator(self) -> None:
        self.held += 1

    def nested(self) -> None:
        [_count_globally() for _ in range(2)]

    def read_only(self) -> None:
        _ = self.counted

    @property
    def counted(self) -> int:
        return _count_globally()


@pytest.mark.parametrize(
    "way",
    ["slot", "of_class", "own_class", "module", "text", "operator", "nested", "read_only"],
)
def test_outside_when_state_is_behind_a_name_that_the_code_uses_then_its_change_is_seen(
    way: str,
) -> None:
    users.calls = users.texts = 0
    run = getattr(Part(), way)
    around = Surroundings((run,))
    assert not around.have_changed()
    around = Surroundings((run,))
    run()
    assert around.have_changed()


_counts = [0]


def _count_globally() -> int:
    _counts[0] += 1
    return _counts[0]


class Exp(torch.autograd.Function):
    """A kernel that torch does not see makes its result, so that a part of it runs twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = torch.from_numpy(np.exp(x.detach().numpy()))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        found: torch.Tensor = grad * result
        return found


class Stateful(torch.nn.Module):
    """Takes a factor from an object that it holds."""

    def __init__(self, take: Callable[[], float]) -> None:
        super().__init__()
        self.take = take

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        factor = self.take()
        result: torch.Tensor = Exp.apply(value * factor) * factor
        return result


def array() -> Callable[[], float]:
    numbers = np.zeros(1)

    def take() -> float:
        numbers[0] += 0.5
        return float(numbers[0])

    return take


@pytest.mark.parametrize(
    "make",
    [
        array,
        lambda: np.random.default_rng(0).random,
        lambda: random.Random(0).random,
        lambda: functools.partial(next, iter([0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7, 1.9])),
    ],
    ids=["array", "numpy", "random", "iterator"],
)
def test_region_when_an_object_that_it_holds_has_a_state_then_same_bits(make: Any) -> None:
    gradient(plainly, swapkit.checkpoint(Stateful(lambda: 1.0)))  # runs twice from now on
    part, plain = swapkit.checkpoint(Stateful(make())), Stateful(make())
    for _ in range(RUNS + 1):
        assert_same_bits([gradient(plainly, part)], [gradient(plainly, plain)])


class Hostile:
    """An object whose own code must not run."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


def test_region_when_it_holds_hostile_or_large_objects_then_it_works() -> None:
    for held in (Hostile(), weakref.proxy(set()), dict.fromkeys(range(10**6))):
        part = torch.nn.Linear(SIDE, 4)
        vars(part)["held"] = held
        assert_same_bits([gradient(plainly, swapkit.checkpoint(part))], [gradient(plainly, part)])
