"""To which phase, module and microbatch the operators of a recorded step belong."""

from __future__ import annotations

import torch
from torch import nn

from swapkit.ir.traces import EventKind, Phase
from tests.unit._runtime.recording.test_recorder import batch, names, recorded, two_layers


def test_clipping_when_it_follows_backward_then_it_is_the_optimizers() -> None:
    model, x = two_layers(), batch()

    def step() -> None:
        loss = model(x).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        (loss * 2).item()

    trace = recorded(step, model)
    clipping = names(trace, Phase.OPTIMIZER)
    assert clipping[0] == "_foreach_norm.Scalar"
    assert clipping[-1] == "_foreach_mul_.Tensor"
    assert names(trace, Phase.FORWARD)[-2:] == ["mul.Tensor", "_local_scalar_dense.default"]


def test_occurrence_when_an_operator_comes_again_then_it_is_counted_in_each_call() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).exp() * 3

    model = nn.Sequential(Twice(), Twice())
    x = batch().requires_grad_()
    trace = recorded(lambda: model(x).sum().backward(), model)
    forward = [o for o in trace.operators if o.phase is Phase.FORWARD and "mul" in o.name]
    assert [(each.module, each.occurrence) for each in forward] == [
        ("0", 0), ("0", 1), ("1", 0), ("1", 1),
    ]  # fmt: skip


def test_microbatches_when_gradients_accumulate_then_each_has_its_number() -> None:
    model, x = two_layers(), batch()

    def step() -> None:
        for _ in range(3):
            model(x * 2).sum().backward()

    trace = recorded(step, model)
    made = [each.microbatch for each in trace.operators]
    assert made == sorted(made)
    assert [made.count(number) for number in range(3)] == [12, 16, 16]
    first = next(k for k, each in enumerate(trace.operators) if each.microbatch == 1)
    assert trace.operators[first].name == "aten.mul.Tensor"  # what prepares it belongs to it


def test_microbatches_when_there_are_no_modules_then_forwards_after_backwards_count() -> None:
    w = batch().requires_grad_()

    def step() -> None:
        for _ in range(2):
            (w @ w).exp().sum().backward()

    assert [o.microbatch for o in recorded(step).operators if "exp" in o.name] == [0, 1]


def test_microbatches_when_they_are_pipelined_then_backward_has_that_of_what_it_uses() -> None:
    model, x = two_layers(), batch()

    def step() -> None:
        first, second = model(x).sum(), model(x).sum()
        first.backward()
        third = model(x).sum()
        second.backward()
        third.backward()

    trace = recorded(step, model)
    runs = [(o.phase, o.microbatch) for o in trace.operators if o.name != "aten.ones_like.default"]
    changes = [run for run, before in zip(runs, [None, *runs], strict=False) if run != before]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert changes == [
        (forward, 0), (forward, 1), (backward, 0), (forward, 2), (backward, 1), (backward, 2),
    ]  # fmt: skip


def test_evaluation_when_it_runs_in_between_then_it_saves_nothing_and_begins_nothing() -> None:
    model, x = two_layers(), batch()

    def step() -> None:
        loss = model(x).sum()
        with torch.no_grad():
            model(x)
        loss.backward()
        model(x).sum().backward()

    trace = recorded(step, model)
    assert max(each.microbatch for each in trace.operators) == 1
    assert sum(each.kind is EventKind.SAVE for each in trace.events) == 8
