"""Steps of sessions on the virtual GPU: how long they take, and when their copies start."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest

from tests.cuda.simulated import INSIDE, PYTHON
from tests.cuda.test_timed import run

pytestmark = [
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no torch for CUDA"),
    pytest.mark.skipif(INSIDE in os.environ, reason="runs outside of the simulation"),
]

CLOCK = """
from swapkit._runtime.control.steps import StepClock
from swapkit.planning.selection.cases import Timing

large, small = torch.ones(1 << 28, device="cuda"), torch.ones(512, device="cuda")
clock = StepClock(torch.device("cuda", 0))

def step(timing, small_count, large_count=20):
    clock.begin(timing)
    busy = machine.times()["compute_busy_ns"]
    for _ in range(small_count):
        small.neg_()  # the host is the limit,
    for _ in range(large_count):
        large.neg_()  # but not in this part of the step
    taken = clock.end()
    return taken.seconds * 1e9, taken.is_host_bound, machine.times()["compute_busy_ns"] - busy

def timed(*counts):
    step(Timing.LEAD, *counts)
    return step(Timing.PACE, *counts)

found = {
    "device": timed(0),
    "host": timed(2000, 0),
    "both": timed(1000),
    "alone": step(Timing.PACE, 1000),
    "untimed": step(Timing.HOST, 0),
}
print(json.dumps(found))
"""


def test_clock_when_a_step_has_led_then_tells_how_often_steps_end_and_who_was_the_limit() -> None:
    found = json.loads(run(CLOCK)[-1])
    seconds, is_host_bound, busy = found["device"]
    assert seconds == pytest.approx(busy, rel=0.05)
    assert is_host_bound is False
    seconds, is_host_bound, busy = found["host"]
    assert seconds > 1.3 * busy
    assert is_host_bound is True
    assert found["both"][0] < 0.95 * found["alone"][0]  # which begins with an idle device
    seconds, is_host_bound, busy = found["untimed"]
    assert seconds < busy / 10  # nobody waits for the device
    assert is_host_bound is False


LEAST_SWAPPED = 8
# Every layer saves 128 MiB that leave by the end of forward, in a step whose host is far ahead.
COPIES = """
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import Phase

LAYERS, SIZE = 8, 1 << 12

class Squares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(SIZE, SIZE, device="cuda") for _ in range(LAYERS)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x

class Swaps:
    def plan(self, trace, machine):
        last = max(
            at for at, each in enumerate(trace.operators) if each.phase is Phase.FORWARD
        )
        return Plan(
            budget_bytes=machine.budget_bytes,
            decisions=tuple(
                Decision(storage=at, action=Action.SWAP, release=last)
                for at, each in enumerate(trace.storages)
                if each.is_saved and 0 < each.birth < last - 4
            ),
        )

swapkit.install(device="cuda")
model = Squares()
optimizer = torch.optim.SGD(model.parameters())
x = torch.ones(SIZE, SIZE, device="cuda")
with swapkit.budget("16GiB", model, optimizer, policy=Swaps()) as session:
    for _ in range(6):
        model(x).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    machine.host_slowness(0.0)
    machine.keep_spans(10_000)
    model(x).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    spans = machine.spans(10_000)
    found = {
        "stage": session.stage,
        "swapped": len(session.plan.decisions),
        "out": [span.start_ns for span in spans if span.engine == "out"],
        "computed": [span.end_ns for span in spans if span.name in ("aten::addmm", "aten::sin")],
    }
print(json.dumps(found))
"""


def test_copies_when_all_are_due_at_once_then_each_starts_when_its_layer_has_computed() -> None:
    found = json.loads(run(COPIES, CUSIM_HOST_SLOWNESS="1")[-1])
    assert found["stage"] == "stable"
    assert found["swapped"] >= LEAST_SWAPPED
    layer_ns = found["computed"][2] - found["computed"][0]
    assert max(later - one for one, later in pairwise(found["out"])) < 1.1 * layer_ns


# Six blocks of a language model, in steps in which other copies are done by the time of an event:
# they, and the host, are slower or faster than in the step before.
UNSTEADY = """
from benchmarks.gpu.llama import Shape, build_model, make_tokens
from swapkit._native.pool import Ring, RingKind
from swapkit._runtime.allocators.installation import require_installation
from swapkit.testing import planning_at_once

LARGE = 1 << 20
shape = Shape(
    layers=6, width=2048, heads=32, key_heads=8, hidden=8192, vocabulary=32000, tokens=4096
)
swapkit.install(device="cuda")
llama = build_model(shape, "cuda")
optimizer = torch.optim.SGD(llama.parameters())
tokens = make_tokens(shape, 0, "cuda")
rate = machine.parameter("LINK_OUT")
ring = Ring(1 << 16)

def train(ratio, slowness):
    machine.host_slowness(slowness)
    with machine.parameters({"LINK_OUT": rate * ratio}):
        before = machine.times()
        llama(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = machine.times()
    order = [
        (each.kind, each.nbytes)
        for each in ring.read()[0]
        if each.kind in (RingKind.TAKE, RingKind.GIVE) and each.nbytes > LARGE
    ]
    return after["maps"] - before["maps"], order

with swapkit.budget("3100MiB", llama, optimizer, policy="swap") as session:
    with planning_at_once():
        while session.stage != "stable":
            train(1.0, 1.5)
        for _ in range(16):  # until addresses are planned
            train(1.0, 1.5)
    require_installation(torch.device("cuda", 0)).pool.attach(ring)
    for _ in range(2):
        train(1.0, 1.5)
    orders, maps = [], []
    for ratio in (0.5, 4.0, 1.0):
        for slowness in (0.5, 6.0, 1.5, 3.0):
            mapped, order = train(ratio, slowness)
            maps.append(mapped)
            orders.append(order)
    found = {
        "planned": session.plan.prediction.swapped_bytes,
        "counts": [len(order) for order in orders],
        "others": sum(order != orders[0] for order in orders),
        "maps": maps,
    }
    require_installation(torch.device("cuda", 0)).pool.detach()
print(json.dumps(found))
"""


def test_step_when_copies_take_other_times_than_before_then_memory_is_taken_as_before() -> None:
    found = json.loads(run(UNSTEADY, CUSIM_MACHINE="H200")[-1])
    assert found["planned"] > 1 << 30
    assert min(found["counts"]) > 100
    assert found["others"] == 0
    assert set(found["maps"]) == {0}
