"""A saved tensor is idle once forward has let go of it, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import swapkit
from swapkit.simulation.items import Touches, find_items

if TYPE_CHECKING:
    from swapkit.ir.traces import Storage, Trace


class Holding(torch.nn.Module):
    """Keeps what it made first until it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.exp()
        rest = first.tanh().sigmoid()
        return (rest * 2).relu()


def made_by(trace: Trace, name: str) -> tuple[int, Storage]:
    operator = next(each for each in trace.operators if each.name == f"aten.{name}.default")
    number = operator.writes[0]
    return number, trace.storages[number]


def index_of(trace: Trace, name: str) -> int:
    return next(
        at for at, each in enumerate(trace.operators) if each.name.startswith(f"aten.{name}.")
    )


def test_local_variable_when_it_is_saved_then_held_until_its_function_returns() -> None:
    model = Holding()
    x = torch.randn(1024, requires_grad=True)
    trace = swapkit.record(lambda: model(x).sum().backward(), model)
    number, first = made_by(trace, "exp")
    assert first.is_saved
    assert first.held == index_of(trace, "relu")
    item = next(
        each
        for each in find_items(Touches(trace), optimizer_states=False, least_bytes=1)
        if each.storage == number
    )
    assert item.release == first.held > index_of(trace, "tanh")


def test_temporary_when_it_is_saved_then_held_until_it_was_used() -> None:
    model = Holding()
    x = torch.randn(1024, requires_grad=True)
    trace = swapkit.record(lambda: model(x).sum().backward(), model)
    _, tanh = made_by(trace, "tanh")
    assert tanh.held == index_of(trace, "sigmoid")


def test_tensor_when_the_user_keeps_it_then_no_plan_is_asked_about_it() -> None:
    kept = []

    def step() -> None:
        kept.append(x.exp())
        kept[0].sin().sum().backward()

    x = torch.randn(1024, requires_grad=True)
    trace = swapkit.record(step)
    _, storage = made_by(trace, "exp")
    assert not storage.is_saved
    assert made_by(trace, "exp")[0] not in {event.storage for event in trace.events}
