"""The shim is compiled once, named by what it depends on, and fails with a text that helps."""

from __future__ import annotations

import re
import stat
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from swapkit._runtime import shim
from swapkit.errors import NativeBuildError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "swapkit"


def refuse_to_compile(_library: Path) -> None:
    pytest.fail("the shim was compiled")


def test_name_when_asked_then_it_holds_torch_abi_and_a_digest() -> None:
    name = shim.shim_name()
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    python = re.escape(str(sys.implementation.cache_tag))
    expected = rf"shim-{python}-torch{re.escape(torch.__version__)}-abi{abi}-[0-9a-f]{{16}}\.so"
    assert re.fullmatch(expected, name)


def test_name_when_the_source_changes_then_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shim.shim_name()
    changed = tmp_path / "shim.cpp"
    changed.write_bytes(shim.SOURCES[0].read_bytes() + b"\n")
    monkeypatch.setattr(shim, "SOURCES", (changed, *shim.SOURCES[1:]))
    assert shim.shim_name() != before


def test_name_when_torch_changes_then_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shim.shim_name()
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    assert shim.shim_name() != before


def test_cache_when_made_then_only_the_user_may_enter(cache: Path) -> None:
    assert shim.cache_folder() == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_cache_when_no_variable_is_set_then_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert shim.cache_folder() == tmp_path / ".cache" / "swapkit"


def test_load_when_the_cache_cannot_be_written_then_compiled_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    loaded = shim.load_shim()
    assert hasattr(loaded._library, "swapkit_shim_install")
    assert list(temporary.iterdir()) == []
    assert "no cache for swapkit's compiled shim" in caplog.text
    assert str(blocked) in caplog.text


def test_cache_when_the_user_has_no_home_then_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert shim.cache_folder() is None
    assert "Could not determine home directory" in caplog.text


def test_load_when_nothing_is_cached_then_compiled_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shim.load_shim()
    assert [path.name for path in cache.iterdir()] == [shim.shim_name()]
    monkeypatch.setattr(shim, "_compile", refuse_to_compile)
    second = shim.load_shim()
    for loaded in (first, second):
        assert hasattr(loaded._library, "swapkit_shim_install")
        assert hasattr(loaded._library, "swapkit_shim_uninstall")


def test_load_when_there_is_no_compiler_then_the_error_says_how_to_get_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++ -pipe")
    with pytest.raises(NativeBuildError, match=r"'/nonexistent/c\+\+' was not found.*g\+\+.*CXX"):
        shim.load_shim()
    assert list(cache.iterdir()) == []


def test_load_when_the_compiler_fails_then_the_error_has_command_and_output(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("#error nothing works here\n")
    monkeypatch.setattr(shim, "SOURCES", (wrong,))
    with pytest.raises(NativeBuildError) as caught:
        shim.load_shim()
    text = str(caught.value)
    assert f"did not compile with torch {torch.__version__}" in text
    assert "$ c++ -std=c++20" in text
    assert "nothing works here" in text
    assert list(cache.iterdir()) == []


def test_load_when_the_compiler_variable_is_empty_then_the_default_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")
    wrong = cache.parent / "wrong.cpp"
    wrong.write_text("#error the default compiler ran\n")
    monkeypatch.setattr(shim, "SOURCES", (wrong,))
    with pytest.raises(NativeBuildError, match="the default compiler ran"):
        shim.load_shim()


def test_load_when_the_cached_file_is_broken_then_a_clear_error(cache: Path) -> None:
    cache.mkdir()
    (cache / shim.shim_name()).write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match=r"shim could not be loaded: .*shim-cpython"):
        shim.load_shim()
