"""Each page of docs/frameworks/ shows a whole program: it runs, and its budget holds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.integrations.support import PYTHON_BLOCK, needs, run_page
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGES = {
    "transformers": ["transformers"],
    "trl": ["transformers", "trl", "datasets"],
    "lightning": ["lightning"],
    "accelerate": ["accelerate"],
    "torchtitan": [],
    "loggers": ["tensorboard", "wandb"],
}
CHECK = """
stats = session.stats
assert not session.is_active
assert stats.steps == 12, stats.steps
assert 0 < stats.peak_bytes <= stats.budget_bytes, stats
assert stats.swapped_out_bytes + stats.recomputed_regions > 0, stats
"""


def find_versions(package: str) -> str:
    """Return the versions that the lists of `make integrations` pin, as pages write them."""
    texts = [(ROOT / f"tests/integrations/{name}.txt").read_text() for name in ("oldest", "newest")]
    found = [re.search(rf"^{re.escape(package)}==(.+)$", text, re.MULTILINE) for text in texts]
    return " and ".join(each[1] for each in found if each)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*packages)) for name, packages in PAGES.items()]
)
def test_page_when_its_program_runs_then_the_budget_holds(name: str, tmp_path: Path) -> None:
    run_page(name, tmp_path, CHECK)


@needs("accelerate")
def test_accelerate_when_it_launches_the_program_then_the_budget_holds(tmp_path: Path) -> None:
    launch = ("-m", "accelerate.commands.launch", "--num_processes=1", "--cpu", "--num_machines=1")
    run_page("accelerate", tmp_path, CHECK, *launch, "--mixed_precision=no", "--dynamo_backend=no")


@needs("ray")
def test_ray_when_its_worker_trains_then_the_budget_holds(tmp_path: Path) -> None:
    check = """
    metrics = result.metrics
    assert metrics["swapkit/steps"] == 12, metrics
    assert 0 < metrics["swapkit/peak_bytes"] <= metrics["swapkit/budget_bytes"] == 40 << 20
    assert metrics["swapkit/swapped_out_bytes"] + metrics["swapkit/recomputed_regions"] > 0
    """
    run_page("ray", tmp_path, "\n".join(line.strip() for line in check.splitlines()))


def test_pages_when_listed_then_each_is_run_by_a_test() -> None:
    pages = {file.stem for file in (ROOT / "docs/frameworks").glob("*.md")}
    assert pages == {*PAGES, "ray"}


@pytest.mark.parametrize(
    ("page", "package"),
    [
        ("transformers", "transformers"),
        ("trl", "trl"),
        ("lightning", "lightning"),
        ("accelerate", "accelerate"),
        ("ray", "ray[train]"),
        ("loggers", "tensorboard"),
        ("loggers", "wandb"),
    ],
)
def test_page_when_it_names_versions_then_those_that_are_tested(page: str, package: str) -> None:
    text = (ROOT / f"docs/frameworks/{page}.md").read_text(encoding="utf-8").replace("\n", " ")
    assert find_versions(package) in text


@pytest.mark.parametrize("page", [*PAGES, "ray"])
def test_page_when_read_then_one_program_and_a_title(page: str) -> None:
    text = (ROOT / f"docs/frameworks/{page}.md").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(PYTHON_BLOCK.findall(text)) == 1
