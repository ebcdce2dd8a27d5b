"""Sessions bind threads to the CPUs near the device, say so, and give them back."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._native.backend import ANY_NODE
from swapkit._runtime.affinity.devices import CpuChoice, DevicePlaces
from swapkit._runtime.affinity.places import Place
from swapkit._runtime.affinity.threads import OWN, list_threads
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument
from tests.support.sessions import make_training, train_plainly
from tests.unit._runtime.rig import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit.config.environment import CpuAffinity

ALLOWED = frozenset(os.sched_getaffinity(0))
ONE = frozenset({min(ALLOWED)})
LIMIT = 1 << 40
PLACES = 600  # where a session's begin or end can be interrupted, about
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


class Near(DevicePlaces):
    """Says that the CPU, which has no place of its own, is near one of the process's CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[CpuAffinity] = []
        self.choice = CpuChoice(cpus=ONE, text=f"threads on CPUs {min(ONE)}")
        self.node: int | None = None

    def choose(self, name: torch.device, asked: CpuAffinity) -> CpuChoice:
        assert name.type == "cpu"
        self.asked.append(asked)
        return self.choice

    def host_node(self, name: torch.device) -> int | None:
        assert name.type == "cpu"
        return self.node


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Near:
    swapkit.install()
    places = Near()
    monkeypatch.setattr(get_runtime(), "places", places)
    return places


@pytest.fixture(autouse=True)
def _given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CPU_BINDING_NUM", "CPU_AFFINITY_CONF"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert os.sched_getaffinity(0) == ALLOWED


def own_threads() -> list[frozenset[int]]:
    return [
        frozenset(os.sched_getaffinity(thread.number))
        for thread, name in list_threads().items()
        if name == OWN
    ]


@pytest.mark.promise("D8")
def test_session_when_binding_is_asked_for_then_its_threads_run_there_until_it_ends(
    near: Near, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CPU_BINDING_NUM", "1")
    plain = train_plainly(make_training, 4)
    training = make_training()
    caplog.set_level(logging.INFO, logger="swapkit")
    with swapkit.budget(plain.budget(0.6), training.model, training.optimizer) as session:
        assert os.sched_getaffinity(0) == ONE
        for _ in range(4):
            training.step()
        assert session.stats.swapped_out_bytes > 0
        assert own_threads()
        assert set(own_threads()) == {ONE}
        assert near.choice.text in session.explain().splitlines()
    assert training.outcome() == plain.outcome
    assert near.asked[0].cpus_per_device == 1
    assert near.choice.text in session.explain().splitlines()
    assert [
        record.levelname for record in caplog.records if near.choice.text in record.message
    ] == ["INFO"]
    assert set(own_threads()) <= {ALLOWED}


@pytest.mark.promise("D8")
@pytest.mark.parametrize(
    ("variables", "bind_cpus", "is_bound"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"CPU_BINDING_NUM": "1"}, None, True),
        ({"CPU_BINDING_NUM": "1"}, False, False),
        ({"CPU_AFFINITY_CONF": "1"}, None, True),
        ({"CPU_AFFINITY_CONF": "0", "CPU_BINDING_NUM": "1"}, None, False),
    ],
)
def test_session_when_entered_then_bound_only_if_asked_for(
    near: Near,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    bind_cpus: bool | None,
    is_bound: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with swapkit.budget(LIMIT, bind_cpus=bind_cpus):
        assert (os.sched_getaffinity(0) == ONE) == is_bound
    assert bool(near.asked) == is_bound


@pytest.mark.promise("D8")
@pytest.mark.usefixtures("near")
def test_adaptive_memory_when_its_session_trains_then_bound() -> None:
    parser = swapkit.add_arguments(argparse.ArgumentParser())
    for line, is_bound in (("--adaptive-memory-optimization", True), ("--smart-swap", False)):
        arguments = swapkit.from_arguments(parser.parse_args([line]))
        with arguments.budget(torch.nn.Linear(2, 2)):
            assert (os.sched_getaffinity(0) == ONE) == is_bound
    arguments = swapkit.from_arguments(parser.parse_args(["--adaptive-memory-optimization"]))
    with arguments.budget(torch.nn.Linear(2, 2), bind_cpus=False):
        assert os.sched_getaffinity(0) == ALLOWED


class OnSharedNode(DevicePlaces):
    """Says that the CPU is one of two devices on a node with all CPUs of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.address = "first"

    def place(self, name: torch.device) -> Place:
        nodes = {0: ALLOWED, 1: frozenset({max(ALLOWED) + 1})}
        return Place(
            device=f"{name.type}:0",
            address=self.address,
            node=0,
            nodes=nodes,
            alike=("first", "second"),
        )


@pytest.mark.promise("D8")
def test_sessions_when_they_nest_then_the_inner_one_chooses_from_the_cpus_before_the_outer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swapkit.install()
    places = OnSharedNode()
    monkeypatch.setattr(get_runtime(), "places", places)
    shares = {}
    for places.address in ("first", "second"):
        with swapkit.budget(LIMIT, bind_cpus=True):
            shares[places.address] = frozenset(os.sched_getaffinity(0))
    assert not shares["first"] & shares["second"]
    for outer, inner in itertools.permutations(shares):
        places.address = outer
        with swapkit.budget(LIMIT, bind_cpus=True):
            places.address = inner
            with swapkit.budget(LIMIT, bind_cpus=True):
                assert os.sched_getaffinity(0) == shares[inner]
            assert os.sched_getaffinity(0) == shares[outer]


@pytest.mark.usefixtures("near")
def test_session_when_another_thread_closes_it_then_given_back() -> None:
    with swapkit.budget(LIMIT, bind_cpus=True) as session:
        closing = threading.Thread(target=session.close)
        closing.start()
        closing.join()
        assert os.sched_getaffinity(0) == ALLOWED


@pytest.mark.promise("D8")
@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_sessions_when_on_two_threads_then_both_get_their_cpus_back(first_ends_first: bool) -> None:
    first, second = Visitor(), Visitor()
    assert first.cpus == second.cpus == ONE
    leaving, staying = (first, second) if first_ends_first else (second, first)
    leaving.leave()
    assert (leaving.cpus, staying.cpus) == (ALLOWED, ONE)
    staying.leave()
    assert leaving.cpus == staying.cpus == ALLOWED
    leaving.end()
    staying.end()


class Visitor:
    """A thread with a session of its own until it leaves it."""

    def __init__(self) -> None:
        self._entered, self._left = threading.Event(), threading.Event()
        self._leave, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._entered.wait(60)

    def _run(self) -> None:
        with swapkit.budget(LIMIT, bind_cpus=True):
            self._entered.set()
            self._leave.wait()
        self._left.set()
        self._end.wait()

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(self._thread.native_id or 0))

    def leave(self) -> None:
        self._leave.set()
        assert self._left.wait(60)

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def interrupt_begin(nth: int) -> bool:
    session = swapkit.budget(LIMIT, bind_cpus=True)
    is_interrupted = interrupts(nth, session.__enter__)
    if session.is_active:  # a finalizer had the interrupt, or there was none
        session.close()
    return is_interrupted


def interrupt_end(nth: int) -> bool:
    session = swapkit.budget(LIMIT, bind_cpus=True)
    session.__enter__()
    is_interrupted = interrupts(nth, session.close)
    session.close()
    return is_interrupted


# Python reports the file of `/proc` that an interrupted read leaves open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("interrupt", [interrupt_begin, interrupt_end])
def test_session_when_its_begin_or_end_is_interrupted_then_the_cpus_are_given_back(
    interrupt: Callable[[int], bool],
) -> None:
    interruptions = 0
    for nth in range(1, PLACES):
        interruptions += interrupt(nth)
        assert os.sched_getaffinity(0) == ALLOWED, nth
        assert set(own_threads()) <= {ALLOWED}, nth
    assert interruptions > PLACES // 2


@pytest.mark.promise("F12")
def test_session_when_the_node_is_unknown_then_one_warning_and_training_goes_on(
    near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    near.choice = CpuChoice(text="npu-smi is missing", is_shortfall=True)
    with swapkit.budget(LIMIT, bind_cpus=True) as session:
        assert os.sched_getaffinity(0) == ALLOWED
    assert near.choice.text in session.explain()
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in warned] == ["npu-smi is missing"]


def test_session_when_too_many_cpus_are_asked_for_then_refused_and_nothing_is_bound(
    near: Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_name: torch.device, _asked: CpuAffinity) -> CpuChoice:
        raise InvalidArgument("CPU_BINDING_NUM=9")

    monkeypatch.setattr(near, "choose", refuse)
    session = swapkit.budget(LIMIT, bind_cpus=True)
    with pytest.raises(InvalidArgument, match="CPU_BINDING_NUM=9"):
        session.__enter__()
    assert not session.is_active
    assert swapkit.sessions() == ()


@pytest.mark.promise("D8")
def test_scheduler_when_the_device_has_a_node_then_host_copies_lie_there(near: Near) -> None:
    device = get_runtime().cpu
    usual = device.link.host_node
    try:
        for node, expected in ((None, ANY_NODE), (0, 0), (63, 63), (64, ANY_NODE)):
            near.node = node
            device.new_scheduler()
            assert device.link.host_node == expected
    finally:
        device.link.host_node = usual
