"""Methods of torch's classes that are replaced while somebody listens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapkit._runtime.torch_compat.reported_calls import ReplacedMethod

if TYPE_CHECKING:
    from collections.abc import Callable


class Owner:
    def method(self, number: int) -> int:
        return number + 1


class Noted:
    """A method whose replacement notes its calls in each listener, a list."""

    def __init__(self) -> None:
        self.owner: type[Any] | None = type("Other", (Owner,), {"method": Owner.method})
        self.replaced: ReplacedMethod[list[int]] = ReplacedMethod(
            lambda: self.owner, "method", self.make
        )

    def make(self, plain: Any) -> Callable[..., Any]:
        def method(owner: object, number: int) -> Any:
            for listener in self.replaced.listeners_of(method):
                listener.append(number)
            return plain(owner, number)

        return method

    def call(self, number: int) -> None:
        assert self.owner is not None
        assert self.owner().method(number) == number + 1


def test_method_when_listeners_come_and_go_then_each_hears_its_calls_and_torchs_comes_back() -> (
    None
):
    noted, first, second = Noted(), list[int](), list[int]()
    noted.call(0)
    noted.replaced.add(first)
    noted.call(1)
    noted.replaced.add(second)
    noted.call(2)
    noted.replaced.remove(first)
    noted.call(3)
    noted.replaced.remove(second)
    noted.call(4)
    assert (first, second) == ([1, 2], [2, 3])
    assert noted.owner is not None
    assert noted.owner.method is Owner.method


def test_method_when_another_library_replaces_it_meanwhile_then_each_call_is_heard_once() -> None:
    noted, first, second = Noted(), list[int](), list[int]()
    noted.replaced.add(first)
    assert noted.owner is not None
    found = noted.owner.method

    def other(owner: object, number: int) -> Any:
        return found(owner, number)

    noted.owner.method = other
    noted.call(1)
    noted.replaced.remove(first)
    noted.call(2)
    noted.replaced.add(second)
    noted.call(3)
    noted.replaced.remove(second)
    noted.call(4)
    assert (first, second) == ([1], [3])


def test_method_when_there_is_no_such_class_then_nothing_happens() -> None:
    noted = Noted()
    owner, noted.owner = noted.owner, None
    noted.replaced.add([])
    noted.replaced.remove([])
    noted.owner = owner
    noted.call(1)
