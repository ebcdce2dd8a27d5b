"""A package without its compiled core says where it is, and what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from swapkit._native import lib
from swapkit._native.lib import explain_missing
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ERROR = ImportError("No module named 'swapkit._native._lib'")


def test_import_when_a_checkout_has_no_core_then_it_says_so(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "src")
    shutil.copytree(ROOT / "swapkit", tmp_path / "swapkit", ignore=ignored)
    shutil.copy(ROOT / "build_native.py", tmp_path)
    code = "import swapkit._native.lib"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.startswith("swapkit.errors.NativeBuildError: swapkit's compiled core could not be")
    assert (
        f"Python imported swapkit from a checkout, {tmp_path}, which has no compiled core" in last
    )
    assert "`make setup`" in last


@pytest.mark.parametrize(
    ("is_checkout", "installed", "texts"),
    [
        (
            True,
            "/site",
            ["an installed swapkit with a core is in /site", "Start Python in another folder"],
        ),
        (True, None, ["run `make setup`", "`pip install .` installs a copy elsewhere"]),
        (False, None, ["run `pip install --force-reinstall swapkit`"]),
    ],
)
def test_text_when_the_core_is_missing_then_it_names_what_to_do(
    is_checkout: bool,
    installed: str | None,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lib, "_find_installed", lambda: installed)
    if is_checkout:
        (tmp_path / "build_native.py").touch()
    text = explain_missing(tmp_path, ERROR)
    assert "No module named 'swapkit._native._lib'" in text
    for part in texts:
        assert part in text
