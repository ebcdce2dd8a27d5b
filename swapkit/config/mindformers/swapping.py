"""Normal form of a `swap_config`, with warnings where a `recompute_config` makes it void.

Runs of blanks in the log lines are MindFormers'.

Source:
    MindFormers, `LayerSetting`; recompute over swap: its description of mixed recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from swapkit.config.mindformers.log_lines import LogLine, info, warning
from swapkit.config.mindformers.selections import Indices, read_indices
from swapkit.errors import InvalidConfiguration, WrongType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swapkit.config.mindformers.sections import RecomputeConfig, SwapConfig
    from swapkit.config.mindformers.selections import LayerPlace
    from swapkit.config.mindformers.swap_entries import SwapEntry

# Prefetch distance in operators before the use; "Auto" is 1.
Prefetch: TypeAlias = int | Literal["Auto"]

BECAUSE = "is enabled swap do not work! Because it is enabled recompute."


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """Layers and their prefetch distance, which is checked when it is used."""

    key: str
    layers: Indices
    backward_prefetch: object

    @property
    def printed(self) -> dict[str, object]:
        """The rule as MindFormers prints it."""
        return {"backward_prefetch": self.backward_prefetch, "layers": self.layers.printed}

    def read_prefetch(self) -> Prefetch:
        """Return the prefetch distance.

        Raises:
            InvalidConfiguration: it is negative, or a text other than "Auto".
            WrongType: it is not a number.
        """
        value = self.backward_prefetch
        kind = type(value).__name__
        accepted = f"{self.key} takes a whole number of at least 0, or 'Auto'"
        if value == "Auto":
            return "Auto"
        if isinstance(value, str):
            message = f"The input value must be 'Auto' if it is str, but got '{value}'. {accepted}"
            raise InvalidConfiguration(message)
        if not isinstance(value, int):
            message = f"The input value must be int, but got '{kind}': {value}. {accepted}"
            raise WrongType(message)
        if isinstance(value, bool) or value < 0:
            message = (
                f"The input value must be int and must >= 0, but got '{value}' with type '{kind}'. "
                f"{accepted}"
            )
            raise (WrongType if isinstance(value, bool) else InvalidConfiguration)(message)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapping:
    """Rules for whole layers and for each operator pattern; the first that fits holds."""

    layer_swap: tuple[SwapRule, ...]
    op_swap: dict[str, tuple[SwapRule, ...]]
    log_lines: tuple[LogLine, ...] = ()


def find_rule(rules: Iterable[SwapRule], place: LayerPlace) -> SwapRule | None:
    """Return the first rule that covers a layer."""
    return next((rule for rule in rules if rule.layers.covers(place)), None)


def settle_swapping(config: SwapConfig, recompute: RecomputeConfig) -> Swapping:
    """Normalise a `swap_config` that is switched on.

    Args:
        config: the section.
        recompute: the other section, with values already checked.

    Raises:
        InvalidConfiguration: the layers of an entry are neither a bool nor a flat list.
    """
    entries = config.read_entries()
    layer_swap = _read_rules("layer_swap", entries.layer_swap)
    op_swap = {
        name: _read_rules(f"op_swap({name})", of_name) for name, of_name in entries.op_swap.items()
    }
    printed = {name: [rule.printed for rule in rules] for name, rules in op_swap.items()}
    return Swapping(
        layer_swap=layer_swap,
        op_swap=op_swap,
        log_lines=(
            info(f"Formative layer swap: {[rule.printed for rule in layer_swap]}"),
            info(f"Formative op swap: {printed}"),
            *map(warning, _list_conflicts(recompute, layer_swap, op_swap)),
        ),
    )


def _read_rules(key: str, entries: Iterable[SwapEntry]) -> tuple[SwapRule, ...]:
    return tuple(
        SwapRule(
            key=f"{key}.backward_prefetch",
            layers=read_indices(entry.layers, key=f"{key}.layers"),
            backward_prefetch=entry.backward_prefetch,
        )
        for entry in entries
    )


def _list_conflicts(
    recompute: RecomputeConfig,
    layer_swap: tuple[SwapRule, ...],
    op_swap: dict[str, tuple[SwapRule, ...]],
) -> Iterator[str]:
    """Yield a warning for each swap that recomputation makes void, judging by names alone."""
    full, select = recompute.recompute, recompute.select_recompute
    if full is True:
        yield (
            f"All layers and ops that are enabled swap do not work!{' ' * 27}"
            "Because recompute = True."
        )
    elif isinstance(full, (list, tuple)):
        for layer in full:
            yield from _list_layer_conflicts("All", layer, layer_swap)
        for name, rules in op_swap.items():
            yield from _list_operator_conflicts(name, full, rules)
    for name, layers in select.items() if isinstance(select, Mapping) else ():
        if layers is True:
            yield (
                f"{name} operator in all layers that is enabled swap do not work!{' ' * 35}"
                "Because it is enabled recompute."
            )
        elif isinstance(layers, (list, tuple)):
            for layer in layers:
                yield from _list_layer_conflicts(name, layer, layer_swap)
            yield from _list_operator_conflicts(name, layers, op_swap.get(name, ()))


def _list_layer_conflicts(name: str, layer: int, rules: Iterable[SwapRule]) -> Iterator[str]:
    for rule in rules:
        if rule.layers.everywhere:
            yield f"{name} operator in layer {layer} that{' ' * 31}{BECAUSE}"
        elif layer in rule.layers.layers:
            yield f"{name} operator in layer {layer} that{' ' * 35}{BECAUSE}"


def _list_operator_conflicts(
    name: str, layers: Iterable[int], rules: Iterable[SwapRule]
) -> Iterator[str]:
    for layer in layers:
        if any(rule.layers.everywhere or layer in rule.layers.layers for rule in rules):
            yield f"{name} operator in layer {layer} that{' ' * 35}{BECAUSE}"
