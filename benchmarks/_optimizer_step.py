"""Training on command: `_optimizer_step.py plain|offloaded OPTIMIZER WIDTH LAYERS`.

Both kinds use swapkit's pool. Each line on stdin is one step to train; the answer is one line of
JSON: the seconds of the whole step and of the optimizer's part, and the pool's peaks.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import swapkit

BATCH = 256
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {}),
}


class Training:
    """One model and its optimizer."""

    def __init__(self, name: str, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self._width = width
        self._model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU(), nn.LayerNorm(width))
                for _ in range(layers)
            )
        )
        kind, options = OPTIMIZERS[name]
        self.optimizer = kind(self._model.parameters(), **options)

    def step(self) -> tuple[float, float]:
        begin = time.perf_counter()
        self._model(torch.randn(BATCH, self._width)).square().mean().backward()
        middle = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin, end - middle

    def states_bytes(self) -> int:
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def main() -> None:
    kind, name, width, layers = sys.argv[1:]
    swapkit.install(device="cpu")
    training = Training(name, int(width), int(layers))
    if kind == "offloaded":
        swapkit.offload(training.optimizer)
    for _ in sys.stdin:
        swapkit.reset_peak_memory_stats()
        step_seconds, optimizer_seconds = training.step()
        stats = swapkit.memory_stats()
        figures = {
            "step_seconds": step_seconds,
            "optimizer_seconds": optimizer_seconds,
            "peak_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "states_bytes": training.states_bytes(),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
