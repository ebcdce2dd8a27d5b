"""Compiled models within a budget: reserved bytes, bits, compilations, step times, on the CPU.

A transformer, a convolutional net (batch norm, channels last), a mixture of experts and GPT-2 of
`transformers`, each compiled as a whole, block by block, and with a graph break in the middle. A
budget is a share of the memory of a plain compiled step beyond parameters and optimizer states. The
same compiled model trains plainly and in all sessions.

- matrix: most bytes reserved from the first step on, over the budget; whether the whole state has
  the bits of a compiled model without swapkit, in a process of its own; graphs that the session
  compiled; its stage, and rescues of its last steps; measured over predicted bytes and seconds.
- least: the smallest budget, in per cent of the eager step, that trains without running out of
  memory: eager, and compiled as a whole.
- torch: beside `torch._functorch.config.activation_memory_budget` at 1, 0.8, 0.5 and 0.3: its peak,
  whether it has the bits of 1, and its step; and the step of a session with that peak as the
  budget, which has the bits of 1.
- overhead: a step without a session, with the operators that pack and unpack over without them, in
  turns, in CPU time of all threads.

`--json FILE` writes one flat object: `matrix_MODEL_KIND_BACKEND_80_reserved`, `..._same`, ...
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as splits
from torch._inductor import config as inductor

import swapkit
from swapkit.testing import planning_at_once

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._compiled_models import KINDS, MODELS, Training, make_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BACKENDS = ("inductor", "aot_eager")
PERCENTS = (80, 60, 40, 25)
STEPS, LAST = 20, 5
SHARES = (1.0, 0.8, 0.5, 0.3)  # of torch's activation_memory_budget
PAIRS = 10  # of measurements of overhead
MIB = 1 << 20
RESERVED = "reserved_bytes.all.peak"

Figures = dict[str, Any]


def memory(key: str) -> int:
    return swapkit.memory_stats()[key]


def train_plainly(training: Training) -> Figures:
    """Train without a session; return the bytes between and within steps, and a step's seconds."""
    training.restart()
    training.step()  # compiles
    training.restart()
    seconds = []
    for step in range(STEPS):
        if step == STEPS - LAST:
            gc.collect()
            swapkit.reset_peak_memory_stats()
        began = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - began)
    return {
        "peak_bytes": memory("allocated_bytes.all.peak"),
        "between_bytes": memory("allocated_bytes.all.current"),
        "seconds": statistics.median(seconds[-LAST:]),
        "digest": training.digest(),
    }


def train_within(training: Training, budget_bytes: int, steps: int = STEPS) -> Figures:
    """Train in a session; return what it took in its last steps, or `failed`."""
    training.restart()
    gc.collect()
    graphs = _count_graphs()
    seconds, cpu_seconds = [], []
    try:
        with swapkit.budget(budget_bytes, training.model, training.optimizer) as session:
            with planning_at_once():
                for step in range(steps):
                    if step == steps - LAST:
                        rescues = session.stats.oom_rescues
                        reserved_bytes = session.stats.peak_bytes
                        swapkit.reset_peak_memory_stats()
                    began, cpu_began = time.perf_counter(), time.thread_time()
                    training.step()
                    seconds.append(time.perf_counter() - began)
                    cpu_seconds.append(time.thread_time() - cpu_began)
            stats = session.stats
            predicted_bytes, measured = stats.predicted_peak_bytes, "allocated_bytes.all.peak"
            if stats.predicted_reserved_bytes:  # at planned addresses: what the budget counts
                predicted_bytes, measured = stats.predicted_reserved_bytes, RESERVED
            found: Figures = {
                "reserved": max(reserved_bytes, stats.peak_bytes) / budget_bytes,
                "stage": session.stage,
                "rescues": stats.oom_rescues - rescues,
                "seconds": statistics.median(seconds[-LAST:]),
                "cpu_seconds": statistics.median(cpu_seconds[-LAST:]),
                "swapped_bytes": stats.swapped_out_bytes // steps,
            }
            if predicted_bytes and stats.predicted_step_seconds:
                found["peak_error"] = memory(measured) / predicted_bytes - 1  # of the last steps
                found["seconds_error"] = found["seconds"] / stats.predicted_step_seconds - 1
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).partition("\n")[0]}
    found["graphs"] = _count_graphs() - graphs
    found["digest"] = training.digest()
    return found


def _count_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# ---- parts, each in a process of its own ---------------------------------------------------------


def run_reference(name: str, kind: str, backend: str) -> Iterator[Figures]:
    """Yield the digest of a compiled model without swapkit."""
    training = make_training(name, kind, backend)
    for _ in range(STEPS):
        training.step()
    yield {"digest": training.digest()}


def run_matrix(name: str, kind: str, backend: str, percents: Sequence[int]) -> Iterator[Figures]:
    """Yield the plain step's figures, then those of each budget."""
    swapkit.install(device="cpu")
    training = make_training(name, kind, backend)
    plain = train_plainly(training)
    yield plain
    between, peak = plain["between_bytes"], plain["peak_bytes"]
    for percent in percents:
        yield train_within(training, between + (peak - between) * percent // 100)


def run_least(name: str, backend: str, bytes_of_eager: Sequence[int]) -> Iterator[Figures]:
    """Yield the least per cent of the eager step's bytes that trains; 1 % apart."""
    swapkit.install(device="cpu")
    training = make_training(name, "whole", backend)
    plain = train_plainly(training)
    between, peak = bytes_of_eager or (plain["between_bytes"], plain["peak_bytes"])
    fails, trains = 0, 100
    while trains - fails > 1:
        percent = (fails + trains) // 2
        found = train_within(training, between + (peak - between) * percent // 100, LAST)
        fails, trains = (percent, trains) if "failed" in found else (fails, percent)
    yield {"percent": trains, "between_bytes": between, "peak_bytes": peak}


def run_share(name: str, share: float) -> Iterator[Figures]:
    """Yield the plain step of a model that torch has split for a share of its saved bytes."""
    swapkit.install(device="cpu")
    with splits.patch(activation_memory_budget=share), _without_operators():
        training = make_training(name, "whole", "inductor")
        found = train_plainly(training)
        began = time.thread_time()
        for _ in range(LAST):
            training.step()
        found["cpu_seconds"] = (time.thread_time() - began) / LAST
    yield found


def run_sessions(name: str, peaks_bytes: Sequence[int]) -> Iterator[Figures]:
    """Yield the session with each peak, in bytes beyond those between steps, as its budget."""
    swapkit.install(device="cpu")
    training = make_training(name, "whole", "inductor")
    between_bytes = train_plainly(training)["between_bytes"]
    for peak_bytes in peaks_bytes:
        yield train_within(training, between_bytes + peak_bytes)


def run_overhead(name: str) -> Iterator[Figures]:
    """Yield the CPU time of steps with the operators over that without, a pair at a time."""
    swapkit.install(device="cpu")
    without = make_training(name, "whole", "")
    # Options of its own keep Dynamo from taking the other model's code.
    without.model.compile(backend="inductor", options={"custom_partitioner_fn": None})
    with_them = make_training(name, "whole", "inductor")
    without.step()
    with_them.step()
    ratios = []
    for pair in range(PAIRS):
        seconds = {}
        for training in (without, with_them)[:: 1 if pair % 2 else -1]:
            began = time.process_time()
            for _ in range(LAST):
                training.step()
            seconds[id(training)] = time.process_time() - began
        ratios.append(seconds[id(with_them)] / seconds[id(without)])
    yield {"ratio": statistics.median(ratios)}


@contextlib.contextmanager
def _without_operators() -> Iterator[None]:
    with inductor.patch(custom_partitioner_fn=None):
        yield


PARTS: dict[str, Callable[..., Iterator[Figures]]] = {
    "reference": run_reference,
    "matrix": run_matrix,
    "least": run_least,
    "share": run_share,
    "sessions": run_sessions,
    "overhead": run_overhead,
}


def run(part: str, *args: object, **environment: str) -> list[Figures]:
    """Run a part in a process of its own; one that fails yields less."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--part", json.dumps([part, *args])]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        found.append({"failed": done.stderr.strip().rpartition("\n")[2]})
    return found


# ---- tables --------------------------------------------------------------------------------------


def print_matrix(names: Sequence[str], percents: Sequence[int], figures: Figures) -> None:
    print(
        f"{'model':<12} {'compiled':<7} {'backend':<10} {'budget':>6} {'reserved':>9} {'bits':>5} "
        f"{'graphs':>7} {'rescues':>8} {'peak':>7} {'time':>7} {'of plain':>9}  stage"
    )
    for name, kind, backend in itertools.product(names, KINDS, BACKENDS):
        (reference,) = run("reference", name, kind, backend, SWAPKIT_COMPILE="0")
        plain, *cells = run("matrix", name, kind, backend, percents)
        if "failed" in plain:
            cells = [plain for _ in percents]
        for percent, cell in zip(percents, cells, strict=False):
            start = f"{name:<12} {kind:<7} {backend:<10} {percent:5}%"
            key = f"matrix_{name}_{kind}_{backend}_{percent}"
            if "failed" in cell:
                figures[f"{key}_failed"] = cell["failed"]
                print(f"{start} {cell['failed']}", flush=True)
                continue
            cell["same"] = reference["digest"] == plain["digest"] == cell.pop("digest")
            cell["time"] = cell["seconds"] / plain["seconds"]
            figures.update({f"{key}_{each}": value for each, value in cell.items()})
            peak = cell.get("peak_error", math.nan)
            error = cell.get("seconds_error", math.nan)
            print(
                f"{start} {cell['reserved']:9.1%} {'yes' if cell['same'] else 'NO':>5} "
                f"{cell['graphs']:7} {cell['rescues']:8} {peak:7.1%} {error:7.1%} "
                f"{cell['time']:9.2f}  {cell['stage']}",
                flush=True,
            )


def print_least(names: Sequence[str], figures: Figures) -> None:
    print(f"\n{'smallest budget':<16} {'eager':>7} {'aot_eager':>10} {'inductor':>9}")
    for name in names:
        (eager,) = run("least", name, "", [])
        least = {"eager": eager["percent"]}
        for backend in BACKENDS:
            (found,) = run("least", name, backend, [eager["between_bytes"], eager["peak_bytes"]])
            least[backend] = found["percent"]
        figures.update({f"least_{name}_{way}": percent for way, percent in least.items()})
        print(
            f"{name:<16} {least['eager']:6}% {least['aot_eager']:9}% {least['inductor']:8}%",
            flush=True,
        )


def print_shares(names: Sequence[str], figures: Figures) -> None:
    print(
        f"\n{'activation_memory_budget':<28} {'peak MiB':>9} {'bits':>5} {'step':>8} {'CPU':>8}   "
        f"{'session: peak':>13} {'step':>8} {'CPU':>8}  stage"
    )
    for name in names:
        theirs = [run("share", name, share)[0] for share in SHARES]
        peaks = [each["peak_bytes"] - each["between_bytes"] for each in theirs]
        for share, peak, their, our in zip(
            SHARES, peaks, theirs, run("sessions", name, peaks), strict=True
        ):
            same = their["digest"] == theirs[0]["digest"]
            start = (
                f"{name:<12} {share:<15} {peak / MIB:9.1f} {'yes' if same else 'NO':>5} "
                f"{their['seconds']:8.4f}"
            )
            key = f"torch_{name}_{share}"
            figures[f"{key}_peak_bytes"] = peak
            figures[f"{key}_same"] = same
            figures[f"{key}_seconds"] = their["seconds"]
            if "failed" in our:
                print(f"{start} {their['cpu_seconds']:8.4f}   {our['failed']}", flush=True)
                continue
            figures[f"{key}_session_seconds"] = our["seconds"]
            print(
                f"{start:<52} {their['cpu_seconds']:8.4f}   {our['reserved']:13.1%} "
                f"{our['seconds']:8.4f} {our['cpu_seconds']:8.4f}  {our['stage']}",
                flush=True,
            )


def print_overhead(names: Sequence[str], figures: Figures) -> None:
    print(f"\n{'without a session':<20} {'CPU time with the operators':>28}")
    for name in names:
        (found,) = run("overhead", name)
        figures[f"overhead_{name}"] = found["ratio"]
        print(f"{name:<20} {found['ratio']:28.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--percents", default=",".join(map(str, PERCENTS)))
    parser.add_argument("--tables", default="matrix,least,torch,overhead")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of this program, as JSON
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        part, *args = json.loads(options.part)
        for figures in PARTS[part](*args):
            print(json.dumps(figures), flush=True)
        return
    names, found = options.models.split(","), Figures()
    tables = options.tables.split(",")
    if "matrix" in tables:
        print_matrix(names, [int(each) for each in options.percents.split(",")], found)
    if "least" in tables:
        print_least(names, found)
    if "torch" in tables:
        print_shares(names, found)
    if "overhead" in tables:
        print_overhead(names, found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
