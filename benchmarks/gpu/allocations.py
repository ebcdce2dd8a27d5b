"""Times allocations in a process of its own: `python -m benchmarks.gpu.allocations JSON RESULT`.

JSON: `{"kind": "native", "device": "cuda", "library": PATH, "pairs": 20000, "rounds": 7}`. RESULT
gets nanoseconds for each pair of allocation and release: `c10_1MiB` called from C++, `empty_1MiB`
by `torch.empty`, which is what Python pays in all.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

SIZES = {"512B": 512, "64KiB": 64 << 10, "1MiB": 1 << 20, "8MiB": 8 << 20, "256MiB": 256 << 20}
HELD = 16  # blocks beside the one that comes and goes
HELD_MOST_BYTES = 1 << 30
PYTHON_SHARE = 10  # so many times fewer pairs from Python
KINDS = ("native", "expandable", "pool")


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Return the medians over the rounds."""
    device = str(options["device"])
    if options["kind"] == "pool":
        import swapkit

        swapkit.install(device=device)
    library = ctypes.CDLL(options["library"])
    library.pair_ns.restype = ctypes.c_double
    library.pair_ns.argtypes = (
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_long,
        ctypes.c_long,
    )
    probe = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    storage: int = probe.untyped_storage()._cdata  # noqa: SLF001 - what C++ calls the storage
    samples: dict[str, list[float]] = {}
    for _ in range(int(options["rounds"])):
        for name, nbytes in SIZES.items():
            held = min(HELD, HELD_MOST_BYTES // nbytes)
            pairs = int(options["pairs"])
            ns = float(library.pair_ns(storage, nbytes, pairs, held))
            if ns >= 0:
                samples.setdefault(f"c10_{name}", []).append(ns)
            by_python = empty_ns(nbytes, pairs // PYTHON_SHARE, device)
            samples.setdefault(f"empty_{name}", []).append(by_python)
    return {name: statistics.median(values) for name, values in samples.items()}


def empty_ns(nbytes: int, pairs: int, device: str) -> float:
    begin = time.perf_counter_ns()
    for _ in range(pairs):
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    return (time.perf_counter_ns() - begin) / pairs


def main() -> None:
    text, result = sys.argv[1:]
    Path(result).write_text(json.dumps(measure(json.loads(text))), encoding="utf-8")


if __name__ == "__main__":
    main()
