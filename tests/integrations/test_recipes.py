"""The recipes train as they stand, within their budget, and estimate devices that are not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integrations.support import needs
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "examples" / "recipes"
FINETUNE = needs("transformers", "peft")
RECIPES = [  # with a budget below what the step takes
    pytest.param("finetune.py", [], "1.4MiB", marks=FINETUNE, id="full"),
    pytest.param("finetune.py", ["--method", "lora"], "1.6MiB", marks=FINETUNE, id="lora"),
    pytest.param("vision.py", [], "2.4MiB", marks=needs("transformers"), id="vision"),
    pytest.param("diffusion.py", [], "12MiB", marks=needs("diffusers"), id="diffusion"),
]
LOSS = re.compile(r"^step \d+: loss ([\d.]+)$", re.MULTILINE)
ENDED = re.compile(r"peak ([\d.]+) MiB of ([\d.]+) MiB")


def run(*command: str | Path) -> str:
    """Return what a recipe prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("script", "options", "budget"), RECIPES)
def test_recipe_when_it_is_tiny_then_it_trains_to_the_same_losses_within_a_smaller_budget(
    script: str, options: list[str], budget: str
) -> None:
    free, tight = (
        run(FOLDER / script, "--tiny", *options, "--budget", each) for each in ("512MiB", budget)
    )
    losses = LOSS.findall(free)
    assert (len(losses), len(set(losses)) > 4) == (6, True)
    assert LOSS.findall(tight) == losses
    (plain, _), (peak, limit) = (
        map(float, found) for said in (free, tight) for found in ENDED.findall(said)
    )
    assert peak <= limit < plain


@pytest.mark.parametrize(("script", "options", "budget"), RECIPES)
@pytest.mark.parametrize("device", ["4090"])
def test_recipe_when_it_estimates_then_nothing_trains_and_steps_have_times(
    script: str, options: list[str], budget: str, device: str
) -> None:
    del budget
    said = run(FOLDER / script, "--tiny", *options, "--estimate", device)
    assert "step 0" not in said
    assert re.search(r"^budget +of plain +step ", said, re.MULTILINE)
    assert "With 22.56 GiB nothing moves." in said


@FINETUNE
def test_sharded_recipe_when_on_two_ranks_then_it_trains_to_the_same_losses_within_a_budget() -> (
    None
):
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    alone, free, tight = (
        run(*ranks, count, FOLDER / "fsdp.py", "--tiny", "--budget", budget)
        for count, budget in (("1", "512MiB"), ("2", "512MiB"), ("2", "1.2MiB"))
    )
    losses, losses_alone = LOSS.findall(free), LOSS.findall(alone)
    assert (len(losses), len(set(losses)) > 4) == (6, True)
    assert losses_alone[0] == losses[0]
    assert losses_alone[1:] != losses[1:], "each rank has samples of its own"
    assert LOSS.findall(tight) == losses
    ((peak, limit),) = (map(float, found) for found in ENDED.findall(tight))
    assert peak <= limit


@FINETUNE
def test_sharded_recipe_when_it_estimates_then_more_ranks_need_less_memory() -> None:
    script = FOLDER / "fsdp.py"
    weights = []
    for ranks in ("2", "8"):
        said = run(script, "--tiny", "--ranks", ranks, "--estimate", "4090")
        assert "With 22.56 GiB nothing moves." in said
        (found,) = re.findall(r"optimizer states +([\d.]+) KiB", said)
        weights.append(float(found))
    assert weights[1] < weights[0] / 3


@FINETUNE
def test_sharded_recipe_when_embedding_and_output_share_a_weight_then_they_still_do() -> None:
    said = run(FOLDER / "fsdp.py", "--size", "1b", "--tokens", "64", "--estimate", "4090")
    (found,) = re.findall(r"gradients +([\d.]+) MiB", said)
    weights = 1_235_814_400  # of Llama 3.2 1B, in 2 bytes on 8 ranks
    assert float(found) == pytest.approx(weights * 2 / 8 / 2**20, abs=0.01)


def test_plain_script_when_run_within_a_budget_then_its_losses_are_the_same() -> None:
    script = FOLDER / "train_gpt.py"
    plain = run(script, "--steps", "5")  # takes 262 MiB
    assert len(LOSS.findall(plain)) == 5
    command = ("-m", "swapkit", "run", "--budget", "150MiB", "--device", "cpu")
    assert run(*command, script, "--steps", "5") == plain


@FINETUNE
def test_table_of_recipes_when_made_then_it_has_the_figures_of_each_row(tmp_path: Path) -> None:
    only = "--size 1b --tokens 4096 --rows 4"
    file = tmp_path / "figures.json"
    said = run("-m", "benchmarks.recipes", "--only", only, "--json", file)
    figures = json.loads(file.read_text())
    (plain,) = [value for name, value in figures.items() if name.endswith(": plain_bytes")]
    (smallest,) = [value for name, value in figures.items() if name.endswith(": smallest_bytes")]
    assert smallest < plain
    assert only in said
    assert figures["8b_8k: measured_ms"] == pytest.approx(154.6, abs=0.1)
    for shape in ("8b_8k", "1b_4k"):
        ratio = figures[f"{shape}: estimated_ms"] / figures[f"{shape}: measured_ms"]
        assert 0.8 < ratio < 1.25, "what the page says of such times"
