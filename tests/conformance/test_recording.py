"""Programs legal in plain autograd give the same bits while they are recorded, and sound traces."""

from __future__ import annotations

import pytest
import torch

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit.api.recording import _run
from swapkit.ir.checks import check_trace
from tests.programs import PROGRAMS, Entry, assert_same_bits, run
from tests.programs.registry import results_of_plain_training


@pytest.mark.promise("A3")
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda entry: entry.name)
def test_results_when_they_are_recorded_then_same_bits(entry: Entry) -> None:
    expected = results_of_plain_training(entry)
    results: list[list[torch.Tensor]] = []
    recorder = Recorder(Setting(device=torch.empty(0).device, tracker=ModuleTracker()))
    _run(lambda: results.append(run(entry.body, lambda: None)), recorder)
    assert_same_bits(results[0], expected)
    trace = recorder.trace()
    if trace.operators:  # none where all of it runs on another thread
        check_trace(trace)
