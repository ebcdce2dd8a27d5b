"""The pool beside torch's native allocator and its expandable segments.

1. Nanoseconds for each pair of allocation and release, called as tensors call (`c10`), and by
   `torch.empty` from Python. Each allocator in processes of its own, which take turns.
2. A recorded training step: bytes reserved for each byte in use, at the peak.
3. What a GiB costs that is asked of the driver: plain allocations, and virtual memory in granules.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import driver
from benchmarks.gpu.allocations import KINDS, SIZES
from benchmarks.gpu.configurations import Setup
from benchmarks.gpu.context import ROOT
from benchmarks.gpu.measure import is_cuda, median_of
from benchmarks.gpu.process import python, run_process
from benchmarks.gpu.report import Check, ratio_of
from benchmarks.gpu.trainer import FINISHED

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.context import Context

SOURCE = Path(__file__).parent / "native" / "allocate.cpp"
PROCESS_SECONDS = 60.0
ENVIRONMENTS = {
    "native": {},
    "expandable": {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    },
    "pool": {},
}
DRIVER_ROUNDS = 7
Figures = dict[str, Any]


def compile_library(folder: Path) -> Path:
    """Compile what calls the allocators.

    Raises:
        RuntimeError: the compiler failed.
    """
    import torch

    torch_folder = Path(torch.__file__).parent
    library = folder / "allocate.so"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # noqa: SLF001 - torch has no public name for it
    command = [
        *os.environ.get("CXX", "g++").split(),
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{torch_folder / 'include'}",
        str(SOURCE),
        *("-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{SOURCE.name} did not compile:\n{done.stderr}")
    return library


def run_kind(context: Context, kind: str, module: str, arguments: str) -> Figures | None:
    """Run a module's process over an allocator; return what it found."""
    folder = context.output / "runs" / context.report.part
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"{module}-{kind}.json"
    result.unlink(missing_ok=True)
    command = python("-m", f"benchmarks.gpu.{module}", arguments, result)
    done = run_process(
        command,
        seconds=min(PROCESS_SECONDS, context.seconds_left()),
        log=folder / f"{module}-{kind}.log",
        cwd=ROOT,
        environment=ENVIRONMENTS[kind],
    )
    if result.exists():
        found: Figures = json.loads(result.read_text(encoding="utf-8"))
        return found
    context.report.note(f"{module} over {kind} failed: {done.describe()}")
    return None


def in_turns(run: Callable[[str], Figures | None], *, twice: bool) -> dict[str, list[Figures]]:
    """Run every kind, and again in reverse order; return what each found."""
    found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    for kind in (*KINDS, *(reversed(KINDS) if twice else ())):
        figures = run(kind)
        if figures is not None:
            found[kind].append(figures)
    return found


def measure_calls(context: Context) -> None:
    """Time allocations over each allocator."""
    options = {
        "device": context.device,
        "library": str(compile_library(context.output)),
        "pairs": 500 if context.dry else 20_000,
        "rounds": 2 if context.dry else 7,
    }

    def run(kind: str) -> Figures | None:
        return run_kind(context, kind, "allocations", json.dumps(options | {"kind": kind}))

    found = in_turns(run, twice=not (context.dry or context.quick))
    for caller in ("c10", "empty"):
        for size in SIZES:
            ns = {
                kind: median_of(
                    run[f"{caller}_{size}"] for run in runs if f"{caller}_{size}" in run
                )
                for kind, runs in found.items()
            }
            ratio = ratio_of(ns["pool"], ns["native"])
            context.report.row(
                "an allocation and its release; ratio: pool to native",
                f"{caller}_{size}",
                {f"{kind}_ns": ns[kind] for kind in KINDS} | {"ratio": ratio},
            )
            if not context.dry:
                text = f"{caller} {size}: pool / native"
                check = Check(name=f"{caller}_{size}", text=text, value=ratio, at_most=1.0)
                context.report.check(check)


def measure_step(context: Context) -> None:
    """Train over each allocator."""

    def run(kind: str) -> Figures | None:
        setup = Setup(
            shape="tiny" if context.dry else "1b_4k",
            method="swapkit" if kind == "pool" else "plain",
            device=context.device,
            timed_steps=3 if context.dry or context.quick else 8,
        )
        return run_kind(context, kind, "trainer", setup.dump())

    found = in_turns(run, twice=not (context.dry or context.quick))
    standard: float | None = None
    for kind in KINDS:
        row = row_of_step(context, kind, found[kind])
        standard = row["step_ms"] if kind == "native" else standard
        row["step_ratio"] = ratio_of(row["step_ms"], standard)
        context.report.row("a training step; step ratio: to native", f"step_{kind}", row)


def row_of_step(context: Context, kind: str, runs: list[Figures]) -> Figures:
    """Return the row of an allocator; what failed becomes a note."""
    for failed in (run for run in runs if run["outcome"] != FINISHED):
        context.report.note(f"training over {kind}: {failed['outcome']}")
    finished = [run for run in runs if run["outcome"] == FINISHED]
    reserved, in_use = (
        max((run[key] for run in finished if run.get(key) is not None), default=None)
        for key in ("reserved_peak_bytes", "in_use_peak_bytes")
    )
    return {
        "step_ms": median_of(ms for run in finished for ms in run["steps_ms"]),
        "step_ratio": None,
        "reserved_peak_bytes": reserved,
        "in_use_peak_bytes": in_use,
        "reserved_to_in_use_ratio": ratio_of(reserved, in_use),
    }


def measure_driver(context: Context) -> None:
    """Time what is asked of the driver."""
    taken: dict[str, list[float]] = {name: [] for name in driver.WAYS}
    given: dict[str, list[float]] = {name: [] for name in driver.WAYS}
    try:
        for name, take_us, give_us in driver.measure(2 if context.quick else DRIVER_ROUNDS):
            taken[name].append(take_us)
            given[name].append(give_us)
    except (OSError, driver.DriverError) as error:
        context.report.note(f"did not measure the driver's memory: {error}")
    whole = median_of(taken["alloc_20MiB"])
    for name in driver.WAYS:
        took_us = median_of(taken[name])
        context.report.row(
            "a GiB of the driver, in chunks; ratio: to plain allocations of 20 MiB",
            name,
            {
                "take_us": took_us,
                "give_us": median_of(given[name]),
                "take_ratio": ratio_of(took_us, whole),
            },
        )


def run(context: Context) -> None:
    """Measure calls, a training step, and the driver's memory."""
    if is_cuda(context.device):
        measure_driver(context)
    for what in (partial(measure_calls, context), partial(measure_step, context)):
        what()
