"""The typed stub of the compiled core is what the header says, and mypy uses it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.meta.sources import NATIVE
from tools import generate_stub as generator

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

USE = """
from swapkit._native._lib import ffi, lib

out = ffi.new("sk_pool **")
stats = ffi.new("sk_pool_stats *")
status: int = lib.sk_pool_take(out[0], 512, ffi.NULL, out)
lib.sk_pool_stats_get(out[0], stats)
print(stats.allocation[0].current, lib.SK_OK)

@ffi.def_extern()
def sk_python_rescue(context: object, needed_bytes: int) -> int:
    return 0

lib.sk_pool_set_rescue(out[0], lib.sk_python_rescue, ffi.NULL)
lib.sk_pool_give(out[0], ffi.addressof(lib, "sk_pool_give"))
"""

MISUSE = """
lib.sk_pool_giv(out[0])
lib.sk_pool_give(out[0])
lib.sk_pool_set_budget(out[0], "1")
"""


def run_mypy(folder: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "/dev/null", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_stub_when_generated_then_equals_the_one_in_the_tree() -> None:
    text = (NATIVE / "_lib.pyi").read_text(encoding="utf-8")
    assert text == generator.generate_stub(), "run python -m tools.generate_stub"


def test_check_when_stub_is_stale_then_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "_lib.pyi"
    monkeypatch.setattr(generator, "STUB", stub)
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_stub"])
    assert generator.main() == 0
    monkeypatch.setattr(sys, "argv", ["generate_stub", "--check"])
    assert generator.main() == 0
    stub.write_text(stub.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert generator.main() == 1
    assert "stale" in capsys.readouterr().err


def test_mypy_when_calls_are_right_and_wrong_then_only_the_wrong_are_reported(
    tmp_path: Path,
) -> None:
    native = tmp_path / "swapkit/_native"
    native.mkdir(parents=True)
    for package in (native.parent, native):
        (package / "__init__.pyi").touch()
    (native / "_lib.pyi").write_text(generator.generate_stub(), encoding="utf-8")
    (tmp_path / "right.py").write_text(USE, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(USE + MISUSE, encoding="utf-8")
    report = run_mypy(tmp_path)
    for expected in (
        'has no attribute "sk_pool_giv"',
        "Too few arguments",
        '"str"; expected "int"',
    ):
        assert expected in report
    assert "right.py" not in report
    assert "Found 3 errors in 1 file" in report


def test_header_when_types_vary_then_each_has_its_python_type() -> None:
    header = generator.Header(
        """
        typedef enum color { RED = 1, BLUE } color;
        typedef struct box { int side; } box;
        typedef void (*call_fn)(void *);
        double f(const char *text, box value, call_fn call, color c, bool on, void *from);
        const char *g(void);
        box h(int self);
        const box *k(void);
        extern "Python" size_t back(void *context,
                                    size_t nbytes);
        """
    )
    assert list(header.constants()) == ["RED", "BLUE"]
    assert header.callbacks == {"back"}
    assert [header.signature(function).strip() for function in header.functions()][:4] == [
        "def f(self, text: bytes | CData, value: CData, call: CData, c: int, on: bool, "
        "from_: CData, /) -> float: ...",
        "def g(self, /) -> CData: ...",
        "def h(self, self_: int, /) -> Any: ...",
        "def k(self, /) -> Any: ...",
    ]
