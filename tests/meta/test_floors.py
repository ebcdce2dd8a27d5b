"""Imports and includes go only downwards."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.meta.sources import NATIVE, ROOT
from tools.check_includes import check_includes

LINT_IMPORTS = Path(sysconfig.get_path("scripts")) / "lint-imports"
DOWNWARDS = "Imports go only downwards"
FOLDERS = "Folders of the runtime import only downwards"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINT_IMPORTS), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def lint_with(folder: Path, module: str, line: str) -> subprocess.CompletedProcess[str]:
    """Lint a copy of the package with `line` at the end of one module."""
    shutil.copytree(ROOT / "swapkit", folder / "swapkit")
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "swapkit" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    return lint_imports(folder)


def test_imports_when_linted_then_no_floor_is_skipped_upwards() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("units.py", "import swapkit.api", DOWNWARDS),
        ("errors.py", "from swapkit._native import lib", DOWNWARDS),
        ("_native/lib.py", "import swapkit._runtime", DOWNWARDS),
        ("_runtime/saved/hooks.py", "from swapkit._runtime.session import life", FOLDERS),
        (
            "_runtime/saved/device.py",
            "if TYPE_CHECKING:\n    from swapkit._runtime.saved.swapper import Swapper",
            "No files import in a circle",
        ),
        ("reporting/stray.py", "from cffi import FFI", "Only swapkit._native.lib uses cffi"),
        ("_native/stray.py", "import _cffi_backend", "Only swapkit._native.lib uses cffi"),
        ("reporting/stray.py", "import torch", "Only the torch-bound packages use torch"),
    ],
)
def test_imports_when_one_breaks_a_floor_then_reported(
    tmp_path: Path, module: str, line: str, contract: str
) -> None:
    done = lint_with(tmp_path, module, line)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout, done.stdout + done.stderr


def test_imports_when_a_module_is_on_no_floor_then_reported(tmp_path: Path) -> None:
    done = lint_with(tmp_path, "stray.py", "import json")
    assert done.returncode == 1
    assert "stray" in done.stdout, done.stdout + done.stderr


def test_includes_when_checked_then_no_floor_is_skipped_upwards() -> None:
    assert check_includes(NATIVE) == []


@pytest.mark.parametrize(
    ("path", "line", "problem"),
    [
        ("src/base/a.c", '#include "pool/pool.h"', "base may include no other floor"),
        ("src/pool/a.c", '#include "backend/cpu.h"', "private to backend"),
        ("src/pool/a.c", '#include "entry/a.h"', "pool may include backend, base"),
        ("src/backend/a.h", '# include "pool/pool.h"', "backend may include base"),
        ("src/entry/a.c", '#include "pool/block.h"', "private to pool"),
        ("src/entry/a.c", '#include "../pool/pool.c"', "includes a source file"),
        ("src/base/a.c", '#include "none.h"', "not found"),
        ("src/base/a.c", "#include <Python.h>", "ties the core to other code"),
        ("src/stray.c", "", "in no floor"),
        ("src/pool/a.c", '#include "pool/block.h"', ""),
        ("src/entry/a.c", '#include "pool/pool.h"', ""),
        ("src/pool/a.c", '#include "swapkit.h"', ""),
        ("src/base/a.c", "#include <stdlib.h>", ""),
    ],
)
def test_includes_when_planted_then_judged(
    tmp_path: Path, path: str, line: str, problem: str
) -> None:
    headers = ["include/swapkit.h", "src/base/base.h", "src/backend/backend.h", "src/backend/cpu.h"]
    headers += ["src/pool/pool.h", "src/pool/block.h", "src/entry/a.h"]
    for name in [*headers, "src/pool/pool.c", path]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / path).write_text(line, encoding="utf-8")
    problems = check_includes(tmp_path)
    if problem:
        assert len(problems) == 1
        assert problem in problems[0]
    else:
        assert problems == []


def test_libraries_when_loaded_then_only_where_the_file_is_known_to_be_safe() -> None:
    """A file that others can write runs their code: `shim/build.py` is the way to it."""
    doors = {
        "_runtime/shim/library.py",  # through `open_own`
        "_native/hooks.py",  # of the package, like its modules
        "_runtime/affinity/system.py",  # by its name, from the system's folders
    }
    loads = re.compile(r"\b(CDLL|PyDLL|LoadLibrary|load_library|ExtensionFileLoader)\(")
    package = ROOT / "swapkit"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if loads.search(path.read_text(encoding="utf-8"))
    }
    assert found == doors
