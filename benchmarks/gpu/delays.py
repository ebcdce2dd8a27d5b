"""Programs whose kernels are late: `python -m benchmarks.gpu.delays SCENARIO DEVICE [tiny]`.

Before each kernel of forward and of backward the device sleeps, so the host is far ahead of it: a
copy that does not wait for what it copies, or memory that is used again too early, gives other
bits. After forward, and in backward, memory is taken and filled with junk, which lands in whatever
was given up too early. Ends with status 1 if a gradient has other bits than without swapkit.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.measure import digest, is_cuda, make_stream, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

LAYERS = 12
WIDTH = 1024
ROWS, TINY_ROWS = 4096, 256
CYCLES = 3_000_000  # of the device's clock: one to two milliseconds
STEPS = 3
JUNK = 4
BUDGET_BYTES = 320 << 20  # about half of what is saved, beside all that stays
TINY_BUDGET_BYTES = {"cpu": 118 << 20, "cuda": 128 << 20}  # whose pieces are larger


def sleep(device: str) -> None:
    if is_cuda(device):
        sleep_cycles: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001 - nothing public
        sleep_cycles(CYCLES)


class Late(torch.autograd.Function):
    """Changes nothing; what follows on the stream is late, in forward and in backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        sleep(x.device.type)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        sleep(gradient.device.type)
        spoil(gradient)
        return gradient


def spoil(like: torch.Tensor) -> None:
    """Fill memory that was free with junk."""
    junk = [torch.empty_like(like).fill_(float("nan")) for _ in range(JUNK)]
    junk.clear()


class Program:
    """A stack of layers with late kernels between them."""

    def __init__(self, device: str, rows: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).to(
            device
        )
        self.inputs = torch.randn(rows, WIDTH).to(device)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-3)

    def forward(self) -> torch.Tensor:
        x = self.inputs
        for layer in self.layers:
            x = Late.apply(x)  # type: ignore[no-untyped-call]
            x = torch.tanh(layer(x)) + x
        return x.square().mean()

    def train(self, scope: Callable[[], AbstractContextManager[Any]]) -> str:
        """Return what identifies the gradients of all steps."""
        found = []
        for _ in range(STEPS):
            with scope():
                loss = self.forward()
            spoil(self.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in self.layers.parameters() if p.grad is not None]
            found.append(digest(gradients))
            gradients.clear()
            self.optimizer.step()
            self.optimizer.zero_grad()
        synchronize(self.device)
        return " ".join(found)


def run_plain(device: str, rows: int) -> str:
    return Program(device, rows).train(contextlib.nullcontext)


def run_offload(device: str, rows: int, prefetch: int | None = None) -> str:
    import swapkit

    return Program(device, rows).train(partial(swapkit.offload, prefetch=prefetch))


def run_budget(device: str, rows: int) -> str:
    """Train with room for about half of what is saved."""
    import swapkit

    program = Program(device, rows)
    limit = BUDGET_BYTES if rows == ROWS else TINY_BUDGET_BYTES[device]
    with swapkit.budget(limit, program.layers, program.optimizer, device=device):
        return program.train(contextlib.nullcontext)


def run_on_stream(device: str, rows: int) -> str:
    """Train on a stream of its own, beside a default stream that is busy."""
    if not is_cuda(device):
        return run_offload(device, rows)
    import swapkit

    program = Program(device, rows)
    stream = make_stream()
    torch.cuda.synchronize()
    sleep(device)
    with torch.cuda.stream(stream):
        found = program.train(swapkit.offload)
    torch.cuda.synchronize()
    return found


SCENARIOS: dict[str, Callable[[str, int], str]] = {
    "offload": run_offload,
    "offload_prefetch": partial(run_offload, prefetch=3),
    "budget": run_budget,
    "own_stream": run_on_stream,
}


def main() -> None:
    scenario, device, *size = sys.argv[1:]
    rows = TINY_ROWS if size or not is_cuda(device) else ROWS
    import swapkit

    swapkit.install(device=device)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    expected = run_plain(device, rows)
    if run_plain(device, rows) != expected:
        raise SystemExit("plain training is not deterministic: cannot compare")
    found = SCENARIOS[scenario](device, rows)
    if found != expected:
        raise SystemExit(f"{scenario}: other bits: {found} instead of {expected}")


if __name__ == "__main__":
    main()
