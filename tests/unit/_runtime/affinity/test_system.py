"""The real machine: commands without a shell, files that may be missing, NVIDIA's library."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swapkit._runtime.affinity import system as module
from swapkit._runtime.affinity.places import list_nodes
from swapkit._runtime.affinity.system import CommandHung, CommandMissing, System

if TYPE_CHECKING:
    from collections.abc import Callable

FAKE_NVML = Path(__file__).parent / "fake_nvml.c"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a command `tool` of a script."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(script: str) -> None:
        file = tmp_path / "tool"
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)

    return write


@pytest.mark.promise("F12")
def test_command_when_it_is_not_installed_then_said_so() -> None:
    with pytest.raises(CommandMissing, match="no-such-tool is missing: install it"):
        System().run("no-such-tool", "info")


def test_command_when_run_then_no_shell_reads_its_arguments(tool: Callable[[str], None]) -> None:
    tool('echo "$1 $LC_ALL"')
    assert System().run("tool", "$(date); x") == "$(date); x C\n"


@pytest.mark.parametrize("script", ["echo half; exit 3", "kill -9 $$", "printf '\\377'; exit 1"])
def test_command_when_it_fails_then_nothing(tool: Callable[[str], None], script: str) -> None:
    tool(script)
    assert System().run("tool") == ""


def test_command_when_its_output_is_no_text_then_still_read(tool: Callable[[str], None]) -> None:
    tool("printf 'a\\377b'")
    assert System().run("tool") == "a\ufffdb"


def test_command_when_run_twice_then_only_the_first_time(
    tool: Callable[[str], None], tmp_path: Path
) -> None:
    tool(f'echo "$1" >>{tmp_path}/runs; cat {tmp_path}/runs')
    system = System()
    assert [system.run("tool", word) for word in "aab"] == ["a\n", "a\n", "a\nb\n"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a pipe; no command times out before it writes there."""

    def communicate(process: subprocess.Popen[bytes], timeout: float) -> tuple[bytes, bytes]:
        pipe.read_text(encoding="utf-8")
        return original(process, timeout=timeout)

    pipe = tmp_path / "started"
    os.mkfifo(pipe)
    original = subprocess.Popen.communicate
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    monkeypatch.setattr(module, "COMMAND_SECONDS", 0.2)
    return pipe


def is_running(file: Path) -> bool:
    """Return whether the process runs whose id a file holds; one that is not reaped does not."""
    stat = Path(f"/proc/{file.read_text(encoding='utf-8').strip()}/stat")
    with suppress(FileNotFoundError):
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_it_ends(file: Path) -> None:
    deadline = time.monotonic() + 60
    while is_running(file):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.promise("F12")
@pytest.mark.parametrize("last", ["exec sleep 600", "exit 0"])
def test_command_when_its_child_holds_the_output_open_then_both_are_ended(
    tool: Callable[[str], None], started: Path, tmp_path: Path, last: str
) -> None:
    ids = f"echo $$ >{tmp_path}/tool.id; sleep 600 & echo $! >{tmp_path}/child.id"
    tool(f"{ids}; echo >{started}; {last}")
    system = System()
    for _ in range(2):
        with pytest.raises(CommandHung, match=r"tool did not answer within 0\.2 seconds"):
            system.run("tool")
        (tmp_path / "tool").unlink(missing_ok=True)  # it is not run again
    for name in ("tool.id", "child.id"):
        wait_until_it_ends(tmp_path / name)


def test_command_when_interrupted_then_ended(
    tool: Callable[[str], None], tmp_path: Path, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_process: subprocess.Popen[bytes], **_options: object) -> None:
        started.read_text(encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    tool(f"echo $$ >{tmp_path}/tool.id; echo >{started}; exec sleep 600")
    with pytest.raises(KeyboardInterrupt):
        System().run("tool")
    wait_until_it_ends(tmp_path / "tool.id")


@pytest.mark.promise("F12")
def test_command_when_it_cannot_be_killed_then_left_behind_and_reaped_at_its_end(
    tool: Callable[[str], None], started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KILL_SECONDS", 0.1)
    tool(f"echo $$ >{tmp_path}/tool.id; echo >{started}; exec sleep 600")
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda _group, _signal: None)  # as in a call of a driver
        with pytest.raises(CommandHung):
            System().run("tool")
    gc.collect()  # a lost process would warn, and fail this test
    (reaper,) = set(threading.enumerate()) - before
    assert reaper.daemon
    number = int((tmp_path / "tool.id").read_text(encoding="utf-8"))
    os.killpg(number, signal.SIGKILL)
    reaper.join(60)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_file_when_missing_then_none(tmp_path: Path) -> None:
    assert System().read(str(tmp_path / "none")) is None
    assert System().read(str(tmp_path)) is None
    assert System().list(str(tmp_path / "none")) == []


def test_nodes_when_listed_here_then_they_hold_the_cpus_of_this_process() -> None:
    assert os.sched_getaffinity(0) <= frozenset().union(*list_nodes(System()).values())


def test_nvml_when_it_is_missing_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NVML", "libno-such-library.so.1")
    assert System().nvidia_cpus("0001:9d:02.0") == frozenset()


@pytest.mark.promise("D8")
def test_nvml_when_it_knows_the_gpu_then_its_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libfake.so"
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(FAKE_NVML), "-o", str(library)], check=True)
    monkeypatch.setattr(module, "NVML", str(library))
    system = System()
    assert system.nvidia_cpus("0001:9d:02.0") == {4, 5, 6, 7, 8191}
    assert system.nvidia_cpus("0000:9d:02.0") == frozenset()
    assert ctypes.CDLL(str(library)).fake_initialized() == 0
