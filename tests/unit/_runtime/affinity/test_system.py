"""The real machine: commands without a shell, files that may be missing, NVIDIA's library."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swapkit._runtime.affinity import system as module
from swapkit._runtime.affinity.places import list_nodes
from swapkit._runtime.affinity.system import CommandMissing, System

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
    with pytest.raises(CommandMissing, match="no-such-tool"):
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


def test_command_when_it_hangs_then_nothing(
    tool: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_SECONDS", 0.2)
    tool("exec sleep 60")
    assert System().run("tool") == ""


def test_file_when_missing_then_none(tmp_path: Path) -> None:
    assert System().read(str(tmp_path / "none")) is None
    assert System().read(str(tmp_path)) is None
    assert System().list(str(tmp_path / "none")) == []


def test_nodes_when_listed_here_then_they_hold_the_cpus_of_this_process() -> None:
    assert os.sched_getaffinity(0) <= frozenset().union(*list_nodes(System()).values())


def test_nvml_when_it_is_missing_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NVML", "libno-such-library.so.1")
    assert System().nvidia_address("12-34") is None
    assert System().nvidia_cpus("0001:9d:02.0") == frozenset()


@pytest.mark.promise("D8")
def test_nvml_when_it_knows_the_gpu_then_its_address_and_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libfake.so"
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(FAKE_NVML), "-o", str(library)], check=True)
    monkeypatch.setattr(module, "NVML", str(library))
    system = System()
    assert system.nvidia_address("12-34") == system.nvidia_address("GPU-12-34") == "0001:9d:02.0"
    assert system.nvidia_address("56") is None
    assert system.nvidia_cpus("0001:9d:02.0") == {4, 5, 6, 7, 8191}
    assert system.nvidia_cpus("0000:9d:02.0") == frozenset()
    assert ctypes.CDLL(str(library)).fake_initialized() == 0
