"""Recording of a single step, with its recorder."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING
from unittest import mock

from swapkit._runtime.recording.recorder import Recorder
from swapkit.api import recording
from swapkit.api.recording import record
from swapkit.ir.checks import check_trace
from tests.support.occupancy import assert_memory_is_the_pools

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from swapkit._runtime.recording.notes import Setting
    from swapkit.ir.traces import Trace


def recorded(
    step: Callable[[], object],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[Trace, Recorder]:
    """Record a step; its trace has what the pool had in use."""
    gc.collect()  # what other tests left in cycles would lie in the pool
    recorders: list[Recorder] = []

    class Kept(Recorder):
        def __init__(self, setting: Setting) -> None:
            super().__init__(setting)
            recorders.append(self)

    with mock.patch.object(recording, "Recorder", Kept):
        trace = record(step, model, optimizer)
    check_trace(trace)
    (recorder,) = recorders
    assert_memory_is_the_pools(recorder, trace)
    return trace, recorder


def lives_of(trace: Trace, nbytes: int) -> list[tuple[int, int]]:
    """Return the births and deaths of the storages of a size."""
    return [(each.birth, each.death) for each in trace.storages if each.nbytes == nbytes]
