"""Which plan fits which steps."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.torch_compat.internals import pytree, submodules_of
from swapkit.errors import PlanMismatch
from swapkit.planning.selection.given import SWITCHED
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

# Of the limit: more memory in use before a step than this, beside what was in use before the
# recorded one, is another situation.
HEAVIER = 1 / 256
# At modules, before it is counted which of them were seen.
MOST_LOOKS = 1 << 14


def sign(module: torch.nn.Module, inputs: object) -> str:
    """Return text that is the same for steps that a model is given the same kind of inputs in.

    And in which the same modules train: what a norm changes besides its results, no event shows.
    Those that do not as the model does stand at the end: plans that were saved before have no such
    part, and are followed all the same (`planning/selection/given.py`).
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


def find_form(inputs: object, signature: str) -> tuple[str, int]:
    """Return what is the same for inputs that differ in their sizes only, and their elements.

    Args:
        inputs: of the model.
        signature: of the step with them (`sign`).
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
    """Return whether all modules train as the model does; False: maybe not.

    Once a step, over all modules. A set of those that were seen would take longer than the rest.
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
    return False  # so many, or one is inside of itself


def _find_switched(module: torch.nn.Module) -> list[int]:
    """Return which modules train where the model does not, or the reverse: places in a walk."""
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
    """Return a plan whose predicted step takes so many times as long, and its bound, too."""
    if plan.prediction is None or factor == 1.0:
        return plan
    seconds = plan.prediction.seconds * factor
    bound_seconds = None if plan.bound_seconds is None else plan.bound_seconds * factor
    host_seconds = plan.prediction.host_seconds * factor
    prediction = replace(plan.prediction, seconds=seconds, host_seconds=host_seconds)
    return replace(plan, prediction=prediction, bound_seconds=bound_seconds)


def check_fit(trace: Trace, plan: Plan, model: torch.nn.Module | None, limit_bytes: int) -> None:
    """Refuse a plan that cannot be for a model and a budget.

    Raises:
        PlanMismatch: says what does not fit.
    """
    if plan.budget_bytes > limit_bytes:
        raise PlanMismatch(
            f"the plan is for a budget of {format_bytes(plan.budget_bytes)}, more than "
            f"{format_bytes(limit_bytes)}: plan again, or give the plan's budget"
        )
    if model is None:
        raise PlanMismatch("a plan needs its model: give swapkit.budget(limit, model, ...)")
    known = {"", type(model).__name__, *(path for path, _ in model.named_modules())}
    for storage in trace.storages:
        if storage.is_saved and not _is_known(storage.module, known):
            raise PlanMismatch(
                f"the plan is for another model: there {storage.module} saves tensors, and "
                f"{type(model).__name__} has no such module"
            )


def _is_known(path: str, known: set[str]) -> bool:
    """Whether a model has a module, or the one in whose forward it was made."""
    return path in known or path.rpartition(".")[0] in known - {""}


def is_heavier(began_bytes: int, recorded_bytes: int, limit_bytes: int) -> bool:
    """Return whether a step began with so much more in use than the recorded one that it differs.

    Args:
        began_bytes: in use at its beginning.
        recorded_bytes: those of the recorded one (`Trace.bytes_before`).
        limit_bytes: the budget.
    """
    return began_bytes > recorded_bytes + int(limit_bytes * HEAVIER)
