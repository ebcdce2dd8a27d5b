"""What the tests of offloaded optimizer states share: optimizers, and an executor that notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.optimizer.state_slots import HostCopies, find_slots
from swapkit._runtime.saved.device import Limits
from swapkit.errors import BackendError

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.optimizer.state_slots import HostBuffer, HostCopy

KIB = 1 << 10
STATE = 64 * KIB  # bytes of one state of one parameter


class Recorder:
    """The real executor, which notes what it is asked and fails when it is told to."""

    def __init__(self, installation: Installation, host_limit_bytes: int | None = None) -> None:
        runtime = installation.runtime
        self.scheduler = runtime.cpu.new_scheduler(Limits(host_bytes=host_limit_bytes))
        self.engine = HostCopies(self.scheduler, runtime.cpu)
        self.asked: list[str] = []
        self.fails_at = 0  # the number of the call, from 1
        self.error: type[BaseException] = BackendError

    def copy_out(self, storage: torch.UntypedStorage) -> HostCopy:
        self._note("out")
        return self.engine.copy_out(storage)

    def copy_in(self, host: HostBuffer, storage: torch.UntypedStorage) -> HostCopy:
        self._note("in")
        return self.engine.copy_in(host, storage)

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if len(self.asked) == self.fails_at:
            raise self.error


def make_params(count: int = 4, *, seed: int = 0, nbytes: int = STATE) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shape = (nbytes // 4 // 64, 64)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def add_gradients(params: list[torch.nn.Parameter], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def make_adam(count: int = 4, steps: int = 1, **options: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(make_params(count), lr=0.01, **options)
    take_steps(optimizer, steps)
    return optimizer


def take_steps(optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            add_gradients(group["params"], seed=step)
        optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of the parameters and all states."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    slots = [slot for param in params for slot in find_slots(optimizer.state.get(param))]
    return [each.detach().clone() for each in [*params, *(slot.tensor for slot in slots)]]


def are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def moment(optimizer: torch.optim.Optimizer, index: int = 0) -> torch.Tensor:
    tensor: torch.Tensor = list(optimizer.state.values())[index]["exp_avg"]
    return tensor


def is_on_device(installation: Installation, tensor: torch.Tensor) -> bool:
    return installation.pool.owns(tensor.data_ptr())
