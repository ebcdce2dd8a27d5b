"""Weights that leave go on to the disk where the host has no room: same bits, nothing lost."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit.errors import DiskError
from tests.integration.test_weights import WIDTH, bits_of, frozen_bytes, make, train
from tests.support import MIB
from tests.support.instruments import disk_fault, instruments

if TYPE_CHECKING:
    from torch import nn

    from swapkit._runtime.session.session import Session

pytestmark = pytest.mark.usefixtures("served")

STEPS = 4
HOST_LIMIT = 3 * MIB // 2  # a weight has 256 KiB, one of "tied" 1 MiB, all of them 2.5 to 4 MiB
FAILURES = (DiskError, torch.OutOfMemoryError)
FAILURE = r"Input/output error|the budget is"

Made = tuple["nn.Module", torch.optim.Optimizer]


def open_files(folder: Path) -> list[str]:
    """Return the files of this process that are, or were, in a folder."""
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [each for each in links if each.startswith(f"{folder}/")]


def plain(name: str) -> tuple[list[str], str]:
    made = make(name)
    found = train(*made, STEPS), bits_of(*made)
    del made
    gc.collect()
    return found


def budget(
    made: Made, folder: Path, policy: str = "rescue", share: float = 0.6, host: int = HOST_LIMIT
) -> Session:
    limit = int(frozen_bytes(made[0]) * share)
    return swapkit.budget(limit, *made, policy=policy, host_limit=host, disk=folder)


@pytest.mark.parametrize("policy", ["auto", "rescue"])
@pytest.mark.parametrize("name", ["adapters", "tied", "trained"])
def test_training_when_the_host_has_no_room_for_the_weights_then_bit_equal_over_the_disk(
    name: str, policy: str, tmp_path: Path
) -> None:
    expected = plain(name)
    made = make(name)
    with budget(made, tmp_path, policy) as session:
        found = train(*made, STEPS)
        moved = session._require().swapper.scheduler.stats()
        assert len(open_files(tmp_path)) == 1
        stats = session.stats
    assert (found, bits_of(*made)) == expected
    assert 0 < stats.host_peak_bytes <= HOST_LIMIT
    assert stats.peak_bytes <= stats.budget_bytes
    assert stats.disk_peak_bytes > 0
    assert moved.read_bytes > stats.disk_peak_bytes
    if name != "trained":  # what is frozen is written once
        assert moved.written_bytes < 2 * frozen_bytes(made[0])
    del session
    gc.collect()
    assert os.listdir(tmp_path) == open_files(tmp_path) == []


@pytest.mark.parametrize("name", ["adapters", "trained"])
@pytest.mark.parametrize(
    ("calls", "nth"),
    [
        (instruments.SK_DISK_CALL_WRITE, 1),
        (instruments.SK_DISK_CALL_ALLOCATE, 1),
        (instruments.SK_DISK_CALL_READ, 1),
        (instruments.SK_DISK_CALL_READ, 9),
    ],
)
def test_step_when_the_disk_fails_then_no_weight_is_lost_and_training_goes_on_when_it_works(
    name: str, calls: int, nth: int, tmp_path: Path
) -> None:
    expected = plain(name)
    made = make(name)
    with budget(made, tmp_path, share=0.5, host=MIB):
        with (
            disk_fault(calls, errno.EIO, nth=nth, forever=True),
            pytest.raises(FAILURES, match=FAILURE),
        ):
            infer(made[0])
        found = train(*made, STEPS)
    assert (found, bits_of(*made)) == expected


@torch.no_grad()
def infer(model: nn.Module) -> None:
    for _ in range(STEPS):
        model(torch.randn(16, WIDTH))
