"""The virtual GPU's machines are as they were measured."""

from __future__ import annotations

import json

import pytest

from swapkit.planning.hardware import HARDWARE
from tests.cuda.control import open_driver
from tests.cuda.simulated import build_driver
from tests.cuda.timed.refit import MIB, compare, machine_of, read_records, refit
from tests.simulated.launching import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("machine", sorted(path.name for path in RESULTS.iterdir()))
def test_table_when_compared_with_its_records_then_no_rate_differs(machine: str) -> None:
    records = read_records(RESULTS / machine)
    assert {machine_of(record) for record in records} == {machine.upper()}
    rows = compare(machine.upper(), records)
    assert [str(row) for row in rows if row.differs] == []
    assert len(rows) >= 10


def test_refit_when_granules_differ_in_size_then_a_piece_and_its_bytes_are_told_apart() -> None:
    def us_per_gib(fixed_us: float, mib: int) -> float:
        return (fixed_us + 0.1 * mib) * 1024 / mib

    record = {
        "pool_map_2MiB_take_us": us_per_gib(40, 2),
        "pool_map_8MiB_take_us": us_per_gib(40, 8),
    }
    assert refit(record) == {}
    for size, mib in (("2MiB", 2), ("1GiB", 1024)):
        record[f"pool_alloc_{size}_take_us"] = us_per_gib(60, mib)
    assert refit(record) == {
        "COST_MAP_NS": pytest.approx(40_000),
        "COST_MAP_MIB_NS": pytest.approx(100),
    }


def test_refit_when_nothing_was_measured_then_no_rates() -> None:
    assert refit({}) == {}
    assert (
        refit(json.loads('{"link_out_64MiB_engine_gb_per_s": null, "machine_memory": null}')) == {}
    )


def test_compare_when_the_table_has_no_such_machine_then_refused() -> None:
    with pytest.raises(KeyError, match="B100"):
        compare("B100", [{"pool_empty_512B_native_ns": 1.0}])


def test_table_when_a_machine_was_not_measured_then_its_rates_are_the_planners() -> None:
    planned = HARDWARE["RTX 4090"]
    driver = open_driver(str(build_driver()))
    rates = {
        "TFLOPS16": planned.flops_per_second / 1e12,
        "ATTENTION": planned.attention_flops_per_second / 1e12,
        "ATTENTION_BACKWARD": planned.attention_flops_per_second / 1e12,
        "GB_PER_S": planned.memory_bytes_per_second / 1e9,
        "LINK_IN": planned.in_bytes_per_second / 1e9,
        "LINK_OUT": planned.out_bytes_per_second / 1e9,
        "LINK_SECOND": (planned.duplex - 1) * planned.out_bytes_per_second / 1e9,
    }
    found = {name: driver.cusim_rate_of(b"RTX4090", name.encode()) for name in rates}
    assert found == pytest.approx(rates)
    memory_mib = driver.cusim_rate_of(b"RTX4090", b"CAPACITY_MIB")
    assert memory_mib == pytest.approx(planned.memory_bytes / MIB, rel=0.01)
