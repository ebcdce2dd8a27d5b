"""A limit that the kernel enforces: plain torch dies within it, a budget with a disk trains on.

RLIMIT_DATA (what `prlimit --data` sets) counts every private writable byte of the process: the
pool's, the copies on the host, and our threads' stacks. The demo's model trains in child processes,
which are let have so many bytes more than they have with the model built.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support import MIB, finish_python, start_python

if TYPE_CHECKING:
    from pathlib import Path

SPARE = 220 * MIB  # plain torch takes 280 MiB
BUDGET = 90 * MIB
HOST_LIMIT = 32 * MIB

COMMON = """
    import json
    import re
    import resource
    from pathlib import Path

    import torch

    torch.set_num_threads(1)

    def limit_data(spare_bytes):
        status = Path("/proc/self/status").read_text()
        has_bytes = int(re.search(r"VmData:\\s+(\\d+) kB", status)[1]) * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (has_bytes + spare_bytes, hard))

    def build():
        from examples.language_model import ModelSize
        from examples.language_model import Training

        size = ModelSize(
            dim=128, layers=4, heads=4, hidden=352, tokens=256, batch=16, steps=3
        )
        return Training(size, seed=0, recompute=False)

    def train(training):
        return {"losses": [training.step() for _ in range(3)], "digest": training.digest()}
"""

PLAIN = """
    training = build()
    limit_data(SPARE)
    try:
        death = "none"
        train(training)
    except (MemoryError, RuntimeError) as error:
        death = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps({"death": death, **train(build())}))
"""

BUDGETED = """
    import os

    import swapkit

    swapkit.install()
    training = build()
    limit_data(SPARE)
    session = swapkit.budget(
        BUDGET, training.model, training.optimizer, disk=FOLDER, host_limit=HOST_LIMIT
    )
    with session:
        result = train(training)
    stats = session.stats
    names = ("peak_bytes", "host_peak_bytes", "disk_peak_bytes", "oom_rescues")
    result |= {name: getattr(stats, name) for name in names}
    print(json.dumps({"files": os.listdir(FOLDER), **result}))
"""


class Runs(NamedTuple):
    """What the two processes said."""

    plain: dict[str, Any]
    budgeted: dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Both processes, side by side."""
    folder: Path = tmp_path_factory.mktemp("disk")
    constants = (
        f"\n    SPARE, BUDGET, HOST_LIMIT = {SPARE}, {BUDGET}, {HOST_LIMIT}"
        f"\n    FOLDER = {str(folder)!r}\n"
    )
    processes = [start_python(COMMON + constants + code) for code in (PLAIN, BUDGETED)]
    plain, budgeted = (json.loads(finish_python(process)) for process in processes)
    return Runs(plain, budgeted)


@pytest.mark.promise("A3")
def test_training_when_the_kernels_limit_kills_plain_torch_then_a_budget_trains_bit_equal(
    runs: Runs,
) -> None:
    assert "can't allocate memory" in runs.plain["death"]
    assert runs.budgeted["losses"] == runs.plain["losses"]
    assert runs.budgeted["digest"] == runs.plain["digest"]
    assert len(set(runs.plain["losses"])) == 3
    assert runs.budgeted["oom_rescues"] > 0


@pytest.mark.promise("C13")
def test_host_memory_when_it_is_limited_then_the_rest_goes_to_the_disk(runs: Runs) -> None:
    budgeted = runs.budgeted
    assert budgeted["peak_bytes"] <= BUDGET
    assert 0 < budgeted["host_peak_bytes"] <= HOST_LIMIT
    assert budgeted["disk_peak_bytes"] > HOST_LIMIT
    assert budgeted["files"] == []
