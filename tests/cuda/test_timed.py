"""The virtual GPU under torch: what a step takes there, whatever else this machine does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.cuda.simulated import INSIDE, PYTHON
from tests.simulated.launching import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no torch for CUDA"),
    pytest.mark.skipif(INSIDE in os.environ, reason="runs outside of the simulation"),
]

# Four layers whose products are most of a step, and what happened in the last steps of four.
WIDTH, LAYERS = 4096, 4
PRODUCT_MS = 2 * WIDTH**3 / 690e12 * 1e3  # of TFLOPS16
BEGIN = f"""
import json, time
import torch, swapkit
from tests.cuda.timed import machine

def model():
    layers = (torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
    return torch.nn.Sequential(*layers).to(dtype=torch.bfloat16, device="cuda")

def steps(train, count=4):
    for index in range(count):
        torch.cuda.synchronize()
        before, begin = machine.times(), time.perf_counter()
        train()
        torch.cuda.synchronize()
        seconds, after = time.perf_counter() - begin, machine.times()
    return {{"ms": seconds * 1e3}} | {{name: after[name] - before[name] for name in after}}
"""
PLAIN = """
layers = model()
x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
print(json.dumps(steps(lambda: layers(x).backward(x))))
"""
OFFLOAD = """
swapkit.install(device="cuda")
layers = torch.nn.Sequential(*(torch.nn.GELU() for _ in range(8))).cuda()
x = torch.randn(8192, 8192, device="cuda", requires_grad=True)
def train():
    y = x
    with swapkit.offload():
        for layer in layers:  # a host that is ahead needs everything before its copy is done
            y = layer(y)
            torch.cuda.synchronize()
    y.backward(x)
print(json.dumps(steps(train)))
"""


def run(code: str, **environment: str) -> list[str]:
    """Run a program on a virtual GPU of its own; return the lines it printed."""
    program = BEGIN + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.timed", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@functools.cache
def quiet_run(code: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(code)[-1])
    return found


@contextmanager
def busy_cores() -> Iterator[None]:
    """Let every core be shared with somebody else meanwhile."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_plain_step_when_products_are_most_of_it_then_takes_what_they_take() -> None:
    step = quiet_run(PLAIN)
    products_ms = 3 * LAYERS * PRODUCT_MS
    # Gradients are added up, too: those bytes are the rest.
    assert products_ms < step["compute_busy_ns"] / 1e6 < 1.1 * products_ms
    assert step["compute_busy_ns"] / 1e6 < step["ms"] < 1.2 * products_ms
    assert step["kernels"] < 60
    assert step["maps"] == 0
    assert step["copies_in"] == step["copies_out"] == 0


def test_offload_when_everything_moves_then_the_link_takes_the_time() -> None:
    step = quiet_run(OFFLOAD)
    tensor = 8192 * 8192 * 4
    assert step["copy_bytes_out"] % tensor == 0 < step["copy_bytes_in"]
    assert 0 <= step["copy_bytes_out"] - step["copy_bytes_in"] <= tensor  # the last one stays
    link_ms = step["copy_bytes_out"] / 54.5e6 + step["copy_bytes_in"] / 54e6
    assert (step["copy_busy_ns_in"] + step["copy_busy_ns_out"]) / 1e6 >= link_ms
    assert 0.9 * link_ms < step["ms"] < 2 * link_ms


@pytest.mark.parametrize("code", [PLAIN, OFFLOAD], ids=["plain", "offload"])
def test_step_when_other_processes_run_then_counts_and_time_are_the_same(code: str) -> None:
    quiet = quiet_run(code)
    with busy_cores():
        busy = json.loads(run(code)[-1])
    # Neither times, nor how often the host asked or waited: that is a matter of its time.
    uncounted = ("ms", "_ns", "wait", "calls")
    counted = [name for name in quiet if not any(part in name for part in uncounted)]
    assert {name: busy[name] for name in counted} == {name: quiet[name] for name in counted}
    assert busy["compute_busy_ns"] == quiet["compute_busy_ns"]
    assert busy["ms"] == pytest.approx(quiet["ms"], rel=0.02)


def test_rates_when_changed_then_the_step_changes_for_as_long() -> None:
    lines = run(
        """
        x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
        busy_ms = lambda: round(steps(lambda: x @ x)["compute_busy_ns"] / 1e6, 1)
        usual = busy_ms()
        with machine.parameters({"TFLOPS16": machine.parameter("TFLOPS16") / 100}):
            print(busy_ms() / usual > 90)
        with machine.parameters(machine.WORK):
            print(busy_ms())
        print(busy_ms() == usual)
        """
    )
    assert lines == ["True", "0.0", "True"]


def test_host_when_rescaled_then_an_allocation_takes_what_the_machines_host_took() -> None:
    # Within a factor of two: what other programs do meanwhile does not matter, a host that stays
    # as it is does.
    lines = run(
        """
        machine.rescale()
        print(machine.host_empty_ns() / machine.parameter("HOST_EMPTY_NS"))
        for nanoseconds in (10_000, 100_000):
            machine.rescale(nanoseconds)
            print(machine.host_empty_ns() / nanoseconds)
        """
    )
    assert [0.5 < float(line) < 2 for line in lines] == [True] * 3


def test_memory_when_more_than_this_machine_has_then_none_of_it_is_touched() -> None:
    lines = run(
        """
        import resource
        from swapkit._native.backend import Backend
        print(Backend.cpu().memory_info().total_bytes >> 30, torch.cuda.mem_get_info()[1] >> 30)
        x = torch.zeros(60 << 30, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(60 << 30, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(x, non_blocking=True)
        pageable = x[: 12 << 30].cpu()
        print(pageable[12345].item(), pageable.numel() >> 30)
        copied = torch.empty(60 << 30, dtype=torch.uint8).pin_memory()
        print(copied.is_pinned(), copied.numel() >> 30, torch.ones(8).pin_memory().sum().item())
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20)
        """,
        CUSIM_HOST_MEMORY="200G",
    )
    assert lines == ["200 79", "0 12", "True 60 8.0", "True"]


def test_device_when_its_rates_differ_then_it_has_another_name() -> None:
    code = "print(torch.cuda.get_device_name())"
    names = [
        run(code, **changed)[-1]
        for changed in ({}, {"CUSIM_LINK_IN": "10"}, {"CUSIM_HOST_SLOWNESS": "2.2"})
    ]
    assert names[0] == "Virtual H100, host 1"
    assert names[1].startswith("Virtual H100, host 1, changed to ")
    assert names[2] == "Virtual H100, host 2.2"


def test_device_when_it_is_an_rtx_4090_then_torch_takes_it_for_one() -> None:
    lines = run(
        """
        found = torch.cuda.get_device_properties(0)
        print(found.name, found.major, found.minor, found.multi_processor_count)
        print(found.total_memory >> 20, torch.cuda.mem_get_info()[1] == found.total_memory)
        """,
        CUSIM_MACHINE="RTX4090",
    )
    assert lines == ["Virtual RTX4090, host 1 8 9 128", "24217 True"]


def test_machine_when_swapkit_measures_it_then_it_is_the_tables() -> None:
    lines = run(
        """
        from swapkit._runtime.machine.measured_machine import measure_machine
        from swapkit._runtime.process.runtime import get_runtime
        from swapkit._runtime.saved.device import Limits
        swapkit.install(device="cuda")
        device = get_runtime().device(torch.device("cuda", 0))
        found = measure_machine(device, Limits(budget_bytes=1 << 30), fresh=True)
        print(json.dumps([found.out_bytes_per_second / 1e9, found.in_bytes_per_second / 1e9]))
        """
    )
    assert json.loads(lines[-1]) == pytest.approx([54.5, 54.0], rel=0.05)


def test_attention_when_causal_then_half_of_the_products_are_counted() -> None:
    lines = run(
        """
        q = torch.randn(4, 16, 4096, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        grad = torch.randn_like(q)
        def busy_ms(causal):
            step = steps(lambda: attend(q, q, q, is_causal=causal).backward(grad))
            return step["compute_busy_ns"] / 1e6
        half = 4 * 4 * 16 * 4096**2 * 128 / 2
        print(round((busy_ms(False) - busy_ms(True)) / (half / 400e9 + 2.5 * half / 300e9), 3))
        """
    )
    assert lines == ["1.0"]


def test_what_is_not_modelled_when_called_then_refused_by_name() -> None:
    lines = run(
        """
        a = torch.randn(2, 8, 8, device="cuda")
        try:
            torch.linalg.solve_triangular(a, a, upper=True)
        except RuntimeError as error:
            print("CUBLAS_STATUS_NOT_SUPPORTED" in str(error))
        """
    )
    assert lines == ["True"]
