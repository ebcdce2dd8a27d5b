"""Which ranks do the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from swapkit._runtime.control.rank_agreement import describe_parts, describe_step
from swapkit.ir.traces import Event, EventKind, Operator, Phase, Storage, Trace


def parts(model: nn.Module | None, *optimizers: torch.optim.Optimizer) -> str:
    return describe_parts(model, optimizers)


def test_parts_when_models_have_the_same_form_then_equal_whatever_their_values() -> None:
    first, second = (nn.Sequential(nn.Linear(2, 3)) for _ in range(2))
    assert parts(first) == parts(second)
    optimizers = [torch.optim.SGD(each.parameters()) for each in (first, second)]
    assert parts(None, optimizers[0]) == parts(None, optimizers[1])


def test_parts_when_something_differs_then_they_do() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    sgd, adam = torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())
    others = [
        parts(model),
        parts(nn.ModuleList(model)),
        parts(nn.Sequential(nn.Linear(3, 2))),
        parts(nn.Sequential(nn.Linear(2, 3, dtype=torch.float64))),
        parts(nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))),
        parts(nn.Sequential(nn.LazyLinear(3))),
        parts(model, sgd),
        parts(model, adam),
        parts(None, sgd),
        parts(None),
    ]
    assert len(set(others)) == len(others)


SAVE, USE = (Event(kind=kind, storage=0, operator=0) for kind in (EventKind.SAVE, EventKind.USE))
STEP = Trace(
    operators=(Operator(name="mm", seconds=1.0, phase=Phase.FORWARD, reads=(0,)),),
    storages=(Storage(nbytes=8, death=1, is_saved=True), Storage(nbytes=4, death=1, is_saved=True)),
    events=(SAVE, replace(SAVE, storage=1), USE, replace(USE, storage=1)),
)


def test_steps_when_only_times_operators_and_devices_differ_then_alike() -> None:
    first = replace(STEP.operators[0], name="bmm", seconds=3.0)
    other = replace(STEP, operators=(first,), device="cuda:1", base_bytes=5)
    assert describe_step(STEP) == describe_step(other)


def test_steps_when_saved_tensors_have_other_sizes_or_come_in_another_order_then_unlike() -> None:
    larger = replace(STEP.storages[0], nbytes=16)
    save, second, use, last = STEP.events
    others = [
        describe_step(STEP),
        describe_step(replace(STEP, storages=(larger, STEP.storages[1]))),
        describe_step(replace(STEP, events=(save, use, second, last))),
        describe_step(replace(STEP, events=(save, second, use))),
        describe_step(replace(STEP, events=(replace(save, storage=None), *STEP.events[1:]))),
    ]
    assert len(set(others)) == len(others)
