"""The times of operators on a device that is faster than whoever calls them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.tables.clocks import HostTimer, StreamTimer
from swapkit._runtime.torch_compat.stream_delays import DELAY_SECONDS, LONGEST_SECONDS, Delays
from tests.unit._runtime.fake_streams import Device, Event, Module, SleepingModule, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

CUDA = torch.device("cuda")
CALL_US = 300  # of the host, for each operator; of that, before it is launched:
LAUNCH_US = 100
ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
NOT_AT_ONCE_US = 30_000  # what makes memory


class Caller:
    """Calls operators as a recorder does, on a device of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, make: type[Module] = SleepingModule
    ) -> None:
        device = self.device = Device()
        monkeypatch.setattr("time.perf_counter", lambda: device.host_us / 1e6)
        monkeypatch.setattr(torch, "cuda", make(self.device))
        self.timer = StreamTimer(CUDA)
        self.taken: list[Any] = []

    def call(
        self,
        *kernels_us: float,
        making: Callable[[], None] | None = None,
        launch_us: float = LAUNCH_US,
        function: OpOverload = ADD,
    ) -> None:
        """Call an operator that launches kernels, and makes memory before the last one."""
        device, timer = self.device, self.timer
        timer.expect(function)
        begun = timer.begin()
        device.host_us += launch_us
        for duration_us in kernels_us[:-1]:
            device.run(duration_us)
        if making is not None:
            timer.stop()
            making()
            timer.go_on()
            device.host_us += LAUNCH_US
        device.run(kernels_us[-1])
        self.taken.append(timer.end(begun, function))
        device.host_us += CALL_US - LAUNCH_US

    def call_waiting(self, function: OpOverload, *, count: int) -> None:
        """Call an operator that waits for the stream itself, some times."""
        for _ in range(count):
            self.timer.expect(function)
            begun = self.timer.begin()
            self.device.run(5)
            self.device.wait()
            self.taken.append(self.timer.end(begun, function))

    def microseconds(self) -> list[float]:
        return [each * 1e6 for each in self.timer.seconds(self.taken)]

    def grow(self) -> None:
        """The host maps memory."""
        self.device.host_us += NOT_AT_ONCE_US

    def rescue(self) -> None:
        """It waits for the stream first, then for copies."""
        self.device.wait()
        self.device.host_us += NOT_AT_ONCE_US


@pytest.mark.parametrize("durations_us", [[5, 70, 20, 5] * 100, [400, 900] * 20])
def test_operators_when_the_device_is_faster_than_the_host_then_it_is_kept_busy(
    durations_us: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(monkeypatch)
    for each in durations_us:
        caller.call(each)
    called_us = caller.device.host_us
    assert caller.microseconds() == pytest.approx(durations_us)
    # Neither the delays nor what was called makes the step much longer than both have to be.
    assert caller.device.host_us <= called_us + sum(durations_us) + 5000


@pytest.mark.parametrize("way", ["grow", "rescue"])
def test_operator_when_memory_is_made_inside_then_its_kernels_are_its_time(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(monkeypatch)
    making = getattr(caller, way)
    for _ in range(3):
        caller.call(5)
        caller.call(5, making=making)
        caller.call(70, 20, making=making)
    assert caller.microseconds() == pytest.approx([5, 5, 90] * 3)


def test_operator_when_its_call_outlasts_the_delay_then_doubtful_and_covered_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    for _ in range(3):
        caller.call(5, launch_us=7000)
        caller.call(70, function=MUL)
    first, *others = caller.microseconds()
    assert first > 70
    assert others == pytest.approx([70, 5, 70, 5, 70])
    assert caller.timer.doubtful == {0}


def test_operator_when_it_waits_for_the_stream_itself_then_not_doubtful_and_delays_stay_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    caller.call_waiting(MUL, count=20)
    latest_us = caller.device.host_us
    for _ in range(5):
        caller.timer.expect(MUL)
        caller.call(5)
        caller.device.wait()
    assert caller.device.host_us < latest_us + 5 * 5000
    caller.microseconds()
    assert caller.timer.doubtful == {0, 1}, "taken before that was known"


@pytest.mark.parametrize("launches_us", [[60_000] * 6, [9000, 23_000, 18_000, 30_000, 25_000]])
def test_operator_when_its_calls_are_slow_by_themselves_then_all_of_them_are_doubtful(
    launches_us: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(monkeypatch)
    for each in launches_us:
        caller.call(1000, launch_us=each)
    assert min(caller.microseconds()) > 1000
    assert caller.timer.doubtful == set(range(len(launches_us)))


def test_operator_when_known_to_wait_only_after_slow_calls_then_these_stay_doubtful(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    caller.call(5, launch_us=60_000)
    caller.call_waiting(ADD, count=10)
    caller.microseconds()
    assert caller.timer.long_calls.certain_seconds(ADD) > 0
    assert 0 in caller.timer.doubtful
    assert 10 not in caller.timer.doubtful


def test_operator_when_known_to_wait_and_a_call_is_slow_then_that_one_is_doubtful(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    caller.call_waiting(ADD, count=10)
    assert caller.timer.long_calls.certain_seconds(ADD) > 0
    caller.call(5, launch_us=20_000)
    caller.device.run(50_000)  # what was called before is no time of the operator that waits for it
    caller.call_waiting(ADD, count=1)
    assert caller.microseconds()[-1] == pytest.approx(5)
    assert caller.timer.doubtful == {0, 1, 10}


def test_operator_when_slow_calls_look_as_if_it_waited_then_those_that_were_are_doubtful(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    launches_us = [3000, 7000, 13_000, 20_000] * 2
    for each in [*launches_us, *(each + 111 for each in launches_us)]:
        caller.call(1000, launch_us=each)
    assert caller.timer.long_calls.certain_seconds(ADD) > 0, "by chance"
    for number, found_us in enumerate(caller.microseconds()):
        assert number in caller.timer.doubtful or found_us < 1000 + DELAY_SECONDS * 1e6


def test_operator_when_one_before_it_has_raised_then_memory_made_in_between_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    caller.call(5)
    caller.timer.expect(ADD)
    caller.timer.begin()
    caller.timer.abandon()
    sleeps = caller.device.sleeps
    for _ in range(10):
        caller.timer.stop()
        caller.grow()
        caller.timer.go_on()
    assert caller.device.sleeps == sleeps
    caller.call(5)
    assert caller.microseconds() == pytest.approx([5, 5])


def test_operator_when_it_raises_in_a_recorder_then_its_timer_knows_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    recorder = Recorder(Setting(device=torch.device("cpu"), tracker=ModuleTracker()))
    recorder.timer = caller.timer
    with pytest.raises(RuntimeError, match="shape"):
        recorder.run(torch.ops.aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})
    sleeps = caller.device.sleeps
    caller.timer.stop()
    caller.grow()
    caller.timer.go_on()
    assert caller.device.sleeps == sleeps


def test_operator_when_memory_is_made_in_another_one_inside_it_then_neither_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)

    outer = caller.timer.begin()
    caller.device.run(20)
    caller.call(5, making=caller.grow, function=MUL)
    caller.timer.stop()
    caller.grow()
    caller.timer.go_on()
    caller.device.run(70)
    caller.taken.append(caller.timer.end(outer, ADD))
    inner_us, outer_us = caller.microseconds()
    assert inner_us == pytest.approx(5)
    assert outer_us < NOT_AT_ONCE_US / 2


@pytest.mark.parametrize("ends_with", ["stop", "go_on", "end"])
def test_operator_when_a_capture_begins_inside_then_the_graph_gets_no_events(
    ends_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(monkeypatch)
    timer = caller.timer
    begun = timer.begin()
    if ends_with == "go_on":
        timer.stop()
    caller.device.is_capturing = True
    if ends_with == "end":
        assert timer.end(begun, ADD) is None
        return
    getattr(timer, ends_with)()
    timer.abandon()
    caller.device.is_capturing = False
    caller.call(5)
    assert caller.microseconds() == pytest.approx([5])


def test_delays_when_dropped_while_another_thread_puts_one_in_then_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    module = SleepingModule(device)
    monkeypatch.setattr(torch, "cuda", module)
    delays = Delays(CUDA)
    record = Event.record

    def finish_first(*args: Any) -> None:
        monkeypatch.setattr(Event, "record", record)
        thread = threading.Thread(target=delays.finish)
        thread.start()
        thread.join()
        record(*args)

    delays.cover(device.current)
    device.wait()
    monkeypatch.setattr(Event, "record", finish_first)
    delays.cover(device.current, LONGEST_SECONDS)
    assert device.host_us == device.current.free_us, "memory goes when the device has computed"
    sleeps = device.sleeps
    delays.cover(device.current, LONGEST_SECONDS)
    assert device.sleeps == sleeps == 3  # with one that shows that the device can sleep


def test_operator_when_memory_is_made_by_another_thread_then_its_time_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)

    def make() -> None:
        caller.timer.stop()
        caller.timer.go_on()

    begun = caller.timer.begin()
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert begun is not None
    assert begun.pauses == []


def test_times_when_events_take_some_themselves_then_that_is_not_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    caller.device.event_us = 1.5
    for each in (2.5, 400, 2.5):
        caller.call(each)
    assert caller.microseconds() == pytest.approx([2.5, 400, 2.5])


def test_operators_when_they_take_turns_on_two_streams_then_both_are_kept_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    streams = caller.device.current, Stream(1)
    for index in range(40):
        caller.device.current = streams[index % 2]
        caller.call(5)
    assert caller.microseconds() == pytest.approx([5] * 40)


def test_operators_when_a_graph_is_captured_then_it_gets_neither_events_nor_delays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch)
    caller.call(5)
    caller.device.is_capturing = True
    sleeps = caller.device.sleeps
    taken = caller.timer.begin()
    caller.timer.stop()
    caller.timer.go_on()
    caller.taken.append(caller.timer.end(taken, ADD))
    assert caller.device.sleeps == sleeps
    caller.device.is_capturing = False
    caller.call(5)
    assert caller.microseconds() == pytest.approx([5, 0, 5])


def test_operators_when_the_device_cannot_sleep_then_it_is_kept_busy_by_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch, Module)
    device, matrix = caller.device, torch.zeros(1)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: matrix)

    def multiply(*_: object, out: torch.Tensor) -> torch.Tensor:
        device.host_us += 5
        device.run(50)
        return out

    monkeypatch.setattr(torch, "mm", multiply)
    for _ in range(100):
        caller.call(5)
    assert caller.microseconds() == pytest.approx([5] * 100)


def test_operators_when_the_device_has_no_room_for_products_then_they_are_called_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(monkeypatch, Module)

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", fail)
    caller.call(5)
    caller.call(5)
    assert caller.microseconds() == pytest.approx([LAUNCH_US + 5] * 2)


def test_time_of_the_host_when_memory_is_made_then_it_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    timer = HostTimer()
    begun = timer.begin()
    now[0] = 12.0
    timer.stop()
    now[0] = 15.0
    timer.go_on()
    timer.go_on()  # without a beginning: it began before anybody looked
    assert timer.end(begun, ADD) == 2.0
