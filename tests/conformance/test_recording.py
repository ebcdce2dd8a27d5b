"""Programs legal in plain autograd give the same bits while they are recorded, and sound traces."""

from __future__ import annotations

import gc

import pytest
import torch

from swapkit._native.pool import Pool
from swapkit._runtime.allocators.installation import installed_pool
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit.api.recording import _run
from swapkit.ir.checks import check_trace
from tests.programs import PROGRAMS, Entry, assert_same_bits, run
from tests.programs.registry import results_of_plain_training
from tests.support.occupancy import assert_memory_is_the_pools
from tests.support.place import install

# To ask for the address of a lazily copied tensor copies it, outside of any operator.
COPIES_WHEN_ASKED = {"lazily_copied_tensors"}


@pytest.mark.promise("A3")
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda entry: entry.name)
def test_results_when_they_are_recorded_then_same_bits_and_the_memory_of_the_pool(
    entry: Entry,
) -> None:
    install()
    expected = results_of_plain_training(entry)
    results: list[list[torch.Tensor]] = []
    gc.collect()  # else former programs' memory goes in the middle of an operator
    device = torch.empty(0).device
    pool = installed_pool(device)
    recorder = Recorder(Setting(device=device, tracker=ModuleTracker(), pool=pool))
    _run(lambda: results.append(run(entry.body, lambda: None)), recorder)
    assert_same_bits(results[0], expected)
    trace = recorder.trace()
    if trace.operators:  # none where all of it runs on another thread
        check_trace(trace)
    if isinstance(pool, Pool) and entry.body.__name__ not in COPIES_WHEN_ASKED:
        assert_memory_is_the_pools(recorder, trace)
