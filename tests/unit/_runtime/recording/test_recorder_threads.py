"""A recorder notes what its own thread does, whatever the other threads train meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import nn

from swapkit._native.pool import Ring, RingKind
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit.api.recording import record
from swapkit.ir.checks import check_trace
from tests.support import installed

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


def test_storages_when_another_reader_has_the_pools_events_then_they_keep_their_bytes() -> None:
    with installed() as installation, Ring(1 << 12) as ring:
        model = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(3)])
        installation.pool.attach(ring)
        trace = record(lambda: model(torch.ones(SIDE, SIDE)).sum().backward(), model)
        installation.pool.detach()
        events, _ = ring.read()
    check_trace(trace)
    assert all(each.nbytes > 0 for each in trace.storages)  # some have the address of a former one
    assert len([each for each in events if each.kind is RingKind.TAKE]) > len(trace.operators)
