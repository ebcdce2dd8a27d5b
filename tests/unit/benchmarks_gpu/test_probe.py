"""What is looked at around timed steps."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from benchmarks.gpu import measure
from benchmarks.gpu.configurations import Setup
from benchmarks.gpu.probe import OF_ALLOCATOR, OF_SESSION, Probe, describe_plans, is_kernel
from benchmarks.gpu.process import python, run_process

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.trainer import Training

PLAIN = Setup(shape="tiny", method="plain", device="cpu", warmup_steps=0, timed_steps=4)


class Counting:
    """Stands for training and for its session: every step rescues twice and maps once."""

    def __init__(self) -> None:
        self.setup = PLAIN
        self.steps = 0
        self.plan = make_plan(8)

    def step(self) -> None:
        self.steps += 1

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(OF_SESSION.values(), 2 * self.steps))


def make_plan(swapped_bytes: int) -> Any:
    return SimpleNamespace(
        prediction=SimpleNamespace(swapped_bytes=swapped_bytes), decisions=(swapped_bytes,)
    )


def test_probe_when_steps_are_timed_then_figures_are_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Counting()
    counts = [names[0] for names in OF_ALLOCATOR.values()]

    def stats(_device: str, *, pool: bool) -> dict[str, int]:
        assert not pool
        return dict.fromkeys(counts, training.steps) | {"num_device_alloc": 100 * training.steps}

    monkeypatch.setattr(measure, "allocator_stats", stats)
    probe, trained = Probe(), cast("Training", training)
    training.step()  # one that is not timed
    probe.begin(trained, training)
    for _ in range(PLAIN.timed_steps):
        probe.step(trained, training)
    figures = probe.end(trained, training)
    assert {figures.pop(key) for key in OF_SESSION} == {2.0}
    assert {figures.pop(key) for key in OF_ALLOCATOR} == {1.0}
    assert figures == {"planned_bytes": 8.0, "plan_changes": 0}
    assert probe.after(trained, training) == {}


def test_probe_when_there_is_no_session_then_only_the_allocators_counters() -> None:
    training = cast("Training", Counting())
    assert Probe().read(training, None) == {}  # the CPU's allocator has none


def test_plans_when_another_is_followed_then_counted_and_their_bytes_are_the_mean() -> None:
    first, second = make_plan(10), make_plan(20)
    figures = describe_plans([first, first, second, second])
    assert figures == {"planned_bytes": 15.0, "plan_changes": 1}
    assert describe_plans([first, None]) == {}
    assert describe_plans([]) == {}


@pytest.mark.parametrize(
    ("name", "where", "expected"),
    [
        ("gemm", "CUDA", True),
        ("Memcpy DtoH (Device -> Pinned)", "CUDA", False),
        ("aten::mm", "CPU", False),
    ],
)
def test_kernel_when_the_profiler_names_it_then_copies_are_none(
    name: str, where: str, *, expected: bool
) -> None:
    kind = getattr(torch._C._autograd.DeviceType, where)
    assert is_kernel(SimpleNamespace(name=name, device_type=kind)) is expected


def test_process_when_whoever_watches_wants_then_ended_with_the_reason(tmp_path: Path) -> None:
    seen: list[int] = []

    def watch(process: int) -> str:
        seen.append(process)
        return "enough" if len(seen) > 1 else ""

    code = "import time; time.sleep(60)"
    done = run_process(
        python("-c", code), seconds=30, log=tmp_path / "log", cwd=tmp_path, watch=watch
    )
    assert done.stopped == "enough"
    assert not done.ok
    assert not done.timed_out
    assert done.describe() == "stopped: enough"
    quick = run_process(
        [sys.executable, "-c", ""], seconds=30, log=tmp_path / "log", cwd=tmp_path, watch=watch
    )
    assert quick.ok
