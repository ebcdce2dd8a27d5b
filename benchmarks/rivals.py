"""swapkit beside what else saves memory in training: peak, step time, same bits, lines of code.

Each way trains the same Llama-style stack on the CPU, in processes of its own, in turn: plain, then
the others, `--rounds` times. All allocate from swapkit's pool, which counts the bytes in use;
only swapkit's rows have a limit. Lines are those of the way's function below, less its head and the
loop that all share. What needs a GPU runs in `make virtual`: torchtune, TRL, torchao, and
`save_on_cpu`, which copies nothing on the CPU. Libraries that are not installed are left out, and
named.

`--json FILE` writes one flat object of all figures.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils import checkpoint as checkpoints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import swapkit  # noqa: E402
from benchmarks.gpu.llama import Llama, Shape  # noqa: E402
from swapkit.reporting.text import format_table  # noqa: E402
from swapkit.units import format_bytes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[torch.Tensor], torch.Tensor]

SHAPE = Shape(layers=6, width=384, heads=6, key_heads=6, hidden=1024, vocabulary=4096, tokens=1024)
WARMUP, STEPS = 10, 8
HEADS = ("way", "limit", "peak", "of plain", "step", "same bits", "lines", "what it cannot do")
SHARED_LINES = 2  # of each way's function: its head, and the loop that all share

Figures = dict[str, Any]


class Training:
    """A model in float32, and how its optimizer is made."""

    def __init__(self, limit_bytes: int) -> None:
        torch.manual_seed(0)
        self.model = Llama(SHAPE).train()
        self.limit_bytes = limit_bytes
        self.optimizer: Any = None
        self.blocks = contextlib.ExitStack()  # around the loop

    def loop(self) -> Step:
        """Return the step of an ordinary loop."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        return step


# ---- ways ----------------------------------------------------------------------------------------
#
# Each returns the step.


def plain(training: Training) -> Step:
    return training.loop()


def checkpoint(training: Training) -> Step:
    training.model.run_block = partial(checkpoints.checkpoint, use_reentrant=False)
    return training.loop()


def selective_checkpoint(training: Training) -> Step:
    kept: list[Any] = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(checkpoints.create_selective_checkpoint_contexts, kept)
    run = partial(checkpoints.checkpoint, use_reentrant=False, context_fn=contexts)
    training.model.run_block = run
    return training.loop()


def fsdp2_cpu_offload(training: Training) -> Step:
    from torch.distributed import HashStore, init_process_group  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    mesh = init_device_mesh("cpu", (1,))
    for block in (*training.model.blocks, training.model):
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return training.loop()


def ramtorch(training: Training) -> Step:
    from ramtorch import OffloadModel  # type: ignore[import-not-found]

    model = training.model
    chunks = [model.embedding, *model.blocks, torch.nn.Sequential(model.norm, model.head)]
    offloaded = OffloadModel(
        chunks, device="cpu", window=2, keep_activations=True, offload_activations=True
    )
    optimizer = torch.optim.AdamW(offloaded.parameters(), lr=1e-3)

    def find_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        result: Any = offloaded.step(tokens, targets=tokens, loss_fn=find_loss)
        offloaded.flush_grads()
        optimizer.step()
        optimizer.zero_grad()
        loss: torch.Tensor = result.loss
        return loss.detach()

    return step


def deepspeed_offload(training: Training) -> Step:
    import deepspeed  # type: ignore[import-not-found]
    from torch.distributed import HashStore, init_process_group  # type: ignore[attr-defined]

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "reduce_bucket_size": 4_000_000,  # elements; by default 2 GB for this small model
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=training.model, optimizer=optimizer, config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def swapkit_budget(training: Training) -> Step:
    step = training.loop()
    session = swapkit.budget(training.limit_bytes, training.model, training.optimizer)
    training.blocks.enter_context(session)
    return step


class Way(NamedTuple):
    """A row of the table. `limit`: of which way's peak, and which share; None: there is none."""

    make: Callable[[Training], Step]
    cannot: str = ""
    limit: tuple[str, float] | None = None


WAYS = {
    "plain": Way(plain),
    "checkpoint": Way(checkpoint, "no limit; recomputes every block"),
    "selective checkpoint": Way(selective_checkpoint, "no limit; operators are named by hand"),
    "FSDP2 CPUOffloadPolicy": Way(
        fsdp2_cpu_offload, "no limit; moves weights only [1]; the optimizer steps on the CPU"
    ),
    "RamTorch OffloadModel": Way(
        ramtorch, "no limit; the model is cut into chunks by hand [1]; no loop of one's own"
    ),
    "DeepSpeed ZeRO-Offload": Way(
        deepspeed_offload,
        "no limit; moves gradients and optimizer states only [1]; the optimizer steps on the CPU",
    ),
    "swapkit at 80 %": Way(swapkit_budget, limit=("plain", 0.8)),
    "swapkit at 60 %": Way(swapkit_budget, limit=("plain", 0.6)),
    "swapkit at checkpoint's peak": Way(swapkit_budget, limit=("checkpoint", 1.0)),
}


def train(name: str, limit_bytes: int) -> Figures:
    """Train in one way, in this process."""
    swapkit.install(device="cpu")
    training = Training(limit_bytes)
    try:
        step = WAYS[name].make(training)
    except ImportError as error:
        return {"outcome": f"{error.name} is not installed"}
    generator = torch.Generator().manual_seed(1)
    times, losses = [], []
    with training.blocks:
        for number in range(WARMUP + STEPS):
            tokens = torch.randint(SHAPE.vocabulary, (1, SHAPE.tokens), generator=generator)
            if number == WARMUP:
                swapkit.reset_peak_memory_stats("cpu")
            began = time.perf_counter()
            losses.append(step(tokens))
            times.append(time.perf_counter() - began)
    digest = hashlib.sha256()
    for parameter in training.model.parameters():
        value = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(value.detach().contiguous().numpy().tobytes())
    digest.update(torch.stack(losses).numpy().tobytes())
    peak_bytes = swapkit.memory_stats("cpu")["allocated_bytes.all.peak"]
    assert not limit_bytes or peak_bytes <= limit_bytes
    return {
        "outcome": "",
        "step_ms": statistics.median(times[WARMUP:]) * 1e3,
        "peak_bytes": peak_bytes,
        "bits": digest.hexdigest(),
    }


def count_lines(way: Callable[[Training], Step]) -> int:
    """Return the lines of a way's function, without what all ways have."""
    code = [line for line in inspect.getsource(way).splitlines() if line.strip()]
    return len(code) - SHARED_LINES


def run(name: str, limit_bytes: int) -> Figures:
    command = [sys.executable, __file__, "--train", name, "--limit", str(limit_bytes)]
    variables = {**os.environ, "LOCAL_RANK": "0"}  # DeepSpeed asks for it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"outcome": lines[-1][:100] if lines else f"exit code {done.returncode}"}
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of each way, by round."""
    found: dict[str, list[Figures]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            print(f"round {number + 1}: {name} ...", file=sys.stderr)
            limit_bytes = 0
            if way.limit is not None:
                base, share = way.limit
                limit_bytes = int(found[base][0]["peak_bytes"] * share)
            found[name].append(run(name, limit_bytes) | {"limit_bytes": limit_bytes})
    return found


def describe(
    name: str, runs: list[Figures], base: list[Figures], figures: Figures
) -> tuple[str, ...]:
    """Return the row of a way, and add its figures."""
    way = WAYS[name]
    lines = count_lines(way.make)
    if runs[0]["outcome"]:
        return (name, "", "", "", "", "", str(lines), runs[0]["outcome"])
    peak_bytes = max(each["peak_bytes"] for each in runs)
    ratio = statistics.median(
        each["step_ms"] / other["step_ms"] for each, other in zip(runs, base, strict=True)
    )
    is_same = {each["bits"] for each in runs} == {base[0]["bits"]}
    figures |= {
        f"{name}: peak_bytes": peak_bytes,
        f"{name}: step_ratio": ratio,
        f"{name}: same_bits": is_same,
        f"{name}: lines": lines,
    }
    limit = format_bytes(runs[0]["limit_bytes"]) if way.limit else "none"
    part = f"{peak_bytes / max(each['peak_bytes'] for each in base):.0%}"
    same = "yes" if is_same else "NO"
    cells = (limit, format_bytes(peak_bytes), part, f"{ratio:.2f}", same, str(lines))
    return (name, *cells, way.cannot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--train", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(options.train, options.limit)))
        return
    found = compare(options.rounds)
    figures: Figures = {}
    rows = [describe(name, runs, found["plain"], figures) for name, runs in found.items()]
    print(format_table(HEADS, rows))
    print("\n[1] the copies on the host count here, since the CPU has one memory for both")
    versions = []
    for package in ("torch", "deepspeed", "ramtorch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    print(f"{', '.join(versions)}; {SHAPE}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
