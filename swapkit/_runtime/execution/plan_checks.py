"""Checks which steps a plan fits."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.torch_compat.internals import pytree, submodules_of
from swapkit._runtime.torch_compat.isolation import unseen
from swapkit.errors import PlanMismatch
from swapkit.planning.selection.given import SWITCHED
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

# A step is heavier than the recorded one if it begins with more bytes in use, by more than this
# share of the budget.
HEAVIER = 1 / 256
# Modules that are visited without a set of the modules seen.
MOST_LOOKS = 1 << 14


@unseen
def sign(module: torch.nn.Module, inputs: object) -> str:
    """Return a signature that is equal for steps with the same kind of inputs.

    The signature also depends on which modules are in training mode: a norm layer then updates its
    buffers, which no event shows. Modules whose mode differs from the model's form the last part.
    Old saved plans lack that part, but can still be followed (`planning/selection/given.py`).
    """
    leaves, structure = pytree.tree_flatten(inputs)
    parts = [str(structure), str(module.training)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{leaf.dtype}{tuple(leaf.shape)}{leaf.requires_grad}")
        else:
            parts.append(str(leaf) if isinstance(leaf, (bool, str)) else type(leaf).__name__)
    switched = _find_switched(module)
    end = SWITCHED + _hash(str(switched)) if switched else ""
    return _hash("\n".join(parts)) + end


@unseen
def find_form(inputs: object, signature: str) -> tuple[str, int]:
    """Return text that is equal for inputs that differ only in size, and the inputs' elements.

    Args:
        inputs: the model's inputs.
        signature: the signature of the step with these inputs (`sign`).
    """
    leaves, structure = pytree.tree_flatten(inputs)
    parts, length = [str(structure)], 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{leaf.dtype}{leaf.dim()}{leaf.requires_grad}")
            length += leaf.numel()
        else:
            parts.append(str(leaf) if isinstance(leaf, (bool, str)) else type(leaf).__name__)
    return _hash("\n".join([*parts, signature.partition(SWITCHED)[2]])), length


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _train_alike(module: torch.nn.Module) -> bool:
    """Return whether all modules have the model's training mode; False: maybe not.

    Runs once per step over all modules, so it keeps no set of the modules seen: that would take
    longer than everything else here.
    """
    is_training = module.training
    waiting: list[torch.nn.Module | None] = [module]
    for _ in range(MOST_LOOKS):
        if not waiting:
            return True
        each = waiting.pop()
        if each is None:
            continue
        if each.training != is_training:
            return False
        if submodules_of(each):
            waiting.extend(submodules_of(each).values())
    return False  # too many modules, or one contains itself


def _find_switched(module: torch.nn.Module) -> list[int]:
    """Return the modules whose training mode differs from the model's, as indices of a walk."""
    if _train_alike(module):
        return []
    seen = {id(module)}
    waiting = [module]
    switched = []
    while waiting:
        for each in submodules_of(waiting.pop()).values():
            if each is None or id(each) in seen:
                continue
            if each.training != module.training:
                switched.append(len(seen))
            seen.add(id(each))
            waiting.append(each)
    return switched


def pace(plan: Plan, factor: float) -> Plan:
    """Return a plan with its predicted times and its bound multiplied by a factor."""
    if plan.prediction is None or factor == 1.0:
        return plan
    seconds = plan.prediction.seconds * factor
    bound_seconds = None if plan.bound_seconds is None else plan.bound_seconds * factor
    host_seconds = plan.prediction.host_seconds * factor
    prediction = replace(plan.prediction, seconds=seconds, host_seconds=host_seconds)
    return replace(plan, prediction=prediction, bound_seconds=bound_seconds)


def check_fit(trace: Trace, plan: Plan, model: torch.nn.Module | None, limit_bytes: int) -> None:
    """Refuse a plan that does not fit a model and a budget.

    Raises:
        PlanMismatch: the message says what does not fit.
    """
    if plan.budget_bytes > limit_bytes:
        raise PlanMismatch(
            f"the plan is for a budget of {format_bytes(plan.budget_bytes)}, more than "
            f"{format_bytes(limit_bytes)}: plan again, or pass the plan's budget"
        )
    if model is None:
        raise PlanMismatch("a plan needs its model: call swapkit.budget(limit, model, ...)")
    known = {"", type(model).__name__, *(path for path, _ in model.named_modules())}
    for storage in trace.storages:
        if storage.is_saved and not _is_known(storage.module, known):
            raise PlanMismatch(
                f"the plan is for another model: its module {storage.module} saves tensors, but "
                f"{type(model).__name__} has no such module"
            )


def _is_known(path: str, known: set[str]) -> bool:
    """Return whether a model has a module, or the module whose forward created it."""
    return path in known or path.rpartition(".")[0] in known - {""}


def is_heavier(began_bytes: int, recorded_bytes: int, limit_bytes: int) -> bool:
    """Return whether a step began with clearly more memory in use than the recorded step.

    Args:
        began_bytes: the bytes in use when the step began.
        recorded_bytes: the same for the recorded step (`Trace.bytes_before`).
        limit_bytes: the budget.
    """
    return began_bytes > recorded_bytes + int(limit_bytes * HEAVIER)
