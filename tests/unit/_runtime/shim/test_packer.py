"""The hooks of a session: who is told of the events that they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swapkit._runtime.process.runtime import get_runtime
from swapkit.ir.plans import Action
from tests.unit._runtime.plan_rig import Course, swap_all
from tests.unit._runtime.rig import AUTO, make_swapper

if TYPE_CHECKING:
    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")


@pytest.fixture
def swapper() -> Swapper:
    return make_swapper()


def test_observer_when_autograd_saves_and_uses_then_it_is_told_of_each_in_order() -> None:
    course = Course()
    seen: list[tuple[str, object]] = []

    class Observer:
        def saved(self, _tensor: torch.Tensor, packed: object) -> None:
            seen.append(("saved", packed))

        def used(self, packed: object, _tensor: torch.Tensor) -> None:
            seen.append(("used", packed))

    with course.running():
        course.hooks.packer.observer = Observer()
        x = torch.ones(64, requires_grad=True)
        y = x.exp().sin()
        assert [kind for kind, _ in seen] == ["saved", "saved"]
        y.sum().backward()
        assert [kind for kind, _ in seen] == ["saved", "saved", "used", "used"]
        assert [packed for _, packed in seen[2:]] == [seen[1][1], seen[0][1]]
        course.hooks.packer.observer = None
        y = x.exp()
    assert len(seen) == 4


def test_observer_when_a_mode_of_the_users_is_on_then_it_sees_nothing_of_it() -> None:
    course = Course()
    names: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    class Observer:
        def saved(self, tensor: torch.Tensor, _packed: object) -> None:
            tensor.detach().cos()

        def used(self, _packed: object, tensor: torch.Tensor) -> None:
            tensor.detach().cos()

    with course.running(), Mode():
        course.hooks.packer.observer = Observer()
        torch.ones(64, requires_grad=True).exp().sum().backward()
    assert "aten.exp.default" in names
    assert "aten.cos.default" not in names


def test_observer_when_it_raises_then_the_operator_does() -> None:
    course = Course()

    class Observer:
        def saved(self, _tensor: torch.Tensor, _packed: object) -> None:
            raise ZeroDivisionError

        def used(self, _packed: object, _tensor: torch.Tensor) -> None:
            pass

    with course.running():
        course.hooks.packer.observer = Observer()
        with pytest.raises(ZeroDivisionError):
            torch.ones(64, requires_grad=True).exp()


def test_events_when_a_foreign_pair_is_outside_then_they_are_counted() -> None:
    course = Course()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        course.running(),
    ):
        trace = course.record()
        with course.following_plan(trace, *swap_all(trace)) as following:
            course.step()
            assert following.end_step().deviation is None
            assert course.moved()[0] > 0


def test_choice_when_its_action_is_unknown_then_refused_by_name(swapper: Swapper) -> None:
    class Renamed(NamedTuple):
        value: str = "automatic"

    choice = AUTO._replace(action=Renamed())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep, swap, auto or pass, not 'automatic'"):
        swapper.packer(choice)
    with pytest.raises(ValueError, match="not 'automatic'"):
        get_runtime().shim.mark(torch.ones(64), choice, 0)


@pytest.mark.parametrize("action", [each for each in Action if each is not Action.RECOMPUTE])
def test_choice_when_its_action_is_known_then_taken(swapper: Swapper, action: Action) -> None:
    assert callable(swapper.packer(AUTO._replace(action=action)))
