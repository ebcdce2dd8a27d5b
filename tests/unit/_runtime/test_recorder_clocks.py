"""The times of operators on a device that is faster than whoever calls them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._runtime.recorder_clocks import StreamTimer

if TYPE_CHECKING:
    from collections.abc import Callable

CALL_US = 300  # of the host, for each operator; of that, before it is launched:
LAUNCH_US = 100
CYCLES_PER_US = 2000


class Stream:
    """A device with one stream, which does what it was given in order, as soon as it can."""

    def __init__(self) -> None:
        self.host_us = 0.0
        self.free_us = 0.0  # when all that was given is done

    def run(self, duration_us: float) -> float:
        """Give it work; return when that is done."""
        self.free_us = max(self.free_us, self.host_us) + duration_us
        return self.free_us

    def make_module(self, *, can_delay: bool) -> SimpleNamespace:
        stream = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.is_timed = enable_timing

            def record(self) -> None:
                self.us = stream.run(0.0)

            def query(self) -> bool:
                return self.us <= stream.host_us

            def elapsed_time(self, other: Event) -> float:
                assert self.is_timed
                assert other.is_timed
                return (other.us - self.us) / 1e3

        def synchronize() -> None:
            stream.host_us = max(stream.host_us, stream.free_us)

        delay: dict[str, Callable[[int], object]] = {}
        if can_delay:
            delay["_sleep"] = lambda cycles: stream.run(cycles / CYCLES_PER_US)
        return SimpleNamespace(Event=Event, synchronize=synchronize, **delay)

    def call(self, timer: StreamTimer, duration_us: float) -> tuple[Any, Any]:
        """Call an operator as a recorder does."""
        begun = timer.begin()
        self.host_us += LAUNCH_US
        self.run(duration_us)
        taken = timer.end(begun, (torch.ops.aten.add.Tensor, (), {}), None)
        self.host_us += CALL_US - LAUNCH_US
        return taken


@pytest.mark.parametrize("durations_us", [[5, 70, 20, 5] * 100, [400, 900] * 20])
def test_operators_when_the_device_is_faster_than_the_host_then_it_is_kept_busy(
    durations_us: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    monkeypatch.setattr(torch, "cuda", stream.make_module(can_delay=True))
    timer = StreamTimer(torch.device("cuda"))
    taken = [stream.call(timer, each) for each in durations_us]
    called_us = stream.host_us
    seconds = timer.seconds(taken)
    assert [each * 1e6 for each in seconds] == pytest.approx(durations_us)
    # Neither the delays nor what was called makes the step much longer than both have to be.
    assert stream.host_us <= called_us + sum(durations_us) + 5000


def test_operators_when_the_device_cannot_be_delayed_then_times_hold_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()
    monkeypatch.setattr(torch, "cuda", stream.make_module(can_delay=False))
    timer = StreamTimer(torch.device("cuda"))
    seconds = timer.seconds([stream.call(timer, each) for each in (5, 5, 5)])
    assert [each * 1e6 for each in seconds] == pytest.approx([105, 105, 105])
