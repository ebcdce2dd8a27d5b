"""Hints for a user whose session runs out of memory, and the budget that the step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from swapkit._runtime.allocators.memory_holders import find_trained, states_of, storages_of
from swapkit._runtime.control.plan_status import PlanStatus
from swapkit._runtime.control.rank_alarm import ALL
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.model.ranks import count_node_ranks, count_ranks
from swapkit._runtime.optimizer.chunked_step import attached
from swapkit._runtime.saved.device import Device
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.torch_compat.internals import storage_address
from swapkit.planning.planner import POLICIES, Policy, find_floor
from swapkit.reporting.text import format_per_rank
from swapkit.units import format_bytes, format_limit

# ---- step needs ----------------------------------------------------------------------------------
#
# The budget that a whole step needs, as far as it is known when memory runs out in its middle.
#
# What stays on the device whatever the budget: parameters, gradients, optimizer states, what the
# program held when the session began, and saved tensors that are too small to move. Besides, the
# largest operator seen so far with its operands. The rest of the step is not known: an operator
# whose backward holds its result and two gradients of that size is assumed.

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
        parameters=max(0, own_bytes - swapper.mover.held[0]),  # without those that leave
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
        storage_address(storage): storage.nbytes()
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


# ---- hints ---------------------------------------------------------------------------------------
#
# Hints for a user whose session runs out of memory.

SPARE = 50  # of a budget: one part of so many is left for pieces that are too small


class Shortage(NamedTuple):
    """An allocation that failed, in bytes."""

    needed_bytes: int  # in use, and the request
    began_bytes: int = 0  # in use when the session began
    spare_bytes: int = 0  # that plans leave free
    planned_bytes: int = 0  # the smallest budget with a plan for the recorded step; 0: not known


def list_hints(
    swapper: Swapper,
    config: SessionConfig,
    shortage: Shortage,
    advice: Sequence[Callable[[int], str]],
) -> list[str]:
    """Return what a session's user can try. Any thread, in the middle of an allocation.

    Args:
        swapper: of the session.
        config: its options.
        shortage: of the allocation.
        advice: hints of the code that opened the session, given a budget in bytes that fits; they
            come first.
    """
    needs, budget_bytes = _find_budget(swapper, config.limits.budget_bytes, shortage)
    hints = [each(budget_bytes) for each in advice]
    if swapper.mover.host_is_full:
        hints.append(_advise_host(swapper))
    if _count_region_bytes(swapper):
        hints.append(
            "compile smaller blocks, such as each layer (`layer.compile()`) instead of the model: "
            "the weights of one compiled region have to fit at once"
        )
    hints += _advise_budget(needs, budget_bytes)
    if config.on_oom != ALL and count_ranks() > 1:
        hints.append(
            "the other ranks wait for this one in their next collective until the process group's "
            f"timeout, unless this process ends: on_oom={ALL!r} makes them fail at once, with this "
            "text"
        )
    return hints


def _find_budget(swapper: Swapper, limit_bytes: int, shortage: Shortage) -> tuple[StepNeeds, int]:
    """Return what the whole step needs as far as it is known, and a budget for it in bytes."""
    asked_bytes = max(0, shortage.needed_bytes - swapper.in_use_bytes())
    needs = find_needs(swapper, asked_bytes, shortage.began_bytes)
    # A session's plans leave some granules free, and pieces of memory may be too small.
    least_bytes = needs.budget_bytes + needs.budget_bytes // SPARE + shortage.spare_bytes
    return needs, max(least_bytes, shortage.needed_bytes, shortage.planned_bytes, limit_bytes + 1)


def _advise_budget(needs: StepNeeds, budget_bytes: int) -> list[str]:
    """Return the budget in words, and how to need less or to know more."""
    parts = [
        f"{format_bytes(nbytes)} {name}"
        for nbytes, name in (
            (needs.parameters, "parameters"),
            (needs.gradients, "gradients"),
            (needs.states, "optimizer states"),
            (needs.others, "others"),
            (needs.operator, "for the largest operator so far"),
        )
        if nbytes
    ]
    hints = [
        f"a budget of at least {format_limit(budget_bytes)}, for the step as far as it is known "
        f"({', '.join(parts)}), or a smaller batch or sequence"
    ]
    if needs.are_states_largest:
        hints.append(
            "swapkit.offload(optimizer): its states, the largest part, then live on the host"
        )
    hints.append("swapkit estimate train.py: its smallest budget, and its step time by budget")
    return hints


def find_planned_bytes(status: PlanStatus, policy: str | Policy) -> int:
    """Return the smallest budget with a plan for the recorded step; 0: it is not known.

    Args:
        status: of the search for a plan.
        policy: of the session.
    """
    if status.trace is None or status.machine is None or policy not in POLICIES:
        return 0
    return find_floor(status.trace, status.machine, policy)


def list_facts(swapper: Swapper) -> list[str]:
    """Return sentences about what a session could not free. Any thread, as `list_hints`."""
    kept_bytes = sum(swapper.resident_sizes())
    region_bytes = _count_region_bytes(swapper)
    saved = (
        f"{format_bytes(kept_bytes)} of saved tensors remain on the device: the running operator "
        "or other references hold them, or they are smaller than min_swap_bytes."
    )
    weights = (
        f"{format_bytes(region_bytes)} of weights are used by a compiled region that runs: all "
        "weights of a region come at its entry, and stay until its end."
    )
    return [text for nbytes, text in ((kept_bytes, saved), (region_bytes, weights)) if nbytes]


def _count_region_bytes(swapper: Swapper) -> int:
    """Return the bytes of the weights that leave the device and that compiled regions use now."""
    _, _, _, region_bytes, _ = swapper.mover.held
    return region_bytes


def _advise_host(swapper: Swapper) -> str:
    scheduler, ranks = swapper.scheduler, count_node_ranks(waits=False)
    limit_bytes = scheduler.host_limit_bytes
    if limit_bytes is None:
        taken = format_per_rank(scheduler.stats().host_reserved_bytes, ranks)
        return f"the host has no room for more copies than {taken}: pass a folder as disk="
    wanted_bytes = limit_bytes + sum(swapper.resident_sizes())
    whole = "" if ranks == 1 else f" per rank ({format_bytes(ranks * wanted_bytes)} in all)"
    return (
        f"the host has no room for more copies than {format_per_rank(limit_bytes, ranks)}: raise "
        f"host_limit, e.g. to {format_limit(wanted_bytes)}{whole}"
    )
