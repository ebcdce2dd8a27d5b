"""The host memory that is available: the kernel's figure, and what control groups leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from swapkit._runtime.allocators.limits import host_available_bytes

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1024


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    write(folder, meminfo="MemTotal: 9000 kB\nMemAvailable:    5000 kB\nHugePages_Total: 0")
    write(folder / "self")
    return folder


def test_available_when_there_is_no_group_then_the_kernels_figure(
    proc: Path, tmp_path: Path
) -> None:
    assert host_available_bytes(proc, tmp_path / "none") == 5000 * KIB


class Version(NamedTuple):
    """Where a version of control groups keeps its numbers."""

    line: str
    folder: str
    limit: str
    usage: str
    files: str


FIRST = Version(
    line="5:memory:/a/b",
    folder="groups/memory",
    limit="memory__limit_in_bytes",
    usage="memory__usage_in_bytes",
    files="total_inactive_file",
)
SECOND = Version(
    line="0::/a/b",
    folder="groups",
    limit="memory__max",
    usage="memory__current",
    files="inactive_file",
)


@pytest.mark.parametrize("version", [FIRST, SECOND], ids=["first", "second"])
def test_available_when_a_parent_group_has_less_then_what_it_leaves_with_pages_of_files(
    proc: Path, tmp_path: Path, version: Version
) -> None:
    write(proc / "self", cgroup=f"3:cpu:/x\n{version.line}")
    top = tmp_path / version.folder
    write(top / "a" / "b", **{version.limit: "max", version.usage: "100"})
    stat = f"anon 7\n{version.files} 400"
    write(top / "a", **{version.limit: "3000", version.usage: "2500", "memory__stat": stat})
    assert host_available_bytes(proc, tmp_path / "groups") == 900
    write(top / "a" / "b", **{version.limit: "800", version.usage: "900"})
    assert host_available_bytes(proc, tmp_path / "groups") == 0


def test_available_when_asked_on_this_machine_then_some_of_its_memory() -> None:
    assert host_available_bytes() > 0
