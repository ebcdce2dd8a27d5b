"""Compare the rates of the virtual GPU with what a real one was measured to do.

    python -m tests.cuda.timed.refit benchmarks/results/h100 [--machine H100]

Prints every rate of `driver/rates.c` that the records (`gpu.json` of `make gpu`) measure, and marks
those that are further off than measurements are from each other: change the table then.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cuda.control import open_driver
from tests.cuda.simulated import build_driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Record = Mapping[str, Any]

MIB = 1 << 20
PIECES_MIB = {"2MiB": 2, "8MiB": 8, "20MiB": 20, "32MiB": 32, "256MiB": 256, "1GiB": 1024}
LARGE = ("64MiB", "256MiB")
WAYS = ("engine", "pinned")
PRODUCTS, PRODUCT_WIDTH = 24, 8192  # of benchmarks/gpu/link.py
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A rate in the table, and in the records."""

    name: str
    table: float
    record: float

    @property
    def differs(self) -> bool:
        return abs(self.record / self.table - 1) > TOLERANCE

    def __str__(self) -> str:
        mark = f"  differs by {self.record / self.table - 1:+.0%}" if self.differs else ""
        return f"{self.name:20} table {self.table:10,.1f}  record {self.record:10,.1f}{mark}"


def refit(record: Record) -> dict[str, float]:
    """Return the rates that a record measures, by their names in `driver/rates.c`."""
    rates = {
        **_link_rates(record),
        **_memory_costs(record, "take"),
        **_memory_costs(record, "give"),
    }
    if (empty := record.get("pool_empty_512B_native_ns")) is not None:
        rates["HOST_EMPTY_NS"] = empty
    if (memory := re.match(r"(\d+) MiB", record.get("machine_memory") or "")) is not None:
        rates["CAPACITY_MIB"] = float(memory[1])
    return rates


def _link_rates(record: Record) -> dict[str, float]:
    """The best of each direction; of both at once the middle, since those vary."""

    def found(patterns: Iterable[str], sizes: Iterable[str], ways: Iterable[str]) -> list[float]:
        keys = (f"link_{p}_{s}_{w}_gb_per_s" for p in patterns for s in sizes for w in ways)
        return [record[key] for key in keys if record.get(key) is not None]

    out, back = found(("out",), LARGE, WAYS), found(("back",), LARGE, WAYS)
    both = found(("both", "busy"), LARGE, WAYS)
    if not (out and back and both):
        return {}
    rates = {
        "LINK_OUT": max(out),
        "LINK_IN": max(back),
        "LINK_SECOND": statistics.median(both) - max(out),
    }
    small = {"LINK_OUT": "out", "LINK_IN": "back"}
    latencies = [
        MIB / seen[0] - MIB / rates[name]
        for name, pattern in small.items()
        if (seen := found((pattern,), ("1MiB",), ("pinned",)))
    ]
    return rates | ({"LINK_LATENCY_NS": statistics.mean(latencies)} if latencies else {})


def _memory_costs(record: Record, what: str) -> dict[str, float]:
    """Of a piece and of each MiB of it.

    Pieces of virtual memory are measured up to 32 MiB only, where their size hardly shows. What a
    MiB costs is taken from plain allocations, whose pieces go up to 1 GiB.
    """

    def pieces_ns(kind: str) -> dict[int, float]:
        found = {
            mib: record.get(f"pool_{kind}_{size}_{what}_us") for size, mib in PIECES_MIB.items()
        }
        return {mib: us * mib / 1024 * 1e3 for mib, us in found.items() if us is not None}

    mapped, allocated = pieces_ns("map"), pieces_ns("alloc")
    if len(allocated) < 2 or not mapped:
        return {}
    least, most = min(allocated), max(allocated)
    slope = max(0.0, (allocated[most] - allocated[least]) / (most - least))
    name = {"take": "COST_MAP", "give": "COST_UNMAP"}[what]
    return {
        f"{name}_NS": statistics.median(ns - slope * mib for mib, ns in mapped.items()),
        f"{name}_MIB_NS": slope,
    }


def notes(record: Record) -> Iterator[str]:
    """Yield what is not a rate, but what TFLOPS16 is fitted to, and its bound."""
    if (step := record.get("train_1b_4k_plain_step_ms")) is not None:
        yield f"plain step of 1b_4k: {step:.2f} ms; the virtual one's has to be the same"
    if (alone := record.get("link_products_alone_ms")) is not None:
        reached = PRODUCTS * 2 * PRODUCT_WIDTH**3 / alone / 1e9
        yield f"large products: {reached:.0f} TFLOP/s; TFLOPS16 is below"


def machine_of(record: Record) -> str | None:
    """Return the name of the GPU without its maker and its memory."""
    found = re.search(r"\b(H\d+)\b", record.get("machine_gpu") or "")
    return found[1] if found else None


def compare(machine: str, records: Iterable[Record]) -> list[Comparison]:
    """Return each rate that is measured, beside the table's; of several records their median.

    Raises:
        KeyError: the table has no such machine.
    """
    driver = open_driver(str(build_driver()))
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in refit(record).items():
            found.setdefault(name, []).append(value)
    rows = [
        Comparison(
            name=name,
            table=driver.cusim_rate_of(machine.encode(), name.encode()),
            record=statistics.median(values),
        )
        for name, values in found.items()
    ]
    if any(row.table < 0 for row in rows):
        raise KeyError(machine)
    return rows


def read_records(place: Path) -> list[Record]:
    """Return a record, or all of a folder."""
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def main() -> None:
    """Print the comparison; exit with 1 if a rate differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", type=Path, help="a record, or a folder of them")
    parser.add_argument("--machine", help="a column of driver/rates.c; without: the records' GPU")
    arguments = parser.parse_args()
    records = read_records(arguments.place)
    machine = arguments.machine or next(filter(None, map(machine_of, records)), None)
    if machine is None:
        parser.error("the records name no GPU: give --machine")
    try:
        rows = compare(machine, records)
    except KeyError:
        parser.error(f"driver/rates.c has no {machine}: add it, or give --machine")
    lines = [str(row) for row in rows] + [note for record in records for note in notes(record)]
    sys.stdout.write("\n".join([f"{machine}:", *lines, ""]))
    raise SystemExit(any(row.differs for row in rows))


if __name__ == "__main__":
    main()
