"""Warnings about entries of a configuration document with no effect or a bad one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit.api.choice_table import choices
from swapkit.config.mindformers.patterns import find
from swapkit.config.mindformers.selections import Indices
from swapkit.registry import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from swapkit._runtime.user_choices.layers import ModulePart
    from swapkit.config.mindformers.layer_actions import NormalSettings
    from swapkit.config.mindformers.selections import LayerSelection

NAMES_SHOWN = 12


def list_unmatched(
    settings: NormalSettings, parts: Sequence[ModulePart]
) -> Iterator[tuple[str, str]]:
    """Yield (key, pattern) for patterns that match nothing in any layer."""
    layout = settings.layout
    places = [layout.find_place(layer) for layer in range(layout.num_layers)]
    chosen = dict.fromkeys(
        (key, pattern)
        for key, pattern, selection in _list_selections(settings)
        if pattern and any(selection.covers(place) for place in places)
    )
    for key, pattern in chosen:
        if parts and not any(find(pattern, part) for part in parts):
            yield key, pattern


def describe(layer: ModulePart) -> str:
    """Return a text with the names that patterns can match in a layer."""
    names = [name for name, _ in layer.children][:NAMES_SHOWN]
    operators = list(layer.operators)[:NAMES_SHOWN]
    return f"a layer has the parts {', '.join(names)} and the operators {', '.join(operators)}"


def remark(
    model: torch.nn.Module, settings: NormalSettings, parts: Sequence[ModulePart]
) -> Iterator[str]:
    """Yield warnings about a configured model."""
    yield from _remark_on_indices(settings)
    rows = [row for row in choices(model) if row.by == Source.CONFIGURATION.value]
    vain = [f"{row.where} ({row.reason})" for row in rows if not row.holds]
    if vain:
        rest = f" and {len(vain) - NAMES_SHOWN} more" if len(vain) > NAMES_SHOWN else ""
        yield f"no effect: {', '.join(vain[:NAMES_SHOWN])}{rest}"
    if _fills_cache(model, parts, [row.where for row in rows if "recompute" in row.what]):
        yield (
            "model.config.use_cache is on: the cache keeps keys and values of recomputed layers "
            "on the device. Switch it off for training."
        )


def _remark_on_indices(settings: NormalSettings) -> Iterator[str]:
    most = settings.layout.num_layers
    for key, pattern, selection in _list_selections(settings):
        beyond = [layer for layer in _indices(selection) if not 0 <= layer < most]
        if beyond:
            name = f"{key}({pattern})" if pattern else key
            yield f"{name}: layers {beyond} do not exist; the last layer is {most - 1}"


def _list_selections(settings: NormalSettings) -> Iterator[tuple[str, str, LayerSelection]]:
    """Yield (key, pattern or empty text, selected layers) for the whole document."""
    yield "recompute", "", settings.recomputation.full
    for key, patterns in settings.recomputation.patterns.items():
        for pattern, selection in patterns.items():
            yield key, pattern, selection
    if settings.swapping is not None:
        for rule in settings.swapping.layer_swap:
            yield "layer_swap", "", rule.layers
        for pattern, rules in settings.swapping.op_swap.items():
            for rule in rules:
                yield "op_swap", pattern, rule.layers


def _indices(selection: LayerSelection) -> tuple[int, ...]:
    return selection.layers if isinstance(selection, Indices) else ()


def _fills_cache(
    model: torch.nn.Module, parts: Sequence[ModulePart], recomputed: Sequence[str]
) -> bool:
    config = getattr(getattr(model, "module", model), "config", None)  # unwrap DDP
    if not getattr(config, "use_cache", False):
        return False
    found = [part.find("attention") for part in parts]
    attentions = {module for part in found if part is not None for module in part.modules}
    regions = {path: module for path, module in model.named_modules() if path in recomputed}
    return any(not attentions.isdisjoint(region.modules()) for region in regions.values())
