"""What each saved tensor costs the thread that trains, beside autograd without any hooks.

A chain of `sin` on small tensors, one saved tensor an operator, forward and backward, one compute
thread; the rounds are interleaved. Microseconds for each saved tensor, over the plain run:

- identity: a pair of hooks that return what they get: the least that hooks cost from Python;
- keep: `swapkit.keep()`, which only checks versions;
- small: `swapkit.offload()` whose `min_bytes` no tensor reaches;
- swap: `swapkit.offload()`: copied out, released, copied back (4 KiB: the copies are included);
- prefetch: the same, at operators that `prefetch=4` names;
- save_on_cpu: torch's own, which copies nothing on the CPU.

`--json FILE` writes one flat object: `identity_us`, `keep_us`, `small_us`, `swap_us`, ...
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

import swapkit

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SAVES = 400
ELEMENTS = 1024  # 4 KiB a tensor


def identity(value: Any) -> Any:  # noqa: ANN401 - a hook gets and returns anything
    return value


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "identity": lambda: torch.autograd.graph.saved_tensors_hooks(identity, identity),
    "keep": swapkit.keep,
    "small": partial(swapkit.offload, min_bytes=8 * ELEMENTS),
    "swap": swapkit.offload,
    "prefetch": partial(swapkit.offload, prefetch=4),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
}


def step(x: torch.Tensor, gradient: torch.Tensor, scope: AbstractContextManager[Any]) -> float:
    begin = time.perf_counter()
    with scope:
        y = x
        for _ in range(SAVES):
            y = y.sin()
    y.backward(gradient)  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def measure(rounds: int) -> dict[str, float]:
    x = torch.randn(ELEMENTS, requires_grad=True)
    gradient = torch.ones(ELEMENTS)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, scope in SCOPES.items():
            seconds[name].append(step(x, gradient, scope()))
    plain_seconds = statistics.median(seconds["plain"])
    return {
        f"{name}_us": (statistics.median(values) - plain_seconds) / SAVES * 1e6
        for name, values in seconds.items()
        if name != "plain"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swapkit.install()
    figures = measure(options.rounds)
    for name, value in figures.items():
        print(f"{name.removesuffix('_us'):12}{value:8.2f} us a saved tensor")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
