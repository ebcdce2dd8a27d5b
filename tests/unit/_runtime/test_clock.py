"""The clock rings for whoever set an alarm, and for nobody else."""

from __future__ import annotations

import gc
import threading

from swapkit._runtime.clock import CLOCKS, NEVER, Clock
from tests.support import run_python


class Shim:
    """Notes what the clock is set to."""

    def __init__(self) -> None:
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.started = 0

    def start_clock(self, _ring: object) -> None:
        self.started += 1

    def clock_thread(self) -> int:
        return 5

    def clock_forward(self, thread: int, operator: int) -> None:
        self.forward[thread] = operator

    def clock_backward(self, thread: int, operator: int) -> None:
        self.backward[thread] = operator


class Timing:
    """Notes when it is rung."""

    def __init__(self) -> None:
        self.rung: list[tuple[int, int, int]] = []

    def ring(self, thread: int, operator: int, phase: int) -> None:
        self.rung.append((thread, operator, phase))


def make_clock() -> tuple[Clock, Shim]:
    shim = Shim()
    return Clock(shim, threading.RLock()), shim  # type: ignore[arg-type]


def test_alarm_when_several_are_set_then_the_clock_has_the_first_that_is_due() -> None:
    clock, shim = make_clock()
    first, second = Timing(), Timing()
    clock.set_forward(first, 1, 30)  # type: ignore[arg-type]
    clock.set_forward(second, 1, 20)  # type: ignore[arg-type]
    clock.set_backward(first, 1, 30)  # type: ignore[arg-type]
    clock.set_backward(second, 1, 20)  # type: ignore[arg-type]
    assert (shim.forward[1], shim.backward[1]) == (20, 30)
    clock.set_forward(second, 1, NEVER)  # type: ignore[arg-type]
    clock.set_backward(first, 1, NEVER)  # type: ignore[arg-type]
    assert (shim.forward[1], shim.backward[1]) == (30, 20)
    clock.set_forward(first, 1, NEVER)  # type: ignore[arg-type]
    assert shim.forward[1] == NEVER


def test_alarm_when_threads_share_a_clock_then_none_is_lost() -> None:
    clock, shim = make_clock()
    timing = Timing()
    clock.set_forward(timing, 1, 10)  # type: ignore[arg-type]
    clock.set_forward(timing, 1 + CLOCKS, 90)  # type: ignore[arg-type]
    assert shim.forward[1 + CLOCKS] == 10
    clock.set_forward(timing, 2, 7)  # type: ignore[arg-type]
    assert shim.forward[2] == 7


def test_alarm_when_its_timing_is_gone_then_it_rings_once_more_at_most() -> None:
    clock, shim = make_clock()
    timing = Timing()
    clock.attend(timing)  # type: ignore[arg-type]
    clock.set_forward(timing, 1, 10)  # type: ignore[arg-type]
    del timing
    gc.collect()
    clock._ring(1, 10, -1)
    assert shim.forward[1] == shim.backward[1] == NEVER


def test_ring_when_it_comes_then_every_timing_hears_it() -> None:
    clock, shim = make_clock()
    timings = [Timing(), Timing()]
    assert {clock.attend(timing) for timing in timings} == {5}  # type: ignore[arg-type]
    assert shim.started == 1
    clock._ring(3, 40, -1)
    assert [timing.rung for timing in timings] == [[(3, 40, -1)]] * 2


def test_clock_when_no_alarm_is_set_then_operators_do_not_reach_python() -> None:
    # In a process of its own: there is one clock, and it runs from its first use on.
    output = run_python(
        """
        import torch
        from swapkit._runtime.runtime import get_runtime

        shim = get_runtime().shim
        heard = []
        shim.start_clock(lambda *ring: heard.append(ring))
        x = torch.ones(4, requires_grad=True)
        y = (x * 2).exp().sum()
        assert heard == []
        y.backward()
        assert [ring[2] for ring in heard] == [1]
        number = torch._C._autograd._get_sequence_nr()
        shim.clock_forward(shim.clock_thread(), number + 1)
        del heard[:]
        x * 2
        assert heard == []
        x * 3
        assert [ring[1] for ring in heard] == [number + 1]
        shim.stop_clock()
        x * 4
        print(len(heard))
        """
    )
    assert output == "1\n"
