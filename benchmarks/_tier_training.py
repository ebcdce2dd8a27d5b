"""Training of the demo's model with memory measurement: `_tier_training.py SIZE STEPS [OPTIONS]`.

OPTIONS are those of `swapkit.budget`, as JSON; without them the pool is used without a budget.
Prints one line of JSON: the pool's peak, the process's peak of resident bytes during training, the
median seconds of a step, and a digest of the parameters.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import swapkit
from benchmarks._process_memory import process_peak_bytes
from examples.language_model import SIZES, Training


def main() -> None:
    size, steps, *rest = sys.argv[1:]
    swapkit.install(device="cpu")
    training = Training(SIZES[size], seed=0, recompute=False)
    options = json.loads(rest[0]) if rest else {}
    session = swapkit.budget(**options) if options else None
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of resident bytes
    swapkit.reset_peak_memory_stats()
    seconds = []
    with session or nullcontext():
        for _ in range(int(steps)):
            begin = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - begin)
    facts = {
        "pool_peak_bytes": swapkit.memory_stats()["reserved_bytes.all.peak"],
        "resident_peak_bytes": process_peak_bytes(),
        "step_seconds": statistics.median(seconds),
        "digest": training.digest(),
        "threads": torch.get_num_threads(),
    }
    if session is not None:
        facts["host_peak_bytes"] = session.stats.host_peak_bytes
        facts["disk_peak_bytes"] = session.stats.disk_peak_bytes
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
