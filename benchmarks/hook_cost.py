"""Cost of each saved tensor for the training thread, compared with autograd without hooks.

A chain of `sin` on small tensors with one saved tensor per operator; forward and backward, one
compute thread, interleaved rounds. Microseconds for each saved tensor over the plain run:

- identity: a pair of hooks that return their argument: the minimum cost of Python hooks;
- keep: `swapkit.keep()`, which only checks versions;
- small: `swapkit.offload()` with a `min_bytes` that no tensor reaches;
- swap: `swapkit.offload()`: copied out, released, copied back (4 KiB, copies included);
- prefetch: the same, at the operators that `prefetch=4` determines;
- save_on_cpu: torch's own, which copies nothing on the CPU.

`--json FILE` writes one flat object: `identity_us`, `keep_us`, `small_us`, `swap_us`, ...
"""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import swapkit
from benchmarks._per_saved_tensor import PLAIN, measure_ways, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SAVES = 400
ELEMENTS = 1024  # 4 KiB per tensor


def identity(value: Any) -> Any:  # noqa: ANN401 - a hook takes and returns anything
    return value


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    PLAIN: contextlib.nullcontext,
    "identity": lambda: torch.autograd.graph.saved_tensors_hooks(identity, identity),
    "keep": swapkit.keep,
    "small": partial(swapkit.offload, min_bytes=8 * ELEMENTS),
    "swap": swapkit.offload,
    "prefetch": partial(swapkit.offload, prefetch=4),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
}


def step_in(
    x: torch.Tensor, gradient: torch.Tensor, scope: Callable[[], AbstractContextManager[Any]]
) -> float:
    entered = scope()
    begin = time.perf_counter()
    with entered:
        y = x
        for _ in range(SAVES):
            y = y.sin()
    y.backward(gradient)  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def measure(rounds: int) -> dict[str, float]:
    x = torch.randn(ELEMENTS, requires_grad=True)
    gradient = torch.ones(ELEMENTS)
    ways = {name: partial(step_in, x, gradient, scope) for name, scope in SCOPES.items()}
    return measure_ways(ways, rounds=rounds, saves=SAVES)


if __name__ == "__main__":
    run_command(__doc__.splitlines()[0], measure, rounds=100)
