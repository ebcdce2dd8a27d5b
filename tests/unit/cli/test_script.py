"""A program runs as `python script.py` and `python -m` run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from swapkit.cli.script import Script
from swapkit.errors import InvalidArgument


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a program changes in its process."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["replaced", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def run(name: Path | str, *arguments: str, is_module: bool = False) -> int:
    return Script(name=str(name), is_module=is_module, arguments=arguments).run()


FACTS = """
    import pickle, sys

    class Mine:
        pass

    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    assert sys.modules["__main__"].Mine is Mine
    print(__name__, __package__, __spec__ and __spec__.name)
    print(__file__)
    print(sys.argv)
    print(sys.path[0])
"""


def test_script_when_run_then_it_finds_what_python_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "train.py", FACTS)
    monkeypatch.chdir(tmp_path)
    assert run("train.py", "--lr", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        "__main__ None None",
        str(file),
        "['train.py', '--lr', '1']",
        str(tmp_path),
    ]


@pytest.mark.parametrize("is_archive", [False, True])
def test_folder_when_run_then_it_finds_what_python_gives_it(
    is_archive: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "folder" / "__main__.py", FACTS)
    name = "folder"
    if is_archive:
        name = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "folder")).name
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, name, "--lr", "1"]
    python = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run(name, "--lr", "1") == 0
    assert capsys.readouterr().out == python.stdout


@pytest.mark.parametrize(("name", "file"), [("pack.train", "train.py"), ("pack", "__main__.py")])
def test_module_when_run_then_it_finds_what_python_gives_it(
    name: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "pack" / "__init__.py", "")
    path = write(tmp_path / "pack" / file, FACTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pack", raising=False)
    assert run(name, "--lr", "1", is_module=True) == 0
    module = "pack.train" if name == "pack.train" else "pack.__main__"
    assert capsys.readouterr().out.splitlines() == [
        f"__main__ pack {module}",
        str(path),
        f"['{path}', '--lr', '1']",
        str(tmp_path),
    ]
    del sys.modules["pack"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ],
)
def test_script_when_it_ends_then_its_exit_code_is_kept(
    text: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write(tmp_path / "ends.py", text)) == code
    assert capsys.readouterr().err.endswith(said)


def test_script_when_it_raises_then_status_1_and_a_traceback_of_its_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *each: shown.append(each))
    file = write(tmp_path / "fails.py", "def f():\n    raise ValueError('mine')\nf()\n")
    assert run(file) == 1
    ((kind, error, traceback),) = shown
    assert (kind, str(error)) == (ValueError, "mine")
    names = []
    while traceback is not None:
        names.append((traceback.tb_frame.f_code.co_filename, traceback.tb_frame.f_code.co_name))
        traceback = traceback.tb_next
    assert names == [(str(file), "<module>"), (str(file), "f")]


def test_script_when_it_is_no_python_then_status_1_without_our_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write(tmp_path / "broken.py", "x ===\n")) == 1
    said = capsys.readouterr().err
    assert "SyntaxError" in said
    assert "swapkit" not in said.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("name", "is_module", "reason"),
    [
        ("none.py", False, "'none.py' is neither a file nor a folder"),
        ("no_such_module", True, "no module named 'no_such_module'"),
        ("swapkit.no_such", True, "no module named 'swapkit.no_such'"),
    ],
)
def test_program_when_there_is_none_then_refused(name: str, is_module: bool, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        run(name, is_module=is_module)


def test_program_when_it_raises_the_same_error_then_it_is_the_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from swapkit.errors import InvalidArgument\nraise InvalidArgument('mine')\n"
    assert run(write(tmp_path / "own.py", text)) == 1
    assert "InvalidArgument: mine" in capsys.readouterr().err
