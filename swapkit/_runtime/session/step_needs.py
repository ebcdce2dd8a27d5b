"""The budget that a whole step needs, as far as it is known when memory runs out in its middle.

What stays on the device whatever the budget: parameters, gradients, optimizer states, what the
program held when the session began, and saved tensors that are too small to move. Besides, the
largest operator seen so far with its operands. The rest of the step is not known: an operator whose
backward holds its result and two gradients of that size is assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._runtime.allocators.memory_holders import find_trained, states_of, storages_of
from swapkit._runtime.optimizer.chunked_step import attached

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit._runtime.saved.device import Device
    from swapkit._runtime.saved.swapper import Swapper

OPERANDS = 3  # of the largest size that an operator is assumed to hold at once
# States as large as the parameter that each option of torch's optimizers adds, besides `_USUAL`.
_OPTIONS = {"amsgrad": 1, "momentum": 1, "centered": 1}
_USUAL = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "ASGD": 1, "Adafactor": 0, "Muon": 0}
_OTHERS = 2  # for the kinds of Adam, and what is not known


class StepNeeds(NamedTuple):
    """What a step needs, in bytes of the device."""

    parameters: int  # with buffers
    gradients: int
    states: int  # of optimizers, those that are still to be made included
    others: int  # that the program held when the session began, and saved tensors that stay
    operator: int  # the largest one seen so far, with its operands
    update: int  # temporary copies of an optimizer that updates many parameters at once

    @property
    def budget_bytes(self) -> int:
        """The smallest budget that is enough for the whole step, as far as it is known."""
        held = self.parameters + self.gradients + self.states + self.others
        return held + max(self.operator, self.update)

    @property
    def are_states_largest(self) -> bool:
        """Whether optimizer states take more than parameters and gradients do."""
        return self.states > max(self.parameters, self.gradients)


def find_needs(swapper: Swapper, asked_bytes: int, began_bytes: int) -> StepNeeds:
    """Return what a session's step needs. Any thread, in the middle of an allocation.

    Args:
        swapper: the session's.
        asked_bytes: the size of the request that failed; 0: there is none.
        began_bytes: the bytes in use when the session began.
    """
    device = swapper.device
    trained = swapper.trained() or find_trained()
    models = [each for each in trained if isinstance(each, torch.nn.Module)]
    optimizers = [each for each in trained if isinstance(each, torch.optim.Optimizer)]
    parameters, buffers = _list_tensors(models, optimizers)
    trainable = [each for each in parameters if each.requires_grad]
    own_bytes = _add_up([*parameters, *buffers], device)
    state_bytes = _add_up(states_of(optimizers), device)
    resident = swapper.resident_sizes()
    small_bytes = sum(each for each in resident if each < swapper.evictor.min_bytes)
    given = 0 if device.pool is None else device.pool.stats().get("largest_given_bytes", 0)
    return StepNeeds(
        parameters=own_bytes,
        gradients=_add_up(trainable, device),
        states=state_bytes + sum(_count_missing(each, device) for each in optimizers),
        others=max(0, began_bytes - own_bytes - state_bytes) + small_bytes,
        operator=OPERANDS * max([asked_bytes, given, *resident]),
        update=sum(_count_temporary(each, device) for each in optimizers),
    )


def _list_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters and the buffers."""
    parameters: list[torch.Tensor] = [each for model in models for each in model.parameters()]
    for optimizer in optimizers:
        parameters += [each for group in optimizer.param_groups for each in group["params"]]
    return parameters, [each for model in models for each in model.buffers()]


def _add_up(tensors: Iterable[torch.Tensor], device: Device) -> int:
    """Return the bytes of the tensors' storages on a device, each once."""
    sizes = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        for storage in storages_of(tensor, device)
    }
    return sum(sizes.values())


def _count_missing(optimizer: torch.optim.Optimizer, device: Device) -> int:
    """Return the bytes of the states that an optimizer has not made yet."""
    if attached(optimizer) is not None:  # they live on the host
        return 0
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    trainable = [each for each in parameters if each.requires_grad]
    if all(each in optimizer.state for each in trainable):
        return 0
    wanted = 0
    for group in optimizer.param_groups:
        factor = _USUAL.get(type(optimizer).__name__, _OTHERS)
        factor += sum(count for name, count in _OPTIONS.items() if group.get(name))
        wanted += factor * _add_up((each for each in group["params"] if each.requires_grad), device)
    return max(0, wanted - _add_up(states_of([optimizer]), device))


def _count_temporary(optimizer: torch.optim.Optimizer, device: Device) -> int:
    """Return the bytes of temporary copies of all parameters of a group, where torch makes them."""
    sizes = [0]
    for group in optimizer.param_groups:
        is_foreach = group.get("foreach")
        is_usual = is_foreach is None and not group.get("fused") and device.name.type != "cpu"
        if is_foreach or is_usual:
            sizes.append(_add_up(group["params"], device))
    return max(sizes)
