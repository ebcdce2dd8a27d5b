"""Processes of their own: order, crashes, memory; and what is looked at inside of one."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.gpu.configurations import Setup
from benchmarks.gpu.trainer import FINISHED
from benchmarks.virtual import launch, runs, trainer
from benchmarks.virtual.launch import Machine
from benchmarks.virtual.runs import Runner, resident_bytes, share_of_memory
from benchmarks.virtual.ways import list_lora_ways, list_ways
from tests.cuda.timed import machine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.gpu.comparison import Results

MIB = 1 << 20
BASE = Setup(shape="tiny", method="plain", device="cuda")
# Stands for the trainer: SETUP RESULT are the last words.
CODE = """
import json, os, sys
setup, result = json.loads(sys.argv[-2]), sys.argv[-1]
assert os.environ["CUSIM_MACHINE"] == "H200" and os.environ["CUSIM_HOST_SLOWNESS"] == "1.5"
if setup["policy"] == "swap":
    os._exit(7)
if setup["policy"] == "rescue":
    import time
    taken = bytearray(256 << 20)
    time.sleep(60)
figures = {"outcome": "finished", "steps_ms": [1.0], "resident_bytes": 100 << 20}
figures["frozen_bytes"] = 80 << 20
figures["capacity"] = os.environ.get("CUSIM_CAPACITY")
figures["in_use_peak_bytes"] = (200 if setup["method"] == "recompute" else 300) << 20
json.dump(figures | {"limit": setup["limit_bytes"]}, open(result, "w"))
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    def command(*program: str | Path) -> list[str]:
        return [sys.executable, "-S", "-c", CODE, *map(str, program)]

    monkeypatch.setattr(launch, "command", command)
    there = Machine(name="H200", slowness=1.5)
    return Runner(machine=there, folder=tmp_path, jobs=2, most_bytes=128 * MIB)


def run(runner: Runner, *names: str) -> tuple[list[str], Results]:
    shown: list[str] = []
    ways = [way for way in list_ways(BASE) if way.name in names]
    results = runner.run(ways, lambda name, _results: shown.append(name))
    return shown, results


def test_runs_when_limits_follow_from_others_then_after_those(runner: Runner) -> None:
    shown, results = run(runner, "plain", "recompute", "auto_at_recompute", "auto_40")
    assert sorted(shown) == ["auto_40", "auto_at_recompute", "plain", "recompute"]
    assert shown.index("plain") < shown.index("auto_40")
    assert shown.index("recompute") < shown.index("auto_at_recompute")
    assert results.most("auto_at_recompute", "limit") == 200 * MIB
    assert results.most("auto_40", "limit") == 180 * MIB
    assert results.runs["plain"][0]["seconds"] > 0


def test_runs_when_one_crashes_or_takes_too_much_memory_then_that_row_says_so(
    runner: Runner,
) -> None:
    _, results = run(runner, "plain", "swap_40", "rescue_40", "auto_40")
    assert results.outcome("auto_40") == FINISHED
    assert results.outcome("swap_40").startswith("failed: status 7")
    assert results.outcome("rescue_40").startswith("failed: stopped: it took ")
    assert results.outcome("rescue_40").endswith("of this machine's memory")


def test_runs_when_what_a_limit_follows_from_is_missing_then_not_run(runner: Runner) -> None:
    shown, results = run(runner, "plain", "auto_at_recompute")
    assert shown == ["plain"]
    assert results.outcome("auto_at_recompute") == "not run"


def test_runs_when_weights_are_frozen_then_plain_has_all_memory_and_limits_follow_from_them(
    runner: Runner,
) -> None:
    names = (
        "plain",
        "recompute",
        "auto_card",
        "auto_weights_60",
        "auto_weights_40",
        "auto_weights_30",
    )
    ways = [way for way in list_lora_ways(BASE, card_bytes=40 * MIB) if way.name in names]
    results = runner.run(ways, lambda _name, _results: None)
    limits = {name: results.most(name, "limit") for name in names}
    assert limits == {
        "plain": 0,
        "recompute": 0,
        "auto_card": 40 * MIB,
        "auto_weights_60": None,  # 48 MiB: more than the device has
        "auto_weights_40": 32 * MIB,
        "auto_weights_30": 24 * MIB,
    }
    capacities = [results.runs[name][0]["capacity"] for name in ("plain", "recompute")]
    assert capacities == [str(1 << 40), None]


def test_runs_when_interrupted_then_the_processes_end(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = dataclasses.replace(runner, most_bytes=1 << 40)
    ended = threading.Event()
    ended.set()
    setup = dataclasses.replace(BASE, policy="rescue")
    figures = roomy._run_way("rescue", setup, ended)
    assert figures["outcome"] == "failed: stopped: interrupted"
    monkeypatch.setattr(runs, "wait", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(roomy, "plain")


def raise_interrupt(*_args: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_memory_when_a_process_is_gone_then_none() -> None:
    assert resident_bytes(1 << 30) == 0
    assert share_of_memory(2) * 2 == pytest.approx(share_of_memory(1), abs=2)


class FakeTimer:
    """A recorder's timer: each operator takes a millisecond; kernels of its own keep time off."""

    def __init__(self, device: dict[str, int]) -> None:
        self._device = device
        self.pauses = 0

    def _delay(self) -> None:
        self._device["compute_busy_ns"] += 2_000_000

    def begin(self) -> str:
        self._delay()
        return "begun"

    def stop(self) -> None:
        self.pauses += 1

    def go_on(self) -> None:
        self._delay()

    def end(self, begun: str, _function: object) -> str:
        assert begun == "begun"
        return "taken"

    def nothing(self) -> None:
        return None

    def seconds(self, taken: Sequence[str | None]) -> list[float]:
        return [0.001 if one else 0.0 for one in taken]


def test_timer_when_watched_then_the_same_times_beside_the_true_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = {"compute_busy_ns": 100}
    monkeypatch.setattr(machine, "times", lambda: device)
    found: dict[str, Any] = {}
    fake = FakeTimer(device)
    timer = trainer.WatchedTimer(fake, found)

    def run_operator(ns: int) -> Any:
        begun = timer.begin()
        timer.stop()
        timer.go_on()
        device["compute_busy_ns"] += ns
        return timer.end(begun, None)

    taken = [run_operator(400_000), timer.nothing(), run_operator(600_000)]
    assert timer.seconds(taken) == [0.001, 0.0, 0.001]
    assert found == pytest.approx({"true_ms": 1.0})
    assert fake.pauses == 2
