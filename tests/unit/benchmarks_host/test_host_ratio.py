"""The benchmark of what the thread that trains pays: its figures, and what is not measured."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import host_ratio
from benchmarks._host_ways import (
    RESCUE,
    Counts,
    InSession,
    InTurn,
    NotAsPlanned,
    Plain,
    Step,
    Times,
    Training,
    checkpoint_by_swapkit,
    checkpoint_by_torch,
    make_size,
)
from benchmarks.host_ratio import AMPLE_BYTES, Result, measure_memory, summarize
from swapkit.errors import InfeasibleBudget
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP
from tests.conformance.modes import count_copies
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

POOLS = ("pool", "gpt_pool", "weights_pool", "planner_pool")
PLANNED = ("planner_recompute_50", "planner_recompute_40")
OF_WEIGHTS = ("weights_session", "weights_resident", "weights_streamed", "weights_planned")
WAYS = (
    *("identity_hooks", "noop_mode", "session_rescue", "session_free", "swap_all", "recompute_all"),
    *("mixed", "offload", "offload_prefetch4", "save_on_cpu", "checkpoint", "torch_checkpoint"),
    *("checkpoint_save", "torch_selective"),
)
OF_GPT = tuple(f"gpt_{way}" for way in WAYS)
FIGURES = (
    *("ratio", "forward_us", "backward_us", "optimizer_us", "us_per_operator"),
    *("us_per_saved_tensor", "swapped_bytes", "recomputed"),
)
PREFIXES = ("", "gpt_", "weights_", "planner_")
COUNTS = ("forward_operators", "backward_operators", "saved_tensors")
SIZE = make_size(layers=2, dim=32, tokens=16)


def rows_of(output: str) -> list[str]:
    """Return the names of the ways in a table."""
    return [line.split()[0] for line in output.splitlines() if line[:1].isalpha()]


def expected_keys() -> set[str]:
    return {
        *(f"{pool}_{each}" for pool in POOLS for each in Times._fields),
        *(f"{prefix}{each}" for prefix in PREFIXES for each in COUNTS),
        *(f"{way}_{each}" for way in (*WAYS, *OF_GPT, *OF_WEIGHTS, *PLANNED) for each in FIGURES),
        *(
            f"{prefix}{way}_us_per_recomputed_operator"
            for prefix in ("", "gpt_")
            for way in ("recompute_all", "mixed")
        ),
    }


def test_benchmark_when_run_then_every_way_has_its_figures(tmp_path: Path) -> None:
    sizes = (
        "--layers",
        "2",
        "--gpt-layers",
        "1",
        "--weights-layers",
        "4",
        "--planner-layers",
        "6",
        "--rounds",
        "1",
        "--steps",
        "1",
    )
    done = subprocess.run(
        [sys.executable, "benchmarks/host_ratio.py", *sizes, "--json", tmp_path / "figures.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert set(figures) == expected_keys()
    groups = (
        ("pool", WAYS),
        ("gpt_pool", OF_GPT),
        ("weights_pool", OF_WEIGHTS),
        ("planner_pool", PLANNED),
    )
    assert rows_of(done.stdout) == [each for pool, ways in groups for each in (pool, *ways)]
    assert [figures[f"{way}_swapped_bytes"] > 0 for way in OF_WEIGHTS] == [False, False, True, True]
    assert {way for way in WAYS if figures[f"{way}_swapped_bytes"]} == {"swap_all", "mixed"}
    recomputing = {way for way in (*WAYS, *PLANNED) if figures[f"{way}_recomputed"]}
    assert recomputing == {"recompute_all", "mixed", *PLANNED}
    assert figures["mixed_swapped_bytes"] < figures["swap_all_swapped_bytes"]
    assert figures["mixed_recomputed"] < figures["recompute_all_recomputed"]
    assert min(figures[each] for each in COUNTS) > 0


@pytest.mark.usefixtures("installation")
def test_benchmark_when_ways_are_named_then_only_those_run_beside_the_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--layers", "1", "--rounds", "1", "--steps", "1")
    monkeypatch.setattr(sys, "argv", ["host_ratio", *sizes, "--modes", "checkpoint,save_on_cpu"])
    host_ratio.main()
    assert rows_of(capsys.readouterr().out) == ["pool", "save_on_cpu", "checkpoint"]


def test_benchmark_when_a_way_is_not_known_then_says_which_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["host_ratio", "--modes", "swap_all,swap_none"])
    with pytest.raises(SystemExit, match="2"):
        host_ratio.main()
    assert "--modes: choose from pool, identity_hooks" in capsys.readouterr().err


def test_figures_when_the_machine_slows_down_then_compared_with_what_was_right_before() -> None:
    before = [Times(100.0, 200.0, 50.0), Times(200.0, 400.0, 100.0), Times(400.0, 800.0, 200.0)]
    double = [Times(*(2 * each for each in times)) for times in before]
    triple = [Times(*(3 * each for each in times)) for times in before]
    figures = summarize(
        {
            "session_free": Result(double, before, Counts()),
            "mixed": Result(triple[:2], before[:2], Counts(swapped_bytes=8.0, recomputed=10.0)),
        },
        "pool",
        Step(forward_operators=40, backward_operators=60, saved_tensors=30),
    )
    assert (figures["pool_forward_us"], figures["pool_backward_us"]) == (200, 400)
    assert (figures["session_free_ratio"], figures["mixed_ratio"]) == (2, 3)
    assert figures["session_free_us_per_operator"] == 6
    assert figures["session_free_us_per_saved_tensor"] == 20
    assert figures["session_free_optimizer_us"] == 100
    assert figures["mixed_us_per_recomputed_operator"] == 60
    assert "session_free_us_per_recomputed_operator" not in figures


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize(
    ("actions", "swaps", "recomputes"),
    [((SWAP,), True, False), ((RECOMPUTE,), False, True), ((SWAP, RECOMPUTE, KEEP), True, True)],
)
def test_plan_when_followed_in_turns_then_moves_the_same_in_each(
    actions: tuple[int, ...], swaps: bool, recomputes: bool
) -> None:
    way = InSession("way", Training(SIZE), InTurn(*actions), AMPLE_BYTES)
    seen = []
    for _ in range(2):
        assert len(way.run(2)) == 2
        seen.append(way.counts)
    assert seen[0] == seen[1]
    assert (seen[0].swapped_bytes > 0, seen[0].recomputed > 0) == (swaps, recomputes)


class Changing(Training):
    """Saves more than was recorded once `is_changed`."""

    is_changed = False

    def loss(self) -> torch.Tensor:
        loss = super().loss()
        return loss.sin().cos() if self.is_changed else loss


@pytest.mark.usefixtures("installation")
def test_session_when_a_step_leaves_the_plan_then_not_measured() -> None:
    training = Changing(SIZE)
    way = InSession("way", training, InTurn(SWAP), AMPLE_BYTES)
    way.run(1)
    training.is_changed = True
    with pytest.raises(NotAsPlanned, match=r"^way: a step does not follow the plan to event"):
        way.run(1)


@pytest.mark.usefixtures("installation")
def test_session_when_memory_runs_out_then_not_measured() -> None:
    training = Training(make_size(layers=4, dim=64, tokens=256))
    between_bytes, peak_bytes = measure_memory(training)
    way = InSession("way", training, RESCUE, (between_bytes + peak_bytes) // 2)
    with pytest.raises(NotAsPlanned, match=r"^way: 0 replans, \d+ rescues"):
        way.run(1)


class Refusing:
    """A policy that has no plan."""

    def plan(self, _trace: Trace, machine: Machine) -> Plan:
        raise InfeasibleBudget("none today", least_bytes=machine.budget_bytes + 1, operators=())


@pytest.mark.usefixtures("installation")
def test_session_when_there_is_no_plan_then_not_measured() -> None:
    with pytest.raises(NotAsPlanned, match=r"(?s)^way: no stable plan .* none today"):
        InSession("way", Training(SIZE), Refusing(), AMPLE_BYTES)


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize(
    ("change", "calls"), [(checkpoint_by_swapkit, 1), (checkpoint_by_torch, 2)]
)
def test_checkpoints_when_trained_then_blocks_run_again(
    change: Callable[[Any], None], calls: int
) -> None:
    """Swapkit runs the operators of a block again, torch the block."""
    called = 0

    def count(*_: object) -> None:
        nonlocal called
        called += 1

    def prepare(model: torch.nn.Module) -> None:
        change(model)
        for block in model.blocks:  # type: ignore[union-attr]
            block.feed_forward.gate.register_forward_hook(count)

    with count_copies() as copied:
        Plain(Training(SIZE, prepare)).run(1)
    assert called == calls * SIZE.layers * 3
    assert (copied.repeated > 0) == (calls == 1)
