"""Training goes on while its plan is made: on which thread, for how long, and how that ends."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

import swapkit
import swapkit.testing
from swapkit._runtime.control import plan_maker as plan_making
from swapkit._runtime.recording.recorder import Recorder
from swapkit.errors import SessionError
from swapkit.planning import placed, planner
from swapkit.planning.beside import THREAD_NAME, GivenUp, at_once, go_on
from tests.support.sessions import Plain, Training, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

SHARE = 0.5
STEPS = 9
PATIENCE_SECONDS = 20

pytestmark = pytest.mark.usefixtures("installation", "steady_machine", "beside")


@pytest.fixture
def beside() -> Iterator[None]:
    with at_once(value=False):
        yield


@dataclass
class Gate:
    """A planner that waits until it is let through, as one does that takes long."""

    is_open: bool = False
    error: BaseException | None = None
    threads: list[threading.Thread] = field(default_factory=list)
    has_first: bool = False  # whether it finds a first plan quickly
    has_found: threading.Event = field(default_factory=threading.Event)

    def __call__(self, trace: Trace, *, is_quick: bool = False, **options: Any) -> tuple[Plan, ...]:
        if is_quick and not self.has_first:
            return ()
        if is_quick:
            return placed.make_placed_plans(trace, is_quick=True, **options)
        self.has_found.set()
        self.threads.append(threading.current_thread())
        try:
            while not self.is_open:
                go_on()
                time.sleep(0.001)
        except GivenUp:
            time.sleep(0.3)  # as in the middle of a linear program
            raise
        if self.error is not None:
            raise self.error
        return planner.make_plans(trace, **options)

    def open(self) -> None:
        """Let it through, and wait until the plans are made."""
        self.is_open = True
        self.threads[-1].join(PATIENCE_SECONDS)
        assert not self.threads[-1].is_alive()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(plan_making, "make_placed_plans", made)
    return made


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """All that were started."""
    found: list[Recorder] = []
    begin = Recorder.begin

    def note(recorder: Recorder) -> None:
        found.append(recorder)
        begin(recorder)

    monkeypatch.setattr(Recorder, "begin", note)
    return found


@pytest.fixture(scope="module")
def plain() -> Plain:
    swapkit.install()
    return train_plainly(make_training, STEPS)


def open_session(plain: Plain, training: Training, **options: Any) -> Any:
    return swapkit.budget(plain.budget(SHARE), training.model, training.optimizer, **options)


def planners() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD_NAME]


def take_steps(session: Any, training: Training, count: int) -> list[str]:
    """Return the stage after each."""
    stages = []
    for _ in range(count):
        training.step()
        stages.append(session.stage)
    return stages


def test_plan_when_saved_while_it_is_made_then_waited_for_and_followed_later(
    tmp_path: Path, plain: Plain, gate: Gate
) -> None:
    training, path = make_training(), tmp_path / "plan.json"
    with open_session(plain, training) as session:
        with pytest.raises(SessionError, match="there is no plan to save: recording"):
            session.save_plan(path)
        assert take_steps(session, training, 2) == ["warmup"] * 2
        threading.Timer(0.3, gate.open).start()
        session.save_plan(path)
        assert session.stage == "warmup"
    training = make_training()
    with open_session(plain, training, plan=path) as session:
        training.step()
        assert (session.stage, session.stats.replans) == ("stable", 0)


@pytest.mark.promise("C4")
def test_steps_when_the_plan_takes_long_then_they_go_on_under_rescue_and_take_it_when_it_is_made(
    plain: Plain, gate: Gate, recordings: list[Recorder]
) -> None:
    training = make_training()
    with open_session(plain, training, search_steps=2) as session:
        assert take_steps(session, training, 5) == ["warmup"] * 5
        assert len(gate.threads) == len(recordings) == 1
        assert session.plan is None
        assert session.stats.oom_rescues > 0
        gate.open()
        # A candidate that seems slow is tried once more: a third step of the search.
        stages = take_steps(session, training, 4)
        assert (stages[:2], stages[-1]) == (["search"] * 2, "stable")
        assert session.stats.peak_bytes <= session.limit_bytes
    assert threading.current_thread() not in gate.threads
    assert training.outcome() == plain.outcome


def test_steps_when_a_first_plan_is_there_then_they_follow_it_to_the_same_bits(
    plain: Plain, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.has_first = True
    training = make_training()
    with (
        caplog.at_level(logging.INFO, logger="swapkit"),
        open_session(plain, training, search_steps=1) as session,
    ):
        assert take_steps(session, training, 2) == ["warmup"] * 2
        assert gate.has_found.wait(PATIENCE_SECONDS)
        assert take_steps(session, training, 4) == ["search"] * 4
        assert session.plan is None
        assert "following a first plan since step 3" in session.explain()
        assert "search: following a first plan since step 3" in repr(session)
        gate.open()
        assert take_steps(session, training, STEPS - 6) == ["stable"] * (STEPS - 6)
        assert session.stats.peak_bytes <= session.limit_bytes
    assert training.outcome() == plain.outcome
    assert session.explain().count("plan settled at step 7") == 1
    lines = [each.partition(":")[0].partition(" (")[0] for each in caplog.messages]
    assert lines[-4:] == [
        "recording",
        "planning since step 2",
        "following a first plan since step 3, searching for better ones",
        "plan settled at step 7",
    ]


def test_steps_when_programs_count_them_then_the_plan_is_waited_for_where_they_say_so(
    plain: Plain, gate: Gate
) -> None:
    gate.is_open = True
    training = make_training()
    with swapkit.testing.planning_at_once(), open_session(plain, training) as session:
        assert take_steps(session, training, 2) == ["warmup", "search"]
    assert set(gate.threads) == {threading.current_thread()}


class OfUser:
    """A policy whose code may rely on the thread that it runs on."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def plan(self, trace: Trace, machine: Any) -> Plan:
        self.threads.append(threading.current_thread())
        return planner.make_plan(trace, machine)


def test_policy_when_it_is_a_users_own_then_it_plans_on_the_thread_of_the_steps(
    plain: Plain,
) -> None:
    training, policy = make_training(), OfUser()
    with open_session(plain, training, policy=policy) as session:
        assert take_steps(session, training, 2) == ["warmup", "stable"]
    assert set(policy.threads) == {threading.current_thread()}


def test_planner_when_it_raises_then_a_later_step_raises_that_and_rescue_goes_on(
    plain: Plain, gate: Gate
) -> None:
    gate.error = KeyError("mine")
    training = make_training()
    with open_session(plain, training) as session:
        take_steps(session, training, 2)
        gate.open()
        with pytest.raises(KeyError, match="mine") as raised:
            training.step()
        assert "raise self.error" in str(raised.value.__cause__)  # where that was
        training.model.zero_grad()
        assert take_steps(session, training, 2) == ["stable"] * 2
        assert session.plan is None
        assert "KeyError: 'mine'" in session.explain()


# ---- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["leave", "close", "other thread", "error"])
@pytest.mark.usefixtures("gate")
def test_session_when_it_ends_while_it_plans_then_its_thread_has_ended(
    plain: Plain, way: str
) -> None:
    training = make_training()
    with suppress(ZeroDivisionError), open_session(plain, training) as session:
        take_steps(session, training, 3)
        assert len(planners()) == 1
        if way == "close":
            session.close()
            assert not planners()
        elif way == "other thread":
            other = threading.Thread(target=session.close)
            other.start()
            other.join(PATIENCE_SECONDS)
            assert not planners()
        elif way == "error":
            raise ZeroDivisionError
    assert not planners()
    training.step()
    assert not planners()


@pytest.mark.usefixtures("no_collector")
def test_session_when_its_handle_is_lost_while_it_plans_then_thread_and_model_go(
    plain: Plain, gate: Gate
) -> None:
    training = make_training()
    session = open_session(plain, training).__enter__()
    take_steps(session, training, 3)
    model = weakref.ref(training.model)
    life = weakref.ref(session._active)
    del session
    gate.threads[0].join(PATIENCE_SECONDS)
    assert not planners()
    training.step()  # takes back what belongs to this thread
    del training
    assert model() is None
    assert life() is None


@pytest.mark.usefixtures("no_collector", "gate")
def test_thread_when_it_plans_then_it_keeps_no_object_of_the_user(plain: Plain) -> None:
    training = make_training()
    with open_session(plain, training) as session:
        take_steps(session, training, 3)
        (thread,) = planners()
        held = {type(each).__name__ for each in _reach(thread)}
        assert "Trace" in held
        assert not held & {"Sequential", "Parameter", "Steering", "Life", "Session", "AdamW"}


def _reach(thread: threading.Thread) -> list[object]:
    """Return what a thread's own frames refer to, but for modules and classes."""
    frame = sys._current_frames()[thread.ident]  # type: ignore[index]
    seen: dict[int, object] = {}
    waiting: list[object] = []
    at: Any = frame
    while at is not None:
        waiting += at.f_locals.values()
        at = at.f_back
    while waiting:
        each = waiting.pop()
        skipped = isinstance(each, (type, type(sys), type(_reach), type(frame), Gate))
        if id(each) not in seen and not skipped and each is not threading.main_thread():
            seen[id(each)] = each
            waiting += gc.get_referents(each)
    return list(seen.values())


def test_child_when_it_is_forked_while_it_plans_then_it_ends_well_and_the_parent_goes_on(
    plain: Plain, gate: Gate
) -> None:
    training = make_training()
    with open_session(plain, training, search_steps=2) as session:
        take_steps(session, training, 3)
        child = os.fork()
        if child == 0:
            try:
                session.close()
                os._exit(0 if not planners() else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.open()
        assert take_steps(session, training, 4)[-1] == "stable"  # one may be tried twice


PROGRAM = """
import sys, time
import swapkit
import swapkit.testing
from swapkit._runtime.control import plan_maker as plan_making
from swapkit.planning.beside import go_on
from tests.support.sessions import make_training, steady_machine_like

def make_plans(trace, **options):
    print("plans", flush=True)
    while True:
        go_on()
        time.sleep(0.001)

plan_making.make_placed_plans = make_plans
plan_making.measure_machine = steady_machine_like
training = make_training()
session = swapkit.budget("1GiB", training.model, training.optimizer)
session.__enter__()
for _ in range(3):
    training.step()
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_interpreter_when_it_ends_while_a_session_plans_then_at_once_and_without_a_word(
    end: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + end],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout == "plans\n"
    if end == "raise KeyboardInterrupt":
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")
        assert "swapkit" not in done.stderr.replace("in <module>", "")
    else:
        assert (done.returncode, done.stderr) == (3 if end else 0, "")
