"""The resources of a step: device memory, links to the host, host memory and disk."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device with a budget, and its links to the host and to a disk.

    A copy of n bytes takes `latency + n / bytes_per_second`. One copy runs at a time in each
    direction. While copies run both ways, each has `duplex / 2` of its speed. While any copy runs,
    computing takes `1 + interference` times as long.
    """

    budget_bytes: int
    out_bytes_per_second: float  # device to host
    in_bytes_per_second: float  # host to device
    out_latency_seconds: float = 0.0
    in_latency_seconds: float = 0.0
    duplex: float = 2.0  # 1: the directions share one link; 2: they are independent
    interference: float = 0.0
    host_bytes: int | None = None  # for copies; None: unlimited
    disk_bytes: int = 0  # 0: there is no disk
    disk_write_bytes_per_second: float = 0.0
    disk_read_bytes_per_second: float = 0.0
    name: str = ""
    version: int = VERSION
