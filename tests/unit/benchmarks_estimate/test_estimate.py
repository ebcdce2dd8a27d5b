"""The benchmark of estimates: its searches, its goals, and its programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import _estimate_training, estimate
from benchmarks._estimate_programs import PROGRAMS
from tests.support import installed

if TYPE_CHECKING:
    from pathlib import Path

NEEDED, SAMPLE = 10_000, 1_000  # bytes of the pretended program


@pytest.fixture
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(_name: str, batch: int, budget_bytes: int) -> bool:
        return NEEDED + batch * SAMPLE <= budget_bytes

    monkeypatch.setattr(estimate, "fits", fits)


@pytest.mark.usefixtures("_pretended")
@pytest.mark.parametrize("guess", [4_000, 14_900, 15_000, 15_100, 30_000])
def test_smallest_when_the_guess_is_anywhere_then_found(guess: int) -> None:
    found = estimate.find_smallest("any", 5, guess)
    assert 15_000 <= found <= 15_000 * (1 + 2 * estimate.TOLERANCE)


@pytest.mark.usefixtures("_pretended")
@pytest.mark.parametrize("guess", [0, 1, 6, 7, 8, 20])
def test_largest_when_the_guess_is_anywhere_then_found(guess: int) -> None:
    assert estimate.find_largest("any", 17_500, guess) == 7


@pytest.mark.usefixtures("_pretended")
def test_benchmark_when_run_then_flat_figures_and_missed_goals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    predicted: dict[str, Any] = {
        "smallest_budget_bytes": 19_000,
        "plain_bytes": 40_000,
        "budgets_0": 40_000,
        "largest_batches_0_batch_size": 31,
        "seconds": 1.0,
        "table": "as a table",
    }
    monkeypatch.setattr(estimate, "run", lambda *_: predicted)
    estimate.main(["--only", "mlp", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["mlp_largest_measured"] == 30
    assert figures["mlp_smallest_error"] == pytest.approx(19 / 18 - 1, abs=0.004)
    text = capsys.readouterr().out
    assert "as a table" in text
    assert "missed: mlp: smallest budget +5." in text
    assert "mlp: largest batch" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_when_trained_for_a_step_then_every_parameter_moves(name: str) -> None:
    if name == "transformers":
        pytest.importorskip("transformers")
    program = PROGRAMS[name]()
    before = [each.detach().clone() for each in program.model.parameters()]
    program.step(2)
    after = list(program.model.parameters())
    assert not any(map(torch.equal, before, after))


@pytest.mark.parametrize(("budget_bytes", "fits"), [(1 << 30, True), (1 << 16, False)])
def test_training_when_run_then_says_whether_it_fits(
    *,
    budget_bytes: int,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "train", "mlp", "1", str(budget_bytes), "2"])
    with installed():
        _estimate_training.main()
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is fits
