"""A recorder notes what its own thread does, whatever the other threads train meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import nn

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit.api.recording import record
from swapkit.ir.checks import check_trace

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 32


def make_step(meanwhile: Callable[[], object]) -> Callable[[], None]:
    """Return a training step, in the middle of which something runs on another thread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with ThreadPoolExecutor(1) as executor:
            loss = model(torch.ones(SIDE, SIDE)).sum()
            executor.submit(meanwhile).result()
            loss.backward()
        optimizer.step()

    return step


def test_step_when_another_thread_trains_meanwhile_then_nothing_of_that_is_recorded() -> None:
    alone = record(make_step(lambda: None))
    check_trace(alone)
    other = make_step(lambda: None)
    other()  # its gradients and states are there
    trace = record(make_step(other))
    assert trace.storages == alone.storages
    assert len(trace.operators) == len(alone.operators)


def test_trace_when_an_operator_ends_after_the_recorder_has_stopped_then_it_is_not_in_it() -> None:
    """Whoever stops a recorder does not wait for operators of other threads."""
    recorder = Recorder(Setting(device=torch.device("cpu"), tracker=ModuleTracker()))
    x = torch.ones(SIDE, requires_grad=True)
    recorder.start()
    y = x.exp()
    recorder.savings.note_saved(y, object(), None)
    recorder.stop()
    savings = recorder.savings
    savings._notes = recorder  # as that thread has read it
    recorder.run(torch.ops.aten.sin.default, (y.detach(),), {})
    savings.note_saved(y, object(), None)
    recorder.run(torch.ops.aten.cos.default, (y.detach(),), {})
    savings.note_saved(y, object(), None)
    trace = recorder.trace()
    check_trace(trace)
    assert [each.name for each in trace.operators] == ["aten.exp.default"]
    assert [each.operator for each in trace.events] == [1]
