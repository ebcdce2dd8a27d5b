"""The disk below the host: the demo's model trains bit-equal over it, and survives its failures.

A failed step must leave the parameters as they were, bit for bit, and the next step must work as
soon as the disk does. Everything that the disk's file needs of the system can be made to fail.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
import stat
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

import swapkit
from examples.language_model import ModelSize, Training
from swapkit.errors import DiskError
from tests.support import MIB, installed, limit_above_reserved, start_python
from tests.support.instruments import disk_fault, instruments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.session.session import Session

    Errors = type[Exception] | tuple[type[Exception], ...]

SIZE = ModelSize(dim=64, layers=4, heads=2, hidden=176, tokens=128, batch=8, steps=2)
STEPS = 2
BUDGET = 12 * MIB  # a step takes 28 MiB
HOST_LIMIT = 3 * MIB
WRITES = instruments.SK_DISK_CALL_WRITE | instruments.SK_DISK_CALL_FLUSH
FULL_DISK = 6 * MIB

# Which of the two is a matter of who met the fault: a rescue, or who needed a tensor.
FAILURES = (DiskError, torch.OutOfMemoryError)


class Result(NamedTuple):
    """What training must come to, whatever the disk does."""

    losses: list[str]
    digest: str


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use no threads that spin while they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Result:  # noqa: ARG001
    """Train without a budget."""
    with installed():
        training = Training(SIZE, seed=0, recompute=False)
        return Result([training.step() for _ in range(STEPS)], training.digest())


@pytest.fixture
def installation() -> Iterator[Installation]:
    with installed() as installation:
        gc.collect()
        yield installation


@pytest.fixture
def training(installation: Installation) -> Training:
    assert installation is not None
    return Training(SIZE, seed=0, recompute=False)


@pytest.fixture
def budget(
    installation: Installation, training: Training, tmp_path: Path
) -> Callable[..., Session]:
    """Return what opens a session over a folder of the test's."""
    limit = limit_above_reserved(installation, BUDGET)
    options = {"disk": tmp_path, "host_limit": HOST_LIMIT}

    def opener(**others: object) -> Session:
        return swapkit.budget(limit, training.model, training.optimizer, **(options | others))  # type: ignore[arg-type]

    return opener


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """Let no file of the process grow beyond so many bytes; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of the test's own, too small for what a step writes."""
    mount = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "own"
    folder.mkdir()
    options = f"size={FULL_DISK}".encode()
    if mount.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, options) != 0:
        pytest.skip("mounting a file system is not permitted")
    try:
        yield folder
    finally:
        gc.collect()
        assert mount.umount2(bytes(folder), 2) == 0  # MNT_DETACH


def parameters(training: Training) -> list[torch.Tensor]:
    return [each.clone() for each in training.model.state_dict().values()]


def train_on(training: Training, plain: Result) -> None:
    """Train to the end; the numbers are those of plain training from the first step on."""
    losses = [training.step() for _ in range(training.steps_done, STEPS)]
    assert losses == plain.losses[STEPS - len(losses) :]
    assert training.digest() == plain.digest


def fail_step(training: Training, error: Errors, match: str) -> None:
    """Train a step that cannot work; afterwards the parameters are those of before it."""
    before = parameters(training)
    with pytest.raises(error, match=match):
        training.step()
    assert all(map(torch.equal, before, parameters(training)))
    training.optimizer.zero_grad(set_to_none=True)


# ---- what works ----------------------------------------------------------------------------------


@pytest.mark.promise("A3")
@pytest.mark.promise("C13")
def test_training_when_the_host_is_small_then_bit_equal_over_the_disk(
    training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget() as session:
        train_on(training, plain)
        moved = session._require().swapper.scheduler.stats()
    stats = session.stats
    assert 0 < stats.host_peak_bytes <= HOST_LIMIT
    assert stats.disk_peak_bytes > HOST_LIMIT
    assert stats.peak_bytes <= stats.budget_bytes
    assert moved.written_bytes > 0
    assert moved.read_bytes > 0


def test_offload_to_disk_when_in_such_a_session_then_goes_there_though_the_host_has_room(
    installation: Installation, training: Training, tmp_path: Path, plain: Result
) -> None:
    limit = limit_above_reserved(installation, 256 * MIB)
    session = swapkit.budget(
        limit, training.model, training.optimizer, disk=tmp_path, host_limit=256 * MIB
    )
    with session, swapkit.offload(to="disk"):
        train_on(training, plain)
    assert session.stats.oom_rescues == 0
    assert session.stats.disk_peak_bytes > HOST_LIMIT


def test_file_when_in_use_then_private_without_a_name_and_gone_with_the_session(
    training: Training, budget: Callable[..., Session], tmp_path: Path
) -> None:
    with budget(), open_files(tmp_path) as files:
        training.step()
        assert os.listdir(tmp_path) == []
        (descriptor,) = files()
        about = os.fstat(descriptor)
        assert stat.S_IMODE(about.st_mode) == 0o600
        assert about.st_nlink == 0
        assert about.st_blocks * 512 > HOST_LIMIT
    gc.collect()
    with open_files(tmp_path) as files:
        assert files() == []


@contextmanager
def open_files(folder: Path) -> Iterator[Callable[[], list[int]]]:
    """Find the descriptors of this process whose file is, or was, in a folder."""

    def find() -> list[int]:
        links = {
            entry: os.readlink(entry)
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink()
        }
        return [int(entry.name) for entry, to in links.items() if to.startswith(f"{folder}/")]

    yield find


def test_process_when_killed_then_leaves_no_file_and_no_space(own_disk: Path) -> None:
    before = os.statvfs(own_disk)
    process = start_python(
        f"""
        import time
        import torch, swapkit

        swapkit.install()
        session = swapkit.budget("1GiB", disk={str(own_disk)!r}, host_limit="4MiB")
        with session:
            with swapkit.offload(to="disk"):
                x = torch.ones(1 << 18, requires_grad=True)
                kept = [x.exp() for _ in range(6)]
            while session.stats.disk_peak_bytes < 4 << 20:
                time.sleep(0.01)
            print("written", flush=True)
            time.sleep(60)
        """
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    taken = os.statvfs(own_disk)
    process.kill()
    process.communicate()
    assert line == "written\n"
    assert (before.f_bfree - taken.f_bfree) * before.f_bsize >= 4 * MIB
    assert os.listdir(own_disk) == []
    assert os.statvfs(own_disk).f_bfree == before.f_bfree


# ---- a disk without room -------------------------------------------------------------------------


def test_step_when_the_disk_is_full_and_the_host_is_not_then_goes_on_from_memory(
    training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget(host_limit="1GiB", disk_limit=MIB) as session, swapkit.offload(to="disk"):
        train_on(training, plain)
    assert 0 < session.stats.disk_peak_bytes <= MIB
    assert session.stats.host_peak_bytes > HOST_LIMIT


def test_step_when_the_disk_and_the_host_are_full_then_fails_and_the_next_one_works(
    training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget(disk_limit=4 * MIB) as session:
        fail_step(training, torch.OutOfMemoryError, "raise host_limit")
        assert 0 < session.stats.disk_peak_bytes <= 4 * MIB
        assert session.stats.host_peak_bytes <= HOST_LIMIT
    with budget():
        train_on(training, plain)


def test_step_when_the_file_system_is_full_then_fails_and_the_next_one_works_elsewhere(
    training: Training, budget: Callable[..., Session], plain: Result, own_disk: Path
) -> None:
    with budget(disk=own_disk) as session:
        fail_step(training, torch.OutOfMemoryError, "raise host_limit")
        assert 0 < session.stats.disk_peak_bytes <= FULL_DISK
    with budget():
        train_on(training, plain)


def test_step_when_files_may_not_grow_then_fails_and_the_next_one_works_when_they_may(
    training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget() as session:
        with file_limit(4 * MIB):
            fail_step(training, torch.OutOfMemoryError, "raise host_limit")
        assert 0 < session.stats.disk_peak_bytes <= 4 * MIB
        train_on(training, plain)


# ---- a disk that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize(("nth", "error"), [(1, errno.EIO), (7, errno.ENOSPC)])
def test_step_when_one_write_fails_then_goes_on_from_memory(
    error: int, nth: int, training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget(host_limit=2 * HOST_LIMIT) as session:
        with disk_fault(WRITES, error, nth=nth):
            train_on(training, plain)
        assert session.stats.disk_peak_bytes > 0


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        (WRITES, errno.EIO),
        (instruments.SK_DISK_CALL_ALLOCATE, errno.ENOSPC),
    ],
    ids=["write", "allocate"],
)
def test_step_when_nothing_can_be_written_then_fails_and_works_when_the_disk_does(
    calls: int, error: int, training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget():
        with disk_fault(calls, error, forever=True):
            fail_step(training, FAILURES, "the budget is|Input/output error")
        train_on(training, plain)


def test_step_when_reads_fail_then_fails_and_the_next_one_works_when_the_disk_does(
    training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with budget():
        with disk_fault(instruments.SK_DISK_CALL_READ, errno.EIO, nth=5, forever=True):
            fail_step(training, FAILURES, "the budget is|Input/output error")
        train_on(training, plain)


@pytest.mark.parametrize("nth", [1, 5])
def test_step_when_one_read_fails_then_it_fails_or_is_exact(
    nth: int, training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    """A read ahead of its use that failed is tried again when its bytes are needed."""
    before = parameters(training)
    with budget():
        with disk_fault(instruments.SK_DISK_CALL_READ, errno.EIO, nth=nth):
            try:
                training.step()
            except FAILURES as error:
                assert re.search("the budget is|Input/output error", str(error))  # noqa: PT017
                assert all(map(torch.equal, before, parameters(training)))
                training.optimizer.zero_grad(set_to_none=True)
        train_on(training, plain)


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        (instruments.SK_DISK_CALL_DIRECT, errno.EINVAL),
        (instruments.SK_DISK_CALL_ALLOCATE, errno.EOPNOTSUPP),
    ],
    ids=["direct", "allocate"],
)
def test_training_when_the_file_system_lacks_something_then_goes_on_without(
    calls: int, error: int, training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    with disk_fault(calls, error, forever=True), budget() as session:
        train_on(training, plain)
    assert session.stats.disk_peak_bytes > HOST_LIMIT


def test_budget_when_no_file_can_be_made_then_disk_error_and_nothing_begun(
    training: Training, budget: Callable[..., Session], plain: Result
) -> None:
    enter = partial(disk_fault, instruments.SK_DISK_CALL_OPEN, errno.EROFS, forever=True)
    with enter(), pytest.raises(DiskError, match=r"cannot create a file .* choose another folder"):
        budget().__enter__()
    with budget():
        train_on(training, plain)
