"""Runs are timed when their plans are stable, in turns, and all train as many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit.demo.children import RunFailedError
from swapkit.demo.messages import (
    Built,
    Command,
    Finished,
    Message,
    OutOfMemory,
    RunAction,
    RunKind,
    RunSpec,
    Stepped,
)
from swapkit.demo.race import (
    LEAST_STEPS,
    MOST_STEPS,
    Entrant,
    build,
    catch_up,
    conclude,
    measure,
    settle,
    take_turns,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER = 1000


class SilentProgress:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.units = 0

    def now(self, what: str) -> None:
        pass

    def done(self, units: int) -> None:
        self.units += units

    def say(self, line: str) -> None:
        self.lines.append(line)


class ScriptedChild:
    """Answers as a run whose plan is stable, or whose memory is out, after so many steps."""

    class NoWitness:
        peak_bytes = looks = 0

    def __init__(self, spec: RunSpec, log: list[str], *, stable: int, out_of_memory: int) -> None:
        self.spec = spec
        self.witness = self.NoWitness()
        self._log = log
        self._stable = stable
        self._last = out_of_memory
        self._steps = 0

    def ask(self, command: Command) -> Message:
        self._log.append(f"{self.spec.label} {'watched ' * command.watched}{command.action.value}")
        if command.action == RunAction.BUILD:
            return Built()
        if command.action == RunAction.FINISH:
            return Finished(digest="abc")
        self._steps += 1
        if self._steps > self._last:
            return OutOfMemory(text="no room", step=self._steps - 1)
        stage = "stable" if self._steps >= self._stable else "search"
        return Stepped(
            loss="0x1p+2", seconds=1.0, state_bytes=3, reserved_peak_bytes=9, stage=stage
        )

    def peak_bytes(self) -> None:
        return None


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def enter(log: list[str]) -> Callable[..., Entrant]:
    def make(label: str, kind: RunKind, *, stable: int = 1, out_of_memory: int = NEVER) -> Entrant:
        spec = RunSpec(label=label, kind=kind, size="tiny", seed=0, threads=1, parent_pid=1)
        child = ScriptedChild(spec, log, stable=stable, out_of_memory=out_of_memory)
        return Entrant(child=child)  # type: ignore[arg-type]

    return make


def test_plan_when_it_is_found_late_then_all_train_as_long_before_they_are_timed(
    enter: Callable[..., Entrant],
) -> None:
    progress = SilentProgress()
    plain, early, late = (
        enter("plain", RunKind.PLAIN),
        enter("early", RunKind.SWAPKIT, stable=3),
        enter("late", RunKind.SWAPKIT, stable=7),
    )
    for entrant in (plain, early, late):
        build(entrant, 5, progress)
        settle(entrant, progress)
    assert [len(each.losses) for each in (plain, early, late)] == [LEAST_STEPS, 3, 7]
    catch_up((plain, early, late), progress)
    take_turns((plain, early, late), 2, progress)
    conclude((plain, early, late), progress)
    for entrant in (plain, early, late):
        assert len(entrant.losses) == 7 + 2 + 1
        assert len(entrant.seconds) == 2


def test_plan_when_none_is_ever_stable_then_given_up(enter: Callable[..., Entrant]) -> None:
    entrant = enter("swapkit", RunKind.SWAPKIT, stable=NEVER)
    settle(entrant, SilentProgress())
    assert len(entrant.losses) == MOST_STEPS


def test_turns_when_taken_then_every_other_round_in_reverse(
    enter: Callable[..., Entrant], log: list[str]
) -> None:
    entrants = [enter(label, RunKind.PLAIN) for label in "abc"]
    take_turns(entrants, 2, SilentProgress())
    assert log == [f"{label} step" for label in "abccba"]


def test_run_when_memory_is_out_then_the_others_go_on(enter: Callable[..., Entrant]) -> None:
    progress = SilentProgress()
    entrants = [enter("a", RunKind.PLAIN), enter("b", RunKind.SWAPKIT, out_of_memory=2)]
    catch_up(entrants, progress)
    take_turns(entrants, 3, progress)
    conclude(entrants, progress)
    assert [len(entrant.seconds) for entrant in entrants] == [3, 2]
    assert progress.lines == ["a: 4 steps, 1000 ms a step", "b: out of memory in step 3"]


def test_run_when_watched_then_in_its_first_and_last_step_only(
    enter: Callable[..., Entrant], log: list[str]
) -> None:
    entrant, progress = enter("a", RunKind.SWAPKIT, stable=3), SilentProgress()
    build(entrant, 5, progress)
    settle(entrant, progress)
    take_turns([entrant], 1, progress)
    conclude([entrant], progress)
    steps = ["a watched step", "a step", "a step", "a step", "a watched step"]
    assert log == ["a build", *steps, "a finish"]


def test_measure_when_there_is_no_limit_then_peak_and_state(
    enter: Callable[..., Entrant],
) -> None:
    assert measure(enter("plain", RunKind.PLAIN), SilentProgress()) == (9, 3)


def test_measure_when_memory_is_out_then_the_demo_fails(enter: Callable[..., Entrant]) -> None:
    with pytest.raises(RunFailedError, match='"plain", which has no limit, ran out of memory'):
        measure(enter("plain", RunKind.PLAIN, out_of_memory=1), SilentProgress())
