"""The shim is compiled once, by one process, and named by what it depends on."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit import cli as command_line
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.shim import build as shim_build
from swapkit._runtime.shim import library as shim
from swapkit._runtime.shim.build import find_cached
from swapkit.errors import NativeBuildError
from tests.support import ROOT, cache_in, finish_python, run_python, start_python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EMPTY = 'extern "C" int number() { return 1; }\n'  # compiles in a moment


@pytest.fixture
def usual() -> Path:
    """The shim of this process, in the usual cache."""
    get_runtime()
    library = find_cached(shim_build.shim_name())
    assert library is not None
    return library


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Sources in place of the shim's, by their texts."""

    def replace(*texts: str) -> list[Path]:
        files = [tmp_path / f"source{number}.cpp" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        monkeypatch.setattr(shim_build, "SOURCES", tuple(files))
        return files

    return replace


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that only writes down its command lines."""
    commands: list[str] = []

    def compile_shim(folder: Path, *, often: str = "once") -> Path:
        library = folder / shim_build.shim_name()
        library.write_text(f"library {len(commands)}")
        commands.append(often)
        return library

    monkeypatch.setattr(shim_build, "compile_shim", compile_shim)
    return commands


# ---- the name ------------------------------------------------------------------------------------


def test_name_when_asked_then_it_holds_torch_abi_and_a_digest() -> None:
    name = shim_build.shim_name()
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    python = re.escape(str(sys.implementation.cache_tag))
    expected = rf"shim-{python}-torch{re.escape(torch.__version__)}-abi{abi}-[0-9a-f]{{16}}\.so"
    assert re.fullmatch(expected, name)


@pytest.mark.parametrize("what", ["source", "torch", "options", "assertions"])
def test_name_when_what_it_depends_on_changes_then_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("SWAPKIT_DEBUG", "0")
    before = shim_build.shim_name()
    changed = tmp_path / "shim.cpp"
    changed.write_bytes(shim_build.SOURCES[0].read_bytes() + b"\n")
    if what == "source":
        monkeypatch.setattr(shim_build, "SOURCES", (changed, *shim_build.SOURCES[1:]))
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0.0")
    elif what == "options":
        monkeypatch.setattr(shim_build, "OPTIONS", (*shim_build.OPTIONS, "-O3"))
    else:
        monkeypatch.setenv("SWAPKIT_DEBUG", "1")
    assert shim_build.shim_name() != before


# ---- compiling -----------------------------------------------------------------------------------


def test_compile_when_sources_need_atens_headers_then_two_units_at_the_same_time(
    sources: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = "#include <ATen/Tensor.h>\n"
    aten, core, more = sources(heavy, "", heavy)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2})
    assert shim_build._units() == [(aten, more), (core,)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0})
    assert shim_build._units() == [(aten, core, more)]
    sources("", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    assert len(shim_build._units()) == 1


def test_compile_when_done_then_one_library_of_all_units_and_a_line_that_says_so(
    user_cache: Path, sources: Callable[..., list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    sources('extern "C" int one() { return 1; }', 'extern "C" int two() { return 2; }')
    built = shim_build.build_shim()
    content = built.library.read_bytes()
    assert b"one" in content
    assert b"two" in content
    assert built.seconds is not None
    assert built.library == user_cache / shim_build.shim_name()
    assert {path.name for path in user_cache.iterdir()} == {shim_build.LOCK, built.library.name}
    assert {stat.S_IMODE(path.stat().st_mode) for path in user_cache.iterdir()} == {0o600}
    assert caplog.messages == [
        f"swapkit: compiling its allocator for torch {torch.__version__}, once: 20 to 90 s"
    ]


def test_compile_when_there_is_no_compiler_then_the_error_says_how_to_get_one(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++ -pipe")
    with pytest.raises(NativeBuildError, match=r"'/nonexistent/c\+\+' was not found.*g\+\+.*CXX"):
        shim.load_shim()
    assert [path.name for path in user_cache.iterdir()] == [shim_build.LOCK]


@pytest.mark.parametrize("command", [" ", "'", "g++ 'a"])
def test_compile_when_cxx_is_no_command_then_the_error_says_what_to_set(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(NativeBuildError, match=r"^CXX=.* is not a command: .*g\+\+.*unset"):
        shim_build.find_compiler()


def test_compile_when_cxx_is_a_relative_path_then_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiler").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./compiler -pipe")
    assert shim_build.find_compiler() == [str(tmp_path / "compiler"), "-pipe"]


def test_compile_when_units_fail_then_the_error_has_each_command_and_its_output(
    user_cache: Path, sources: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")  # as if it were not set
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    sources("#if 0\n#include <ATen/no.h>\n#endif\n#error the heavy one\n", "#error the light one\n")
    with pytest.raises(NativeBuildError) as caught:
        shim.load_shim()
    text = str(caught.value)
    assert f"did not compile with torch {torch.__version__}" in text
    assert text.count("$ c++ -std=c++20") == 2
    assert "the heavy one" in text
    assert "the light one" in text
    assert [path.name for path in user_cache.iterdir()] == [shim_build.LOCK]


# ---- once ----------------------------------------------------------------------------------------


def test_build_when_it_is_in_the_cache_then_not_compiled_unless_forced(
    user_cache: Path, compiled: list[str], sources: Callable[..., list[Path]]
) -> None:
    sources(EMPTY)
    assert shim_build.build_shim().seconds is not None
    assert shim_build.build_shim() == (user_cache / shim_build.shim_name(), None)
    assert shim_build.build_shim(force=True).seconds is not None
    assert len(compiled) == 2


def test_build_when_another_process_compiles_then_its_library_is_awaited(
    user_cache: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    user_cache.mkdir()
    library = user_cache / shim_build.shim_name()
    with (user_cache / shim_build.LOCK).open("w") as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)

        def end_other(_seconds: float) -> None:
            library.touch()
            fcntl.flock(other_process, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", end_other)
        assert shim_build.build_shim() == (library, None)
    assert compiled == []
    assert caplog.messages == ["swapkit: waiting for another process that compiles its allocator"]


def test_build_when_all_ranks_of_a_machine_need_it_at_once_then_one_of_them_compiles(
    user_cache: Path,
    tmp_path: Path,
    sources: Callable[..., list[Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources(EMPTY)
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$$" >> {calls}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # a compiler does not run under sanitisers
    monkeypatch.setattr(shim_build, "LIBRARIES", ())
    held, start = os.pipe()
    ranks = []
    for _ in range(4):
        rank = os.fork()
        if rank == 0:
            os.close(start)
            os.read(held, 1)  # until the parent closes its end
            try:
                os._exit(0 if shim_build.build_shim().library.exists() else 1)
            finally:
                os._exit(2)
        ranks.append(rank)
    os.close(start)
    os.close(held)
    assert [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks] == [0] * 4
    assert len(calls.read_text().splitlines()) == 2  # to compile the only source, and to link
    assert (user_cache / shim_build.shim_name()).exists()


def test_build_when_nothing_can_be_kept_then_refused_and_loading_compiles_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    planted = temporary / f"swapkit-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(NativeBuildError, match="XDG_CACHE_HOME"):
        shim_build.build_shim()
    loaded: list[str] = []
    monkeypatch.setattr(shim, "Shim", lambda library: loaded.append(library.read_text()))
    shim.load_shim()
    assert loaded == ["library 0"]
    assert compiled == [""]
    assert list(temporary.iterdir()) == [planted]
    assert list(planted.iterdir()) == []


# ---- loading -------------------------------------------------------------------------------------


def test_load_when_it_is_in_the_cache_then_no_compiler_is_needed(
    usual: Path, user_cache: Path
) -> None:
    user_cache.mkdir()
    shutil.copy(usual, user_cache)
    # A process of its own: each loaded library holds 32 locks over a fork, and the thread sanitiser
    # bears 63.
    run_python(
        """
        from swapkit._runtime.shim import library

        loaded = library.load_shim()
        assert hasattr(loaded._library, "swapkit_shim_install")
        assert hasattr(loaded._library, "swapkit_shim_uninstall")
        """,
        CXX="/nonexistent/c++",
    )


def test_load_when_another_user_could_have_planted_it_then_compiled_anew(
    user_cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache.mkdir(mode=0o700)
    planted = user_cache / shim_build.shim_name()
    planted.write_text("planted")
    planted.chmod(0o722)
    loaded: list[str] = []
    monkeypatch.setattr(shim, "Shim", lambda library: loaded.append(library.read_text()))
    shim.load_shim()
    assert loaded == ["library 0"]
    assert len(compiled) == 1
    planted.chmod(0o722)  # between the search and the load
    monkeypatch.undo()
    with pytest.raises(NativeBuildError, match=r"can be written by other users"):
        shim.Shim(planted)


def test_load_when_the_cached_file_is_broken_then_the_error_says_what_to_do(
    user_cache: Path,
) -> None:
    user_cache.mkdir()
    (user_cache / shim_build.shim_name()).write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match=r"(?s)shim could not be loaded: .*build --force"):
        shim.load_shim()


# ---- swapkit build -----------------------------------------------------------------------------


@pytest.mark.usefixtures("usual")
def test_wheel_when_installed_then_a_machine_without_a_compiler_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, site, cache = (tmp_path / name for name in ("wheels", "site", "cache"))
    cache.mkdir()
    monkeypatch.setattr(shim, "Shim", lambda _library: None)  # this process has loaded it
    assert command_line.main(["build", "--wheel", str(wheels)]) == 0
    (wheel,) = wheels.iterdir()
    assert capsys.readouterr().out.splitlines()[1:] == [str(wheel)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    variables = {
        "CXX": "/nonexistent",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{site}",
        "SITE": str(site),
    }
    # An installation for a group of users: as safe as the other packages there.
    for library in site.glob("*/*.so"):
        library.chmod(0o664)
    code = """
        import importlib.metadata, os, pathlib, swapkit, torch
        from swapkit._runtime.shim import build
        from swapkit.errors import NativeBuildError
        try:
            swapkit.install()  # not from any folder of the path
        except NativeBuildError:
            build.PACKAGED = (pathlib.Path(os.environ["SITE"], build.PACKAGE),)
            swapkit.install()
        else:
            raise AssertionError("a folder of the path has served the shim")
        torch.ones(1 << 20)
        print(swapkit.memory_stats()["allocated_bytes.all.peak"] > 1 << 20)
        needs = importlib.metadata.requires("swapkit-shim")
        release = torch.__version__.partition("+")[0]
        print(needs == [f"swapkit=={swapkit.__version__}", f"torch=={release}"])
    """
    assert finish_python(start_python(code, **variables, **cache_in(cache))) == "True\nTrue\n"
    for file in importlib.metadata.Distribution.at(next(site.glob("*.dist-info"))).files or ():
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, (site / file).read_bytes()).digest()
            assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value


@pytest.mark.usefixtures("compiled")
def test_command_when_run_then_prints_where_and_whether_it_compiled(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shim, "Shim", lambda _library: None)
    for options, how in (
        ([], r"compiled in \d+\.\d s"),
        ([], "already compiled"),
        (["--force"], "comp"),
    ):
        assert command_line.main(["build", *options]) == 0
        said = capsys.readouterr().out
        assert re.match(rf"{re.escape(str(user_cache / shim_build.shim_name()))}: {how}", said)


@pytest.mark.parametrize("why", ["it does not compile", "it cannot be loaded"])
def test_command_when_it_fails_then_status_1_and_the_reason(
    user_cache: Path,
    sources: Callable[..., list[Path]],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources("#error nothing works here\n" if why == "it does not compile" else EMPTY)
    assert command_line.main(["build"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    reason = "nothing works here" if why == "it does not compile" else "could not be loaded"
    assert reason in said.err
    assert user_cache.is_dir()
