"""The tutorials run, each as a program of its own; what they claim, they assert themselves."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.meta.sources import ROOT
from tools.docs_site import TUTORIALS

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "tutorials"
# Packages that only some users have, by the tutorial that needs them.
OPTIONAL = {
    "fine_tuning_with_transformers": ("transformers", "accelerate"),
    "training_with_lightning": ("lightning",),
}


def missing_packages(name: str) -> list[str]:
    return [each for each in OPTIONAL.get(name, ()) if importlib.util.find_spec(each) is None]


def test_tutorials_when_listed_then_all_have_a_place_in_the_order() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(TUTORIALS)


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_when_run_then_it_ends_well(name: str, tmp_path: Path) -> None:
    missing = missing_packages(name)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout, "a tutorial shows what it does"


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_when_read_then_it_has_a_title_prose_and_claims(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    title, line = text.splitlines()[1:3]
    assert set(line) == {"="}
    assert len(line) == len(title)
    assert text.count("# %%") >= 2
    assert "assert " in text, "a tutorial checks what it says"
