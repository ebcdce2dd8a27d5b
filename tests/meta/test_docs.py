"""The documents exist, are short, name no one's machine, and their code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.meta.sources import ROOT, list_sources
from tests.programs import ILLEGAL, PROGRAMS

if TYPE_CHECKING:
    from pathlib import Path

GUIDES = (
    "README.md",
    "docs/addresses.md",
    "docs/budgets.md",
    "docs/choices.md",
    "docs/cpu.md",
    "docs/estimate.md",
    "docs/explain.md",
    "docs/faq.md",
    "docs/host-and-disk.md",
    "docs/mindspeed.md",
    "docs/operators.md",
    "docs/optimizer-states.md",
    "docs/planning.md",
    "docs/policies.md",
    "docs/quick-start.md",
    "docs/ranks.md",
    "docs/report.md",
    "docs/saved-plans.md",
    "docs/sessions.md",
    "docs/traces.md",
)  # their Python runs
PAGES = tuple(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md")))
FRAMEWORKS = tuple(page for page in PAGES if page.startswith("docs/frameworks/"))
# Their Python needs the device, or runs in tests/integrations.
NOT_RUN = ("docs/cuda.md", "docs/npu.md", *FRAMEWORKS)
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES)
# Their first block shows a plan that its own steps have led to.
SETTLES = {
    (name, 0)
    for name in (
        "README.md",
        "docs/planning.md",
        "docs/policies.md",
        "docs/quick-start.md",
        "docs/sessions.md",
    )
}
README_LINES = 150
# Written in parts, so that this file does not name them either.
MACHINE_PATHS = tuple("/" + path for path in ("work/", "tmp/w", "root/", "home/", "opt/pypi"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def find_machine_paths(text: str) -> list[str]:
    return [path for path in MACHINE_PATHS if path in text]


def find_blocks(name: str) -> list[str]:
    return PYTHON_BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_when_read_then_exists_and_its_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# ")
    dead = [target for target in LINK.findall(text) if not (file.parent / target).exists()]
    assert not dead, f"{name} links to {dead}"


def test_readme_when_counted_then_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    assert lines <= README_LINES


def test_programs_when_counted_in_the_comparison_then_all() -> None:
    count = len([*PROGRAMS, *ILLEGAL])  # after a new one: run tests.conformance.rivals
    for name in "README.md", "docs/comparison.md":
        assert re.findall(r"(\d+) autograd\s+programs", (ROOT / name).read_text()) == [str(count)]


def test_guides_when_listed_then_every_page_that_shows_python_runs() -> None:
    showing = {name for name in ("README.md", *PAGES) if find_blocks(name)}
    assert showing == {*GUIDES, *NOT_RUN}


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in GUIDES for number in range(len(find_blocks(name)))],
)
def test_guide_when_a_block_of_python_is_run_alone_then_it_works(
    name: str, number: int, tmp_path: Path
) -> None:
    script = tmp_path / "guide.py"
    script.write_text(find_blocks(name)[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if (name, number) in SETTLES:
        assert re.search(r"plan settled at step \d+", done.stdout), done.stdout


def test_changelog_when_read_then_unreleased_is_on_top() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE)[0] == "[Unreleased]"


def test_sources_when_searched_then_name_no_machine() -> None:
    guilty = {
        path.relative_to(ROOT).as_posix(): found
        for path in list_sources()
        if path.suffix not in {".png", ".gz"}
        and (found := find_machine_paths(path.read_text(encoding="utf-8", errors="ignore")))
    }
    assert not guilty


def test_machine_paths_when_planted_then_found() -> None:
    for path in MACHINE_PATHS:
        assert find_machine_paths(f"see {path}x") == [path]
