"""The benchmark of planned addresses: its figures, its goals, and what its programs do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import addresses
from benchmarks._address_programs import (
    CHOSEN,
    IN_FLIGHT,
    LENGTHS,
    MODELS,
    NAMES,
    Disturbed,
    Experts,
    Lengths,
    Routed,
    make_program,
)
from benchmarks.addresses import GLIBC, PLANNED, PROGRAMS, QUICK, UNPLANNED, goal_misses
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SIZE = MODELS["quick"]
POOL_FIGURES = {
    *("requested_bytes", "peak_bytes", "ratio", "seconds", "time_ratio", "steps"),
    *("skipped", "is_settled", "maps"),
}
GLIBC_FIGURES = POOL_FIGURES - {"maps"}
PLANNED_FIGURES = POOL_FIGURES | {"hit_share", "layout_bytes"}


def test_benchmark_when_run_then_every_way_has_its_figures(tmp_path: Path) -> None:
    options = ("--quick", "--only", "demo", "--json", tmp_path / "figures.json")
    done = subprocess.run(
        [sys.executable, "benchmarks/addresses.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    ways = {f"{PLANNED}_80": PLANNED_FIGURES, f"{UNPLANNED}_80": POOL_FIGURES, GLIBC: GLIBC_FIGURES}
    assert set(figures) == {
        "demo_same_bits",
        *(f"demo_{way}_{each}" for way, keys in ways.items() for each in keys),
    }
    assert figures["demo_same_bits"]
    assert figures["demo_planned_80_peak_bytes"] <= 0.8 * figures["demo_glibc_requested_bytes"]
    assert figures["demo_glibc_peak_bytes"] > figures["demo_glibc_requested_bytes"] / 2
    rows = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("demo")]
    assert rows == [PLANNED, UNPLANNED, GLIBC]
    assert "Goals" in done.stdout


def figures_of(program: str, **changes: Any) -> dict[str, Any]:
    good = {"is_settled": True, "ratio": 1.02, "hit_share": 0.99, "time_ratio": 1.0} | changes
    same_bits = good.pop("same_bits", True)
    found = {f"{program}_planned_80_{key}": value for key, value in good.items()}
    return {f"{program}_same_bits": same_bits, **found}


@pytest.mark.parametrize(
    ("program", "change", "miss"),
    [
        ("demo", {"ratio": 1.021}, "demo_planned_80_ratio is 1.0210"),
        ("lengths", {"hit_share": 0.989}, "lengths_planned_80_hit_share is 0.9890"),
        ("experts", {"hit_share": 0.949}, "experts_planned_80_hit_share is 0.9490"),
        ("demo", {"time_ratio": 1.01}, "demo_planned_80_time_ratio is 1.010"),
        ("demo", {"is_settled": False}, "demo_planned_80 is not settled"),
        ("demo", {"same_bits": False}, "demo: the numbers differ"),
    ],
)
def test_goals_when_one_is_missed_then_named(
    program: str, change: dict[str, Any], miss: str
) -> None:
    assert goal_misses(figures_of(program), [program], [80]) == []
    assert goal_misses(figures_of(program, **change), [program], [80]) == [miss]


def test_goals_when_routing_differs_then_fewer_hits_are_enough() -> None:
    assert goal_misses(figures_of("experts", hit_share=0.95), ["experts"], [80]) == []


def test_programs_when_listed_then_the_benchmark_runs_all() -> None:
    assert tuple(NAMES) == PROGRAMS
    assert set(addresses.GOAL_HITS) == set(PROGRAMS)


@pytest.mark.parametrize("name", NAMES)
def test_program_when_made_twice_then_trains_to_the_same_bits(name: str) -> None:
    digests = set()
    for _ in range(2):
        program = make_program(name, QUICK.extent)
        before = program.digest()
        program.step()
        assert program.digest() != before
        digests.add(program.digest())
    assert len(digests) == 1


def test_lengths_when_trained_then_several_microbatches_are_in_flight() -> None:
    in_flight, most, lengths = 0, 0, []
    program = make_program("lengths", QUICK.extent)
    assert isinstance(program, Lengths)

    def note_forward(_model: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        lengths.append(inputs[0].shape[1])
        output.register_hook(note_backward)

    def note_backward(_gradient: torch.Tensor) -> None:
        nonlocal in_flight
        in_flight -= 1

    program.model.register_forward_hook(note_forward)
    program.step()
    assert (in_flight, most) == (0, IN_FLIGHT)
    assert len(set(lengths)) == len(LENGTHS)


def test_disturbed_when_trained_then_each_phase_takes_one_more_and_one_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Disturbed(SIZE)
    phases, extras, temporaries = 2 * len(LENGTHS), [], []
    take_extra, take_temporary = torch.Tensor.new_zeros, torch.zeros_like

    def new_zeros(values: torch.Tensor, count: int) -> torch.Tensor:
        extras.append(count)
        assert 1 <= count <= values.numel()
        return take_extra(values, count)

    def zeros_like(values: torch.Tensor) -> torch.Tensor:
        temporaries.append(values.numel())
        return take_temporary(values)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    for _ in range(2):
        program.accumulate()
    assert len(extras) == 2 * phases
    assert len(temporaries) == 2 * phases * (SIZE.layers - 1)
    assert extras[:phases] != extras[phases:]


def test_disturbed_when_trained_then_the_numbers_are_those_of_an_undisturbed_one() -> None:
    programs = [make_program(name, QUICK.extent) for name in ("lengths", "disturbed")]
    for program in programs:
        for _ in range(2):
            program.step()
    assert programs[0].digest() == programs[1].digest()


def test_routed_when_trained_then_experts_get_other_tokens_in_each_step() -> None:
    torch.manual_seed(0)
    program = Routed(SIZE)
    layers = [each for each in program.model.modules() if isinstance(each, Experts)]
    counts: list[int] = []
    for layer in layers:
        for expert in layer.experts:
            expert.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    for _ in range(2):
        program.step()
    first, second = counts[: len(counts) // 2], counts[len(counts) // 2 :]
    tokens = SIZE.batch * SIZE.tokens
    assert sum(first) == sum(second) == CHOSEN * tokens * len(layers)
    assert sum(one != other for one, other in zip(first, second, strict=True)) > len(first) / 2
