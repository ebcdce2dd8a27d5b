"""Sessions on hosts that are slow now and then, and on one whose link becomes slow for good."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime import steering
from swapkit.planning.cases import WATCHED_STEPS
from tests.support.sessions import (
    Log,
    make_training,
    settle,
    steady_machine_like,
    train,
    train_plainly,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.machines import Machine
    from tests.support.sessions import Training

pytestmark = [pytest.mark.promise("C4"), pytest.mark.usefixtures("installation")]

SHARE = 0.5
CHANGE = 2 * WATCHED_STEPS
STEPS = 5 * WATCHED_STEPS
FAR = 10.0  # seconds: nobody's real steps take as long


@dataclass
class Host:
    """Whose clock steps move on by what they are said to take, and the speed of its link."""

    now: float = 0.0
    bytes_per_second: float = 1e9
    looks: int = 0

    def perf_counter(self) -> float:
        return self.now

    def measure(self, device: object, *, fresh: bool = False, **limits: int | None) -> Machine:
        self.looks += fresh
        machine = steady_machine_like(device, **limits)  # type: ignore[arg-type]
        speed = self.bytes_per_second
        return replace(machine, out_bytes_per_second=speed, in_bytes_per_second=speed)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(steering, "time", found)
    monkeypatch.setattr(steering, "measure_machine", found.measure)
    return found


def run(host: Host, seconds: Callable[[int], float]) -> Log:
    """Train stable steps that take so many seconds; they end in the bits of plain training."""

    def before(training: Training, step: int) -> None:  # noqa: ARG001 - one of `train`
        taken[0] = seconds(step)

    taken = [1.0]
    expected = train_plainly(make_training, 12 + STEPS)
    training = make_training()

    def pass_time(*_: object) -> None:
        host.now += taken[0] * FAR

    training.model.register_forward_hook(pass_time)
    budget = expected.budget(SHARE)
    with swapkit.budget(budget, training.model, training.optimizer) as session:
        done = settle(session, training, 12)
        for _ in range(12 - done):
            training.step()
        log = train(session, training, STEPS, before)
    assert training.outcome() == expected.outcome
    return log


def test_stable_session_when_steps_are_slow_now_and_then_then_nothing_is_recorded_or_planned(
    host: Host,
) -> None:
    log = run(host, lambda step: 5.0 if step % 7 == 3 else 1.0 + step % 3 / 10)
    assert log.stages == ["stable"] * STEPS
    assert log.replans[-1] == 0
    assert host.looks == 0


def test_stable_session_when_other_programs_slow_it_for_long_then_nothing_is_recorded_or_planned(
    host: Host,
) -> None:
    log = run(host, lambda step: 1.0 if step < CHANGE else 2.0)
    assert log.stages == ["stable"] * STEPS
    assert log.replans[-1] == 0
    assert host.looks == 1


@pytest.mark.promise("C5")
def test_stable_session_when_its_link_becomes_slow_for_good_then_planned_once_and_says_why(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    def seconds(step: int) -> float:
        if step == CHANGE:
            host.bytes_per_second /= 10
        return 1.0 if step < CHANGE else 2.0

    with caplog.at_level("INFO", logger="swapkit"):
        log = run(host, seconds)
    assert log.replans[CHANGE] == 0
    assert log.replans[CHANGE + WATCHED_STEPS] == 1, "soon"
    assert log.replans[-1] == 1
    assert "warmup" not in log.stages, "the trace at hand will do"
    assert log.stages[-1] == "stable"
    told = [line for line in caplog.messages if line.startswith("another plan is needed")]
    assert told == [
        "another plan is needed: steps take 2.0 times as long, and the machine's links have changed"
    ]
    assert "another plan was needed once; the last time, steps take" in log.session.explain()
