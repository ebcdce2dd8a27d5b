"""The cache is the user's own; where a home cannot be written, a private folder takes its place."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from swapkit._runtime.shim import user_cache as cache
from swapkit._runtime.shim.user_cache import alone, cache_folder, find_cached


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, and a temporary directory beside it."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache._warn_once.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def instead(home: Path) -> Path:
    """The folder in place of a home that cannot be written, which it is from now on."""
    home.write_text("not a folder")
    return home.parent / "temporary" / f"swapkit-{os.geteuid()}"


def test_cache_when_made_then_below_home_and_only_the_user_may_enter(home: Path) -> None:
    assert cache_folder() == home / ".cache" / "swapkit"
    assert stat.S_IMODE((home / ".cache" / "swapkit").stat().st_mode) == 0o700


def test_cache_when_a_variable_names_it_then_there(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent / "other"))
    assert cache_folder() == home.parent / "other" / "swapkit"


def test_cache_when_home_cannot_be_written_then_a_private_folder_and_one_warning(
    instead: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache_folder() == cache_folder() == instead
    assert stat.S_IMODE(instead.stat().st_mode) == 0o700
    (said,) = caplog.messages
    assert str(instead) in said
    assert "Not a directory" in said


def test_cache_when_it_may_only_be_read_then_its_files_are_found_and_new_ones_go_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / ".cache" / "swapkit"
    folder.mkdir(parents=True)
    (folder / "built").touch()
    allowed = os.access

    def access(path: Path, mode: int) -> bool:  # as of a file system that is read-only
        return allowed(path, mode) and not (path.is_relative_to(home) and mode & os.W_OK)

    monkeypatch.setattr(os, "access", access)
    elsewhere = cache_folder()
    assert elsewhere is not None
    assert elsewhere.name == f"swapkit-{os.geteuid()}"
    (elsewhere / "built").touch()
    (elsewhere / "new").touch()
    assert find_cached("built") == folder / "built"
    assert find_cached("new") == elsewhere / "new"
    assert find_cached("none") is None


def test_cache_when_the_user_has_no_home_then_a_private_folder(
    instead: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert find_cached("any") is None
    assert cache_folder() == instead
    assert "Could not determine home directory" in caplog.text


@pytest.mark.parametrize("how", ["others may write", "link", "file", "another's"])
def test_cache_when_the_temporary_folder_is_not_the_users_alone_then_none(
    instead: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = instead.parent / "real"
    real.mkdir(mode=0o700)
    (real / "planted").touch()
    if how == "link":
        instead.symlink_to(real)
    elif how == "file":
        instead.touch(mode=0o600)
    else:
        real.rename(instead)
    if how == "others may write":
        instead.chmod(0o722)
    if how == "another's":
        found = instead.lstat()
        as_another = SimpleNamespace(st_mode=found.st_mode, st_uid=found.st_uid + 1)
        monkeypatch.setattr(Path, "lstat", lambda _path: as_another)
    assert cache_folder() is None
    assert find_cached("planted") is None
    assert "is not private to this user" in caplog.text


def test_alone_when_another_process_is_at_it_then_awaited_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with (tmp_path / "lock").open("w") as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)

        def sleep(_seconds: float) -> None:
            seen.append("slept")
            if seen.count("slept") == 3:
                fcntl.flock(other_process, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", sleep)
        with (
            alone(tmp_path, "lock", 60, lambda: seen.append("said")),
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(other_process, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other_process, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back
    assert seen == ["said", "slept", "slept", "slept"]


def test_alone_when_the_other_process_does_not_end_then_not_for_ever(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)
        with alone(tmp_path, "lock", 0.01):
            pass


@pytest.mark.parametrize("folder", ["none", "not there", "without locks"])
def test_alone_when_there_can_be_no_lock_then_nobody_is_waited_for(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if folder == "without locks":
        monkeypatch.setattr(fcntl, "flock", fail)
    where = {"none": None, "not there": tmp_path / "not there"}.get(folder, tmp_path)
    with alone(where, "lock", 60):
        pass
