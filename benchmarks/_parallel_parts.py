"""What the programs of `parallel.py` are made of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import gelu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, LAYERS, ROWS, SEQUENCE = 128, 6, 4, 128
MICROBATCHES = 8
LEARNING_RATE = 1e-3
MIN_BYTES = 1024  # smaller storages are not moved


@dataclass(kw_only=True)
class Program:
    """A training on this rank. `step` runs one step of it and returns the loss, if it has one."""

    model: nn.Module | list[nn.Module] | None  # for `swapkit.budget`
    optimizers: list[torch.optim.Optimizer]
    forward_backward: Callable[[], float]
    modules: list[nn.Module] = field(default_factory=list)  # all of this rank

    def step(self) -> float:
        """Train one step."""
        loss = self.forward_backward()
        for each in self.optimizers:
            each.step()
        for each in self.optimizers:
            each.zero_grad()
        return loss

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of all that the training changes."""
        for module in self.modules:
            yield from map(_local, module.parameters())
            yield from map(_local, module.buffers())
        for optimizer in self.optimizers:
            inner = getattr(optimizer, "optim", optimizer)  # of ZeRO-1
            for state in inner.state.values():
                yield from (_local(each) for each in state.values() if torch.is_tensor(each))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


class Block(nn.Module):
    """A feed-forward with a residual, in float32."""

    def __init__(self, width: int = WIDTH, factor: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return made


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, factor: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, factor) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_adam(*modules: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for module in modules for each in module.parameters()]
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def make_batch(rows: int = ROWS, width: int = WIDTH, *, is_shared: bool = False) -> torch.Tensor:
    """Return a batch; of its own for each rank, unless the ranks share one model's input."""
    rank = 0 if is_shared else dist.get_rank()
    generator = torch.Generator().manual_seed(17 + rank)
    return torch.randn(rows, SEQUENCE, width, generator=generator)


def make_training(
    called: nn.Module,
    *modules: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    x: torch.Tensor | None = None,
    microbatches: int = 1,
    before: Callable[[bool], AbstractContextManager[None]] = lambda _is_last: nullcontext(),
) -> Program:
    """Return a training that calls a module, once for each microbatch."""
    batch = make_batch() if x is None else x

    def forward_backward() -> float:
        total = 0.0
        for number in range(microbatches):
            with before(number == microbatches - 1):
                out = called(batch)
                loss = (out.to_local() if hasattr(out, "to_local") else out).square().mean()
                loss.backward()
            total += float(loss.detach())
        return total

    return Program(
        model=called,
        optimizers=[optimizer or make_adam(called)],
        forward_backward=forward_backward,
        modules=list(modules) or [called],
    )


class SavedBytes:
    """Hooks that count the storages that autograd saves in a step and that go with the step.

    To move others would free nothing, because the program holds them: parameters, the batch, the
    memory into which a pipeline's stage receives.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address: they stay alive
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda each: each)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def drop(self) -> int:
        """Forget the storages that were saved; return the bytes of those that are gone then."""
        saved = [
            (StorageWeakRef(each), each.nbytes())  # type: ignore[no-untyped-call]
            for each in self._storages.values()
            if each.nbytes() >= MIN_BYTES
        ]
        self._storages.clear()
        gone: list[int] = [nbytes for ref, nbytes in saved if ref.expired()]  # type: ignore[no-untyped-call]
        return sum(gone)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "elem", tensor))
        storage = local.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return tensor
