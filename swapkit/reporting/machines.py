"""Texts about a machine: its transfer speeds and limits."""

from __future__ import annotations

from swapkit.ir.machines import Machine
from swapkit.units import format_bytes


def format_speed(bytes_per_second: float) -> str:
    """Return a speed in decimal units, as link vendors state it.

    Example:
        >>> format_speed(2e8), format_speed(24.96e9)
        ('200.0 MB/s', '24.96 GB/s')
    """
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def format_seconds(seconds: float) -> str:
    """Return a time in s, ms or us, depending on its magnitude.

    Example:
        >>> format_seconds(1.5), format_seconds(0.0123), format_seconds(4.2e-6)
        ('1.500 s', '12.30 ms', '4.2 us')
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"


def summarize_machine(machine: Machine) -> str:
    """Return a machine's speeds in one line."""
    text = (
        f"{machine.name or 'the machine'}: out {format_speed(machine.out_bytes_per_second)}, "
        f"in {format_speed(machine.in_bytes_per_second)}, "
        f"latency {format_seconds(machine.out_latency_seconds)} and "
        f"{format_seconds(machine.in_latency_seconds)}, duplex {machine.duplex:.2f}, "
        f"interference {machine.interference:.1%}"
    )
    if machine.disk_bytes:
        text += (
            f", disk write {format_speed(machine.disk_write_bytes_per_second)}, disk read "
            f"{format_speed(machine.disk_read_bytes_per_second)}"
        )
    return text


def list_machine(machine: Machine) -> list[tuple[str, str]]:
    """Return all measured values of a machine: names and values, below the table's headings."""
    host = "no limit" if machine.host_bytes is None else format_bytes(machine.host_bytes)
    rows = [
        (machine.name or "machine", ""),
        ("budget", format_bytes(machine.budget_bytes)),
        (
            "out, to the host",
            _format_way(machine.out_bytes_per_second, machine.out_latency_seconds),
        ),
        ("in, to the device", _format_way(machine.in_bytes_per_second, machine.in_latency_seconds)),
        ("both ways at once", f"{machine.duplex / 2:.0%} of the speed each way"),
        ("computing while copying", f"{machine.interference:.1%} slower"),
        ("host memory for copies", host),
    ]
    if machine.disk_bytes:
        speeds = machine.disk_write_bytes_per_second, machine.disk_read_bytes_per_second
        rows += [
            ("disk, write", format_speed(speeds[0])),
            ("disk, read", format_speed(speeds[1])),
            ("disk space for copies", format_bytes(machine.disk_bytes)),
        ]
    else:
        rows.append(("disk", "none"))
    return rows


def _format_way(bytes_per_second: float, latency_seconds: float) -> str:
    return f"{format_speed(bytes_per_second)}, {format_seconds(latency_seconds)} latency per copy"
