"""Trains programs of `_parallel_programs.py` on a rank: `_parallel_training.py PERCENTS NAMES...`.

Run by torchrun, on each rank. For each program: without a budget, in a scope that offloads all that
autograd saves, then in sessions with shares of what this rank took. Rank 0 prints a line of JSON
for each way: the figures of each rank. A rank without memory ends the program.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import swapkit
from benchmarks._parallel_parts import MIN_BYTES, SavedBytes
from benchmarks._parallel_programs import ROWS_BY_NAME, make_program
from swapkit.planning.estimates import find_smallest
from swapkit.testing import planning_at_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks._parallel_parts import Program

STEPS, SETTLED = 16, 4  # of a session; the last ones, which count
PLAIN_STEPS = 6
OFFLOADED = 3  # steps in a scope that offloads

Figures = dict[str, Any]


def digest(losses: Iterable[float], program: Program) -> str:
    """Return a digest of the losses and of all tensors that a training changed."""
    found = hashlib.sha256(repr(list(losses)).encode())
    for each in program.tensors():
        found.update(each.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def start(name: str) -> Program:
    """Make a program; nothing of an earlier one is left."""
    gc.collect()
    dist.barrier()
    return make_program(name)


def train_plainly(name: str) -> tuple[Figures, str]:
    """Train without a budget; return the figures, and the digest at the end."""
    program = start(name)
    losses, seconds = [], []
    for number in range(STEPS):
        if number == PLAIN_STEPS - 1:
            swapkit.reset_peak_memory_stats()
        began = time.perf_counter()
        losses.append(program.step())
        seconds.append(time.perf_counter() - began)
        if number == PLAIN_STEPS:
            peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    found = digest(losses, program)
    trace = swapkit.record(program.step, program.model, program.optimizers)
    figures = {
        "least_bytes": find_smallest(trace, None, 1),
        "peak_bytes": peak_bytes,
        "seconds": sorted(seconds[2:])[len(seconds[2:]) // 2],
    }
    return figures, found


def train_within(name: str, limit_bytes: int, expected: str) -> Figures:
    """Train in a session; compare the bits after its last step."""
    program = start(name)
    losses, rescues = [], []
    # A rank that fails alone would leave the others waiting.
    parts = program.model, program.optimizers
    with swapkit.budget(limit_bytes, *parts, on_oom="all") as session:
        with planning_at_once():
            for _ in range(STEPS):
                losses.append(program.step())
                rescues.append(session.stats.oom_rescues)
        same = digest(losses, program) == expected
        stats, plan, trace = session.stats, session.plan, session.trace
    return {
        "limit_bytes": limit_bytes,
        "same": same,
        "peak_bytes": stats.peak_bytes,
        "stage": session.stage,
        "is_planned": plan is not None,
        "settled_rescues": rescues[-1] - rescues[-1 - SETTLED],
        "trace_peak_bytes": None if trace is None else trace.peak_bytes,
        "predicted_seconds": stats.predicted_step_seconds,
        "seconds": stats.step_seconds,
    }


def train_offloading(name: str, limit_bytes: int) -> Figures:
    """Train in a scope that offloads all that is saved; return the median of what it moved.

    The bytes of each step are compared with those that the same step saves without the scope:
    routing differs from step to step. Backward may overtake some copies on a busy machine.
    """
    program, saved, saved_bytes = start(name), SavedBytes(), []
    program.step()
    for _ in range(OFFLOADED):
        with saved:
            program.step()
        saved_bytes.append(saved.drop())
    program, shares = start(name), []
    with swapkit.budget(limit_bytes, program.model, program.optimizers, policy="rescue") as session:
        program.step()
        for nbytes in saved_bytes:
            before = session.stats.swapped_out_bytes
            with swapkit.offload(min_bytes=MIN_BYTES):
                program.step()
            moved = session.stats.swapped_out_bytes - before
            shares.append(moved / nbytes if nbytes else 1.0)
        return {"moved_share": statistics.median(shares)}


def measure(name: str, percents: list[int]) -> Iterator[tuple[str, Figures]]:
    """Train a program in all ways; yield the name of each way and its figures."""
    plain, expected = train_plainly(name)
    yield "plain", plain
    yield "offload", train_offloading(name, 4 * plain["peak_bytes"])
    for percent in percents:
        is_limited = dist.get_rank() == 0 or not ROWS_BY_NAME[name].is_first_limited
        limit_bytes = plain["peak_bytes"] * (percent if is_limited else 200) // 100
        yield str(percent), train_within(name, limit_bytes, expected)


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("swapkit").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    swapkit.install(device="cpu")
    percents = [int(each) for each in sys.argv[1].split(",")]
    for name in sys.argv[2:]:
        for way, found in measure(name, percents):
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, found)
            if dist.get_rank() == 0:
                line = json.dumps({"name": name, "way": way, "ranks": everywhere})
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
