"""Models of several parts: each is called by itself, as torchtitan's parts or a stage's chunks.

A list of parts becomes one module that is never called and whose children are the parts. It names
them by their numbers (`0.layers.1`), and the parts do not refer to it. A `ModuleList` that a user
passes as the model is the same.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.torch_compat.internals import submodules_of
from swapkit.errors import InvalidArgument
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Iterator


class ModelParts(torch.nn.ModuleList):
    """The parts that a user passed as a list."""


def gather_parts(model: object) -> torch.nn.Module | None:
    """Return the model that a user passed: a module, None, or a list of parts as one module.

    Raises:
        InvalidArgument: it is none of these, or a part is inside another one.
    """
    if model is None or isinstance(model, torch.nn.Module):
        return model
    parts = list(model) if isinstance(model, (list, tuple)) else []
    shown = _show_kinds(parts) if parts else show(model)
    if not parts or not all(isinstance(each, torch.nn.Module) for each in parts):
        raise InvalidArgument(
            f"model={shown}: expected a torch.nn.Module, or a list of a model's parts"
        )
    inside = _find_inside(parts)
    if inside is not None:
        inner, outer = inside
        raise InvalidArgument(
            f"model={shown}: part {inner} is inside part {outer}. Pass each part once"
        )
    return parts[0] if len(parts) == 1 else ModelParts(parts)


def _find_inside(parts: list[torch.nn.Module]) -> tuple[int, int] | None:
    """Return the numbers of a part and of another one that it is inside of; None: there is none."""
    pairs = itertools.permutations(range(len(parts)), 2)
    found = (pair for pair in pairs if _is_inside(parts[pair[0]], parts[pair[1]]))
    return next(found, None)


def _is_inside(inner: torch.nn.Module, outer: torch.nn.Module) -> bool:
    return any(each is inner for each in outer.modules())


def _show_kinds(parts: list[object]) -> str:
    return f"[{', '.join(type(each).__name__ for each in parts)}]"


def runs(module: torch.nn.Module) -> bool:
    """Return whether a module has a forward; lists of modules have none."""
    # The class first, which is fast. Then the instance: a compiled module has its own `forward`.
    absent = torch.nn.Module.forward
    return (
        type(module).forward is not absent or getattr(module.forward, "__func__", 0) is not absent
    )


def find_called(module: torch.nn.Module, model: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return the part of the model that is called if `module` is, also in its compiled form.

    A model that is called itself is its only part. None: `module` is another one, or `model` is
    None, because it is gone.
    """
    if module is model or model is None:
        return model
    if not runs(model):
        for part in submodules_of(model).values():
            called = None if part is None else find_called(module, part)
            if called is not None:
                return called
        return None
    is_compiled = type(module).__name__ == "OptimizedModule"
    return model if is_compiled and getattr(module, "_orig_mod", None) is model else None


def parts_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that are called: the model, or the parts of one that is not."""
    if runs(model):
        yield model
        return
    for part in submodules_of(model).values():
        if part is not None:
            yield from parts_of(part)
