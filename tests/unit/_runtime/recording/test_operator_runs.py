"""Operators of a recorded step for which there is no memory at first."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder


class Short(TorchDispatchMode):
    """Operators find no memory some times."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += 1
        if self.runs <= self.failures:
            raise torch.OutOfMemoryError("theirs")
        return func(*args, **(kwargs or {}))


def recorder(freed: list[int]) -> Recorder:
    """Return a recorder over an allocator that can have no memory back by itself."""
    return Recorder(
        Setting(
            device=torch.device("cpu"),
            tracker=ModuleTracker(),
            make_room=lambda: freed.pop(0) if freed else 0,
        )
    )


def test_operator_when_room_can_be_made_then_it_runs_again_and_is_noted_once() -> None:
    made, x = recorder([4, 4, 4]), torch.ones(4)
    with Short(2) as short:
        made.run(torch.ops.aten.mul.Tensor, (x, x), {})
    assert short.runs == 3
    assert [row.name for row in made.rows] == ["aten.mul.Tensor"]


def test_operator_when_no_room_is_left_then_the_allocators_own_error() -> None:
    made, x = recorder([4]), torch.ones(4)
    with Short(9) as short, pytest.raises(torch.OutOfMemoryError, match="theirs"):
        made.run(torch.ops.aten.mul.Tensor, (x, x), {})
    assert short.runs == 2


@pytest.mark.parametrize("name", ["mul_.Tensor", "bernoulli.p"])
def test_operator_when_it_may_not_run_twice_then_it_does_not(name: str) -> None:
    operator, overload = name.split(".")
    function = cast("Any", getattr(getattr(torch.ops.aten, operator), overload))
    made = recorder([4])
    with Short(1) as short, pytest.raises(torch.OutOfMemoryError):
        made.run(function, (torch.ones(4), 0.5), {})
    assert short.runs == 1
