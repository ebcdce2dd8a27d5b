"""What is measured of the virtual GPU's link, whose rates are known, whatever its host is like."""

from __future__ import annotations

import json
import os

import pytest

from tests.cuda.simulated import INSIDE, PYTHON
from tests.cuda.test_timed import run

pytestmark = [
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no torch for CUDA"),
    pytest.mark.skipif(INSIDE in os.environ, reason="runs outside of the simulation"),
]

CODE = """
from dataclasses import asdict
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.machine.bandwidth import measure_speeds

SLEEPS
swapkit.install(device="cuda")
device = get_runtime().device(torch.device("cuda", 0))
torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda"))  # has a workspace
before = torch.cuda.memory_allocated()
with hidden(), torch.no_grad():
    speeds = measure_speeds(device, room_bytes=4 << 30, host_bytes=None)
rates = {name: machine.parameter(name) for name in ("LINK_OUT", "LINK_IN", "LINK_SECOND")}
left = torch.cuda.memory_allocated() - before
print(json.dumps(asdict(speeds) | rates | {"left": left}))
"""


# Beside the slowest, no delay of the usual length is long enough.
@pytest.mark.parametrize(
    ("slowness", "sleeps"), [("0", True), ("2.2", True), ("15", True), ("2.2", False)]
)
def test_speeds_when_the_host_is_slow_then_the_devices_own(slowness: str, sleeps: bool) -> None:
    code = CODE.replace("SLEEPS", "" if sleeps else "del torch.cuda._sleep  # as other devices")
    found = json.loads(run(code, CUSIM_HOST_SLOWNESS=slowness)[-1])
    assert found["is_steady"]
    assert found["out_bytes_per_second"] == pytest.approx(found["LINK_OUT"] * 1e9, rel=0.01)
    assert found["in_bytes_per_second"] == pytest.approx(found["LINK_IN"] * 1e9, rel=0.01)
    for way in ("out", "in"):
        assert 0 < found[f"{way}_latency_seconds"] < 5e-6
    # Of two copies at once one or both are as fast as the second of them.
    second = 2 * found["LINK_SECOND"] / found["LINK_OUT"]
    assert second <= found["duplex"] <= 1 + second / 2
    assert found["interference"] == pytest.approx(0.0, abs=0.005)
    assert found["left"] == 0


def test_speeds_when_a_delay_was_too_short_then_not_steady() -> None:
    short = "from swapkit._runtime.machine import copy_bursts\ncopy_bursts.DELAY_SECONDS = 1e-5\n"
    short += "copy_bursts.MOST_DELAY_SECONDS = copy_bursts.DELAY_SECONDS"
    found = json.loads(run(CODE.replace("SLEEPS", short), CUSIM_HOST_SLOWNESS="2")[-1])
    assert not found["is_steady"]
