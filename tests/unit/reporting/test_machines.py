"""A machine's text says what it can do, in units that people read."""

from __future__ import annotations

from swapkit.ir.machines import Machine
from swapkit.reporting.machines import format_seconds, list_machine, summarize_machine
from swapkit.reporting.text import format_table

MACHINE = Machine(
    budget_bytes=10 << 30,
    out_bytes_per_second=24.5e9,
    in_bytes_per_second=2e8,
    out_latency_seconds=12e-6,
    in_latency_seconds=0.0021,
    duplex=1.6,
    interference=0.034,
    name="a device",
)
WITH_DISK = Machine(
    budget_bytes=1 << 20,
    out_bytes_per_second=1e9,
    in_bytes_per_second=1e9,
    host_bytes=3 << 20,
    disk_bytes=5 << 30,
    disk_write_bytes_per_second=1.5e9,
    disk_read_bytes_per_second=2.5e9,
)


def lines_of(machine: Machine) -> list[str]:
    heads, *rows = list_machine(machine)
    return format_table(heads, rows).splitlines()


def test_machine_when_formatted_then_each_figure_has_its_line() -> None:
    assert lines_of(MACHINE) == [
        "a device",
        "budget                   10.00 GiB",
        "out, to the host         24.50 GB/s, 12.0 us latency per copy",
        "in, to the device        200.0 MB/s, 2.10 ms latency per copy",
        "both ways at once        80% of the speed each way",
        "computing while copying  3.4% slower",
        "host memory for copies   no limit",
        "disk                     none",
    ]


def test_machine_when_it_has_a_disk_then_its_speeds_and_room_are_named() -> None:
    lines = lines_of(WITH_DISK)
    assert lines[0] == "machine"
    assert lines[-4:] == [
        "host memory for copies   3.00 MiB",
        "disk, write              1.50 GB/s",
        "disk, read               2.50 GB/s",
        "disk space for copies    5.00 GiB",
    ]


def test_summary_when_made_then_one_line_with_the_disk_only_if_there_is_one() -> None:
    assert summarize_machine(MACHINE) == (
        "a device: out 24.50 GB/s, in 200.0 MB/s, latency 12.0 us and 2.10 ms, duplex 1.60, "
        "interference 3.4%"
    )
    text = summarize_machine(WITH_DISK)
    assert text.startswith("the machine: ")
    assert text.endswith("disk write 1.50 GB/s, disk read 2.50 GB/s")


def test_seconds_when_of_any_size_then_readable() -> None:
    assert [format_seconds(each) for each in (0, 9.99e-4, 1e-3, 0.9994, 1, -2.5)] == [
        "0 s", "999.0 us", "1.00 ms", "999.40 ms", "1.000 s", "-2.500 s",
    ]  # fmt: skip
