"""How long a recorded step waits for other ranks."""

from __future__ import annotations

import time

import pytest
import torch

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit.ir.traces import WAIT

WAITED = 0.02


def record(waits: int) -> Recorder:
    """Return a recorder of a step with so many waits."""
    made = Recorder(Setting(device=torch.device("cpu"), tracker=ModuleTracker()))
    x = torch.ones(4, requires_grad=True)
    made.start()
    for _ in range(waits):
        with made.waiting():
            time.sleep(WAITED)
    x.exp().sum().backward()
    made.stop()
    return made


@pytest.fixture
def recorder() -> Recorder:
    """A recorder that has seen two waits in a step."""
    return record(2)


def test_waits_when_the_steps_time_is_unknown_then_as_they_were(recorder: Recorder) -> None:
    waits = [each.seconds for each in recorder.trace().operators if each.name == WAIT]
    assert len(waits) == 2
    assert min(waits) >= WAITED


def test_waits_when_such_steps_take_less_then_they_fill_what_operators_leave(
    recorder: Recorder,
) -> None:
    operators = recorder.trace().operators
    others = sum(each.seconds for each in operators if each.name != WAIT)
    shorter = recorder.trace(step_seconds=others + WAITED).operators
    assert sum(each.seconds for each in shorter) == pytest.approx(others + WAITED)
    assert [each.seconds for each in shorter if each.name != WAIT] == [
        each.seconds for each in operators if each.name != WAIT
    ]
    least = recorder.trace(step_seconds=others / 2).operators
    assert [each.seconds for each in least if each.name == WAIT] == [0.0, 0.0]
    longer = recorder.trace(step_seconds=others + 1.0).operators
    assert longer == operators


def test_step_when_it_waits_nowhere_then_its_operators_keep_their_times() -> None:
    recorder = record(0)
    assert recorder.trace(step_seconds=1e-9).operators == recorder.trace().operators
