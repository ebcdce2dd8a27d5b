"""What a recorder says that operators take on the virtual GPU, and what their kernels take."""

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

# Every operator here needs memory that has to be made: first the pool grows for longer than a delay
# lasts, then a rescue waits for the device and longer than a delay.
CODE = """
from swapkit._runtime.allocators.installation import installed_pool
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.model.tracker import ModuleTracker

GIB = 1 << 30
swapkit.install(4 * GIB, device="cuda")
pool, rescues = installed_pool("cuda"), []
x = torch.ones(GIB // 8, dtype=torch.bfloat16, device="cuda")
held = [torch.ones(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]

def rescue(needed_bytes):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.01:
        pass
    rescues.append(needed_bytes)
    return held.pop().numel() if held else 0

SLEEPS
pool.set_rescue(rescue)
place = torch.device("cuda", 0)
recorder = Recorder(Setting(device=place, tracker=ModuleTracker(), pool=pool))
machine.keep_spans(10_000)
recorder.start()
before = machine.times()["maps"]
results = [function(x) for function in (torch.neg, torch.Tensor.float, torch.sin, torch.cos)]
grown = machine.times()["maps"] > before
results += [torch.exp(results[1]), results[1] + 1, results[1].relu(), torch.neg(x)]
small = [x[:512] + index for index in range(20)]
recorder.stop()
kernels = [
    span.end_ns - span.start_ns
    for span in machine.spans(10_000)
    if span.engine == "compute" and span.name not in ("sleep", "aten::fill_", "aten::mm")
]
recorded = [(each.name, each.seconds * 1e9) for each in recorder.trace().operators]
pool.set_rescue(None)
found = {"grown": grown, "rescues": len(rescues), "recorded": recorded, "true": kernels}
print(json.dumps(found))
"""


@pytest.mark.parametrize("slowness", ["1", "2.2"])
@pytest.mark.parametrize("sleeps", [True, False], ids=["asleep", "computing"])
def test_recorder_when_memory_is_made_for_operators_then_they_take_what_their_kernels_take(
    slowness: str, sleeps: bool
) -> None:
    code = CODE.replace("SLEEPS", "" if sleeps else "del torch.cuda._sleep  # as other devices")
    found = json.loads(run(code, CUSIM_HOST_SLOWNESS=slowness)[-1])
    assert found["grown"]
    assert found["rescues"] >= 2
    recorded = [seconds for _, seconds in found["recorded"]]
    assert recorded == pytest.approx(found["true"], rel=0.05, abs=200)
