"""What users install: a source distribution that builds, and a wheel that works, without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from typing import TYPE_CHECKING

import pytest
import yaml

import swapkit
from swapkit.cli.root import root
from tests.meta.sources import HEADER, NATIVE, ROOT, list_sources

if TYPE_CHECKING:
    from pathlib import Path

PROBE = """
import importlib.util, sys
import swapkit
from swapkit._native.lib import EXCEPTIONS
from swapkit._native._lib import lib
assert importlib.util.find_spec("torch") is None, "the probe must run without torch"
assert swapkit.__all__ and EXCEPTIONS and lib.SK_OK == 0
print(swapkit.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of the tree as it is, made from a copy of it."""
    tree = tmp_path_factory.mktemp("tree")
    for path in list_sources():
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", cwd=tree)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def build_log(sdist: Path) -> str:
    """What pip said while it built a wheel from the source distribution, in isolation."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir"]
    return run(*command, "-w", sdist.parent, sdist, cwd=sdist.parent)


@pytest.fixture(scope="module")
def wheel(sdist: Path, build_log: str) -> Path:
    assert "Successfully built swapkit" in build_log
    (wheel,) = sdist.parent.glob("swapkit-*.whl")
    return wheel


def test_sdist_when_unpacked_then_has_everything_to_build(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [path for path in NATIVE.rglob("*") if path.suffix in {".c", ".h", ".pyi"}]
    sources += [*(ROOT / "swapkit").rglob("*.py"), *(ROOT / "swapkit").rglob("*.cpp")]
    needed = {path.relative_to(ROOT).as_posix() for path in sources}
    needed |= {"build_native.py", "setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert not needed - names


def test_wheel_when_built_from_sdist_then_torch_is_not_fetched(build_log: str, wheel: Path) -> None:
    installed = {
        requirement.rpartition("-")[0]
        for line in re.findall(r"Successfully installed (.+)", build_log)
        for requirement in line.split()
    }
    assert {"setuptools", "cffi"} <= installed, "the build was not isolated"
    assert "torch" not in installed
    assert "-cp310-abi3-" in wheel.name


def test_wheel_when_opened_then_has_types_and_header_but_no_c_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA")))
    shim = {path.relative_to(ROOT).as_posix() for path in (ROOT / "swapkit").rglob("*.cpp")}
    stub = (NATIVE / "_lib.pyi").relative_to(ROOT).as_posix()
    header = HEADER.relative_to(ROOT).as_posix()
    alias = "swapkit/_native/libsmart_swap.so"
    assert {"swapkit/py.typed", stub, header, alias} | shim <= names
    assert not [name for name in names if name.endswith(".c") or "libswapkit_test" in name]
    headers = [name for name in names if name.startswith(header.rpartition("/")[0])]
    assert not [name for name in headers if "testing" in name or "instruments" in name]
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]
    assert b"License-Expression: Apache-2.0" in metadata
    assert b"Requires-Dist: torch" in metadata


def test_wheel_when_installed_without_torch_then_imports(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    run(*pip, "-c", ROOT / "constraints.txt", "cffi", cwd=tmp_path)
    run(*pip, "--no-deps", wheel, cwd=tmp_path)
    assert str(tmp_path / "venv") in run(python, "-c", PROBE, cwd=tmp_path)


def test_citation_when_read_then_it_is_of_this_version() -> None:
    document = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert document["version"] == swapkit.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(document)


INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}


def test_dockerfile_when_read_then_its_instructions_and_commands_exist() -> None:
    """Nobody builds the image here: each line is at least an instruction, each command ours."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    assert {line.partition(" ")[0] for line in whole} == INSTRUCTIONS
    stages = re.findall(r"^FROM \S+(?: AS (\w+))?$", "\n".join(whole), re.MULTILINE)
    assert set(re.findall(r"--from=(\w+)", text)) <= set(stages)
    commands = re.findall(r"swapkit\"?,? \"?(\w+)", "\n".join(whole))
    assert commands
    assert set(commands) <= set(root.commands)
    minor = re.findall(r"^FROM python:3\.(\d+)-", text, re.MULTILINE)
    assert len(set(minor)) == 1, "the virtual environment is of one Python"
