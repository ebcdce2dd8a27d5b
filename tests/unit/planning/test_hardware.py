"""Hardware that is not at hand: which there is, and what a recorded step takes there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit.errors import InvalidArgument
from swapkit.ir.codec import read_trace, write_trace
from swapkit.ir.traces import Operator, Phase, Trace
from swapkit.planning.hardware import HARDWARE, Hardware, find_hardware, hardware_named, price

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = Hardware(
    flops_per_second=1e12,
    attention_flops_per_second=1e11,
    memory_bytes_per_second=1e9,
    launch_seconds=1e-3,
)
SIDE, ROWS = 256, 1024


def make_trace(device: str = "cpu", hardware: Hardware | None = None) -> Trace:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.ReLU()).bfloat16()
        batch = torch.ones(ROWS, SIDE, dtype=torch.bfloat16)
    return swapkit.record(lambda: model(batch).sum().backward(), model, hardware=hardware)


def test_hardware_when_it_is_named_then_case_does_not_matter() -> None:
    assert hardware_named("h100") is HARDWARE["H100"]
    assert find_hardware("4090") is HARDWARE["RTX 4090"]
    assert find_hardware("910b") is HARDWARE["Ascend 910B"]
    assert find_hardware("4091") is None
    assert hardware_named(PLAIN) is PLAIN
    assert all(each.flops_per_second > 1e14 for each in HARDWARE.values())


@pytest.mark.parametrize(
    "field", ["flops_per_second", "attention_flops_per_second", "memory_bytes_per_second"]
)
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_hardware_when_a_figure_is_not_possible_then_it_is_refused(
    field: str, value: float
) -> None:
    figures = dict.fromkeys(
        ["flops_per_second", "attention_flops_per_second", "memory_bytes_per_second"], 1.0
    )
    with pytest.raises(InvalidArgument, match=field):
        Hardware(**{**figures, field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="launch_seconds"):
        Hardware(**figures, launch_seconds=-1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=list(HARDWARE))
def test_hardware_when_it_is_known_then_a_budget_leaves_a_reserve_and_links_have_speeds(
    hardware: Hardware,
) -> None:
    machine = hardware.machine
    assert machine is not None
    assert 0.9 < machine.budget_bytes / hardware.memory_bytes < 0.98
    assert machine.in_bytes_per_second > 1e10
    assert PLAIN.machine is None


def test_step_when_it_is_priced_then_it_takes_as_long_as_one_recorded_for_that_hardware() -> None:
    measured, modelled = make_trace(), make_trace("meta", PLAIN)
    priced = price(measured, PLAIN)
    assert [each.seconds for each in priced.operators] == [
        each.seconds for each in modelled.operators
    ]
    assert [each.seconds for each in measured.operators] != [
        each.seconds for each in priced.operators
    ]
    assert (priced.device, priced.storages) == ("cuda", measured.storages)
    (product,) = [
        each for each in priced.operators if "mm" in each.name and each.phase is Phase.FORWARD
    ]
    traffic = 2 * (SIDE * SIDE + 2 * ROWS * SIDE)
    assert math.isclose(product.seconds, traffic / 1e9 + 1e-3)


def test_step_when_it_is_recorded_on_the_cpu_for_hardware_then_that_prices_it() -> None:
    assert make_trace("cpu", PLAIN).operators == price(make_trace(), PLAIN).operators


def test_step_when_it_was_written_to_a_file_then_it_can_be_priced(tmp_path: Path) -> None:
    trace = make_trace()
    write_trace(tmp_path / "step.json", trace)
    assert price(read_trace(tmp_path / "step.json"), PLAIN) == price(trace, PLAIN)


def test_operator_when_its_work_is_not_known_then_that_is_said() -> None:
    operator = Operator(name="triton.mine", seconds=1.0, phase=Phase.FORWARD)
    with pytest.raises(InvalidArgument, match=r"what triton.mine does.*without torch.compile"):
        PLAIN.seconds(operator)
