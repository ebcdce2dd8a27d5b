"""Overlap of transfers with computation.

One training step of a stack of MLP blocks, on the CPU with one compute thread, over a simulated
link. Its speed is set so that all copies out and back take a given share (80 %) of the plain step's
time. The ways take turns step by step:

- plain: nothing is moved;
- swapkit: `swapkit.offload()` around the forward pass, which moves all movable storages;
- swapkit n: `swapkit.offload(prefetch=n)`, released and copied back at fixed operators;
- save_on_cpu: `torch.autograd.graph.save_on_cpu` as on a device, over the same link: every saved
  tensor is copied when it is saved and when it is needed, both synchronously.

`--json FILE` writes one flat object: `plain_seconds`, `swapkit_seconds`, `swapkit_ratio`,
`swapkit_10_ratio`, `save_on_cpu_ratio`, `transfer_share`, `stall_seconds`, ...
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import swapkit
from swapkit._native.backend import Backend, CopyKind
from swapkit._runtime.process.runtime import get_runtime
from swapkit.testing import slow_link

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

DISTANCES = (4, 10)


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Training:
    """The model and its training step."""

    def __init__(self, width: int, blocks: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.inputs = torch.randn(batch, width)

    def step(self, scope: AbstractContextManager[Any]) -> float:
        """Run forward, inside `scope`, and backward; return the seconds."""
        begin = time.perf_counter()
        with scope:
            loss = self.model(self.inputs).square().mean()
        loss.backward()
        seconds = time.perf_counter() - begin
        self.model.zero_grad()
        return seconds


class SaveOnCpu(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu` over a simulated link: synchronous, one copy per saved tensor, no filter."""

    def __init__(self, link: Backend) -> None:
        def copy(source: torch.Tensor, kind: CopyKind) -> torch.Tensor:
            result = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype)
            link.copy(
                to=result.data_ptr(),
                source=source.data_ptr(),
                nbytes=source.numel() * source.element_size(),
                kind=kind,
                stream=None,
            )
            return result

        super().__init__(
            lambda tensor: copy(tensor, CopyKind.DEVICE_TO_HOST),
            lambda host: copy(host, CopyKind.HOST_TO_DEVICE),
        )


def count_bytes(training: Training) -> int:
    """Return the bytes that a step copies out and back when everything is swapped."""
    with slow_link():  # its own executor, as fast as memory
        training.step(swapkit.offload())
        return (
            2 * get_runtime().default_swapper(get_runtime().cpu).scheduler.stats().copied_out_bytes
        )


def measure(training: Training, share: float, rounds: int) -> dict[str, Any]:
    plain_seconds = statistics.median(
        training.step(contextlib.nullcontext()) for _ in range(rounds)
    )
    nbytes = count_bytes(training)
    bytes_per_s = nbytes / (share * plain_seconds)
    link = Backend.cpu(copy_bytes_per_s=int(bytes_per_s))
    scopes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "swapkit": swapkit.offload,
        **{f"swapkit_{n}": partial(swapkit.offload, prefetch=n) for n in DISTANCES},
        "save_on_cpu": lambda: SaveOnCpu(link),
    }
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    with slow_link(bytes_per_s=bytes_per_s):
        for scope in scopes.values():
            training.step(scope())
        stalled_ns = -get_runtime().default_swapper(get_runtime().cpu).scheduler.stats().stall_ns
        for _ in range(rounds):
            for name, scope in scopes.items():
                seconds[name].append(training.step(scope()))
        stalled_ns += get_runtime().default_swapper(get_runtime().cpu).scheduler.stats().stall_ns
    figures = summarize(seconds)
    return {
        "transfer_bytes": nbytes,
        "link_bytes_per_s": bytes_per_s,
        "transfer_share": nbytes / bytes_per_s / figures["plain_seconds"],
        "stall_seconds": stalled_ns / 1e9 / rounds / (1 + len(DISTANCES)),
        **figures,
    }


def summarize(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians, and the median ratios to the plain step of the same round."""
    figures = {}
    for name, values in seconds.items():
        figures[f"{name}_seconds"] = statistics.median(values)
        ratios = [a / b for a, b in zip(values, seconds["plain"], strict=True)]
        figures[f"{name}_ratio"] = statistics.median(ratios)
    return figures


def print_table(figures: dict[str, Any]) -> None:
    print(
        f"{figures['transfer_bytes'] / 2**20:.0f} MiB over a link of "
        f"{figures['link_bytes_per_s'] / 1e9:.2f} GB/s a direction: "
        f"{figures['transfer_share']:.0%} of the plain step's time"
    )
    print(f"{'':16}{'seconds':>10}{'ratio':>8}")
    for name in ("plain", "swapkit", *(f"swapkit_{n}" for n in DISTANCES), "save_on_cpu"):
        print(f"{name:16}{figures[f'{name}_seconds']:10.4f}{figures[f'{name}_ratio']:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument(
        "--share", type=float, default=0.8, help="share of the step that copies take"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    training = Training(options.width, options.blocks, options.batch)
    training.step(contextlib.nullcontext())
    figures = measure(training, options.share, options.rounds)
    print_table(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
