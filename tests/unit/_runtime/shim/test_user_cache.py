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
from typing import TYPE_CHECKING

import pytest

from swapkit._runtime.shim import build as cache
from swapkit._runtime.shim.build import (
    alone,
    cache_folder,
    find_cached,
    name_of,
    open_own,
    own_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable


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


@pytest.fixture
def belongs_to_another(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives a file or folder to another user, as far as `os.fstat` and `Path.lstat` can say."""
    given: set[tuple[int, int]] = set()

    def as_given(found: os.stat_result) -> os.stat_result | SimpleNamespace:
        if (found.st_dev, found.st_ino) not in given:
            return found
        return SimpleNamespace(st_mode=found.st_mode, st_uid=2**32 - 6)

    def give(path: Path) -> None:
        found = path.stat(follow_symlinks=False)
        given.add((found.st_dev, found.st_ino))

    fstat, lstat = os.fstat, Path.lstat
    monkeypatch.setattr(os, "fstat", lambda descriptor: as_given(fstat(descriptor)))
    monkeypatch.setattr(Path, "lstat", lambda path: as_given(lstat(path)))
    return give


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


@pytest.mark.parametrize("how", ["others may write", "another's link", "file", "another's"])
def test_cache_when_the_temporary_folder_is_not_the_users_alone_then_none(
    instead: Path,
    how: str,
    belongs_to_another: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = instead.parent / "real"
    real.mkdir(mode=0o700)
    (real / "planted").touch(0o600)
    if how == "another's link":
        instead.symlink_to(real)
        belongs_to_another(instead)
    elif how == "file":
        instead.touch(mode=0o600)
    else:
        real.rename(instead)
    if how == "others may write":
        instead.chmod(0o722)
    if how == "another's":
        belongs_to_another(instead)
    assert cache_folder() is None
    assert find_cached("planted") is None
    assert str(instead) in caplog.text


# ---- what other users can change -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("how", ["another's", "writable by the group", "writable by all", "link"])
def test_cache_when_another_user_can_change_it_then_not_used_and_the_warning_has_a_remedy(
    home: Path,
    what: str,
    how: str,
    belongs_to_another: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = cache_folder()
    assert folder is not None
    file = folder / "built"
    file.touch(0o600)
    assert find_cached("built") == file
    changed = folder if what == "folder" else file
    if how == "link":
        changed.rename(home / "moved")
        changed.symlink_to(home / "moved")
    if how.startswith("writable"):
        changed.chmod(0o720 if how.endswith("group") else 0o702)
    else:
        belongs_to_another(changed)
    assert find_cached("built") is None
    remedy = f"run `chmod go-w {changed}`" if how.startswith("writable") else "remove it"
    assert caplog.text.count(f"does not use {file}: {changed} ") == 1
    assert remedy in caplog.text
    if how == "another's":
        assert "belongs to uid 4294967290" in caplog.text
    elsewhere = home.parent / "temporary" / f"swapkit-{os.geteuid()}"
    assert cache_folder() == (elsewhere if what == "folder" else folder)


def test_cache_when_the_folder_is_this_users_own_link_then_followed(home: Path) -> None:
    (home / ".cache").mkdir(parents=True)
    (home / "scratch").mkdir(mode=0o700)
    (home / ".cache" / "swapkit").symlink_to(home / "scratch")
    assert cache_folder() == home / ".cache" / "swapkit"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o377])
def test_cache_when_made_then_its_modes_do_not_depend_on_the_umask(home: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = cache_folder()
        assert folder is not None
        with alone(folder, "lock", 60):
            pass
    finally:
        os.umask(before)
    made = (home, home / ".cache", folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700] * 3
    assert stat.S_IMODE((folder / "lock").stat().st_mode) & 0o177 == 0


@pytest.mark.parametrize("home_name", ["home", "relative"])
def test_cache_when_a_path_is_relative_then_ignored(
    home: Path, home_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", "work")
    if home_name == "relative":
        monkeypatch.setattr(Path, "home", lambda: Path("here"))
    found = cache_folder()
    expected = home / ".cache" / "swapkit"
    if home_name == "relative":
        expected = home.parent / "temporary" / f"swapkit-{os.geteuid()}"
    assert found == expected
    assert not (home.parent / "work").exists()
    assert not (home.parent / "here").exists()


def test_file_when_its_folder_is_replaced_while_it_is_open_then_the_opened_one_is_used(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    (folder / "file").write_text("own")
    (folder / "file").chmod(0o600)
    with own_folder(folder) as own:
        opened = open_own(own / "file")
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / "file").write_text("planted")
        assert (own / "file").read_text() == name_of(opened).read_text() == "own"
        os.close(opened)


def test_abandoned_when_a_killed_process_has_left_folders_then_removed_after_a_while(
    tmp_path: Path,
) -> None:
    for name, age_seconds in (("a-old", 2 * cache.ABANDONED_SECONDS), ("a-new", 0.0), ("b", 1e6)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "unit0.o").touch()
        os.utime(folder, (time.time() - age_seconds,) * 2)
    (tmp_path / "a-link").symlink_to(tmp_path / "b")
    cache.remove_abandoned(tmp_path, "a-*")
    assert {each.name for each in tmp_path.iterdir()} == {"a-new", "b", "a-link"}
    assert (tmp_path / "b" / "unit0.o").exists()


# ---- one process at a time -----------------------------------------------------------------------


def test_alone_when_the_lock_is_a_link_then_its_target_is_untouched_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache._warn_once.cache_clear()
    (tmp_path / "precious").write_text("content")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with alone(tmp_path, "lock", 60):
        pass
    assert (tmp_path / "precious").read_text() == "content"
    assert f"{tmp_path / 'lock'} is a link: remove it" in caplog.text


def test_alone_when_its_lock_file_has_content_then_kept(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("content")
    (tmp_path / "lock").chmod(0o600)
    with alone(tmp_path, "lock", 60):
        pass
    assert (tmp_path / "lock").read_text() == "content"


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
