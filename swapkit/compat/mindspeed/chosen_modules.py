"""`swap_activation_modules`, `recompute_modules`: choices for the modules that a plan names.

Source:
    MindSpeed, `fsdp/memory`: names, arguments and patterns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from swapkit._runtime.model.model_parts import runs
from swapkit._runtime.user_choices.wrapping import make_part
from swapkit.compat.mindspeed.module_patterns import find_modules
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument
from swapkit.registry import Choice, Recompute, Source, Swap
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from swapkit._runtime.user_choices.part import Part

_log = get_logger(__name__)
_Model = TypeVar("_Model", bound="torch.nn.Module")


def swap_activation_modules(model: _Model, plan: Iterable[str]) -> _Model:
    """Swap the activations of the modules that a plan names.

    Same as `swapkit.offload` for each module: the tensors that it saves for backward move to the
    host and back. (In MindSpeed only the first input moves.) If a module is recomputed, its inputs
    are all that it saves, so these move: see `swap_inputs` of `swapkit.checkpoint`.

    Args:
        model: the model.
        plan: patterns of module paths: `*` is any text, `?` a character, `{*}` a number, `{a-b}` a
            number from a to b. A pattern that matches nothing is logged.

    Returns:
        The model.

    Raises:
        InvalidArgument: `plan` is not a list of patterns, or a pattern is malformed.
    """
    found, unmatched = find_modules(model, plan)
    for pattern in unmatched:
        _log.warning(
            "no module of %s matches %r: nothing is swapped", type(model).__name__, pattern
        )
    for part in _parts_of(found):
        recompute = part.judgement.recompute
        swap = Swap(min_bytes=read_environment().min_swap_bytes)
        what = swap if recompute is None else replace(recompute, swap_inputs=True)
        part.add(Choice(source=Source.PATTERN, what=what))
    return model


def recompute_modules(model: _Model, plan: Iterable[str]) -> _Model:
    """Recompute the modules that a plan names in backward.

    Same as `swapkit.checkpoint` for each module. If a module's activations are swapped, too, its
    inputs move to the host. Unlike in MindSpeed, `past_key_values` is passed on unchanged.

    Args:
        model: the model.
        plan: patterns of module paths; see `swap_activation_modules`.

    Returns:
        The model.

    Raises:
        InvalidArgument: nothing matches, `plan` is not a list of patterns, or a pattern is
            malformed.
    """
    found, _ = find_modules(model, plan)
    parts = _parts_of(found)
    if not parts:
        raise InvalidArgument(
            f"plan={list(plan)!r} matches no module of {type(model).__name__} that has a forward"
        )
    for part in parts:
        what = Recompute(swap_inputs=part.judgement.swap is not None)
        part.add(Choice(source=Source.PATTERN, what=what))
    return model


def _parts_of(modules: dict[str, torch.nn.Module]) -> list[Part]:
    """Return the parts of modules; a list of modules never runs, so it has none."""
    for path in modules:
        _log.info("choosing for module %r", path)
    return [make_part(module) for module in modules.values() if runs(module)]
