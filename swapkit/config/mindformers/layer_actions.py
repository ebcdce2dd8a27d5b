"""The actions of a document for each layer of a model.

    document ── read_document ──► Document ─┐
    num_layers, offset, ... ──────► Layout ─┴─ settle ──► Settings ── actions ──► LayerActions

MindFormers marks modules and operators; this module only lists the actions for them. Conflicts
between several choices for one operator are resolved where the choices are applied: exclusion beats
recomputation, whole layers beat parts, recomputation beats swap, and the last swap holds.

Source:
    MindFormers, `LayerSetting`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from swapkit.config.mindformers.log_lines import LogLine, info
from swapkit.config.mindformers.patterns import (
    SEPARATOR,
    LayerModule,
    Match,
    distinct,
    find,
    name_last,
)
from swapkit.config.mindformers.recomputation import (
    EXCLUDE,
    EXCLUDE_COMM,
    SELECT,
    SELECT_COMM,
    Flavour,
    RecomputedLayers,
    settle_recomputation,
)
from swapkit.config.mindformers.swapping import Prefetch, Swapping, find_rule, settle_swapping
from swapkit.errors import InvalidConfiguration

if TYPE_CHECKING:
    from swapkit.config.mindformers.documents import Document
    from swapkit.config.mindformers.selections import LayerPlace, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActions:
    """The actions for one layer."""

    stage: int  # as reported
    chunk: int
    pipeline_stage: int | None  # as MindFormers sets it on the layer; None: not set
    full: bool  # recompute the whole layer
    slice_activation: bool | None  # None: `recompute_slice_activation` does not apply
    select: tuple[Match, ...]  # recompute these modules and operators
    comm: tuple[Match, ...]  # repeat the communication of these operators
    select_exclude: tuple[Match, ...]  # never recompute these operators
    comm_exclude: tuple[Match, ...]  # never repeat the communication of these operators
    layer_swap: Prefetch | None  # swap the whole layer, with this prefetch distance
    op_swaps: tuple[tuple[Match, Prefetch], ...]  # swap these; a later one overrides an earlier one
    log_lines: tuple[LogLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalSettings:
    """A document in normal form, for models of one layout."""

    layout: Layout
    recomputation: RecomputedLayers
    swapping: Swapping | None  # None: swap is off
    log_lines: tuple[LogLine, ...]

    def actions(self, layer_id: int, layer: LayerModule) -> LayerActions:
        """Return the actions for a layer.

        Args:
            layer_id: the layer's index in the model.
            layer: the layer's modules and operators.

        Raises:
            InvalidArgument: the layout has no such layer.
            InvalidConfiguration: a prefetch distance for the layer is out of range.
            WrongStage: a value has no count for the stage and chunk of the layer.
            WrongType: a prefetch distance for the layer is not a number.
            InvalidPattern: a pattern for the layer is not a valid regular expression.
        """
        place = self.layout.find_place(layer_id)
        lines: list[LogLine] = []
        full = self.recomputation.full.covers(place)
        # MindFormers logs nothing where swap is on and every layer is recomputed.
        if full and not (self.swapping and self.recomputation.slice_activation is not None):
            lines.append(info(f"Set full recompute at layer {layer_id}"))
        targets = {
            key: _find_targets(self.recomputation, key, place, layer, lines)
            if _applies(self.recomputation, key, full=full)
            else ()
            for key in (SELECT, SELECT_COMM, EXCLUDE, EXCLUDE_COMM)
        }
        layer_swap = _swap_layer(self.swapping, place, lines)
        op_swaps = _swap_operators(self.swapping, place, layer, lines)
        stage = place.stage + self.layout.first_stage
        return LayerActions(
            stage=stage,
            chunk=place.chunk,
            pipeline_stage=None if self.swapping else stage,
            full=full,
            slice_activation=self.recomputation.slice_activation if full else None,
            select=targets[SELECT],
            comm=targets[SELECT_COMM],
            select_exclude=targets[EXCLUDE],
            comm_exclude=targets[EXCLUDE_COMM],
            layer_swap=layer_swap,
            op_swaps=op_swaps,
            log_lines=tuple(lines),
        )


def settle(
    document: Document, layout: Layout, flavour: Literal["legacy", "mcore"] = "legacy"
) -> NormalSettings:
    """Normalise a document for models of a layout.

    Args:
        document: the document.
        layout: the stages and chunks of the model.
        flavour: "mcore" has other default patterns and ignores exclusions and swap.

    Returns:
        The settings, with the log lines of the layout, of recomputation, and of swap.

    Raises:
        InvalidConfiguration: a value has a form that its key does not accept; or a subclass, see
            `settle_recomputation` and `settle_swapping`.
    """
    kinds = [kind.value for kind in Flavour]
    if flavour not in kinds:
        message = f"flavour={flavour!r}: expected one of {kinds}"
        raise InvalidConfiguration(message)
    swaps = document.swap.swap and flavour == "legacy"
    recomputation = settle_recomputation(
        document.recompute, layout, flavour=Flavour(flavour), by_index=swaps
    )
    swapping = settle_swapping(document.swap, document.recompute) if swaps else None
    return NormalSettings(
        layout=layout,
        recomputation=recomputation,
        swapping=swapping,
        log_lines=(
            *layout.log_lines,
            *recomputation.log_lines,
            *(swapping.log_lines if swapping else ()),
        ),
    )


def _applies(recomputation: RecomputedLayers, key: str, *, full: bool) -> bool:
    """Return whether the patterns of a key apply to a layer at all."""
    if key in {SELECT, SELECT_COMM}:
        return not full
    return key in recomputation.patterns and not recomputation.by_index


def _find_targets(
    recomputation: RecomputedLayers,
    key: str,
    place: LayerPlace,
    layer: LayerModule,
    lines: list[LogLine],
) -> tuple[Match, ...]:
    """Return the matches of a key's patterns in a layer, and append their log lines."""
    targets: list[Match] = []
    names = []
    for pattern, layers in recomputation.patterns[key].items():
        if not layers.covers(place):
            continue
        matches = find(pattern, layer)
        if key != SELECT:
            if recomputation.flavour is Flavour.LEGACY:
                lines += [_reject_module(key, match) for match in matches if not match.operator]
            matches = [match for match in matches if match.operator]
        if matches:
            targets += matches
            names += name_last(matches)
    if names:
        lines.append(
            info(
                f"Set {_name_action(recomputation, key)} at layer {place.layer}: {', '.join(names)}"
            )
        )
    return tuple(distinct(targets))


def _name_action(recomputation: RecomputedLayers, key: str) -> str:
    name = "select comm recompute" if key in {SELECT_COMM, EXCLUDE_COMM} else "select recompute"
    if key in {EXCLUDE, EXCLUDE_COMM}:
        return f"{name} exclude"
    counted = recomputation.flavour is Flavour.LEGACY and not recomputation.by_index
    return f"{name} on" if counted else name


def _reject_module(key: str, match: Match) -> LogLine:
    kind = (
        "communication recompute"
        if key == SELECT_COMM
        else "select recompute/comm_recompute exclude"
    )
    path = f"{'.'.join(match.path[:-1])}.{match.path[-1]}"
    return info(
        f"For {kind}, {path} is expected to be operation but got cell, "
        "this configuration will not be effective."
    )


def _swap_layer(
    swapping: Swapping | None, place: LayerPlace, lines: list[LogLine]
) -> Prefetch | None:
    rule = find_rule(swapping.layer_swap, place) if swapping else None
    if rule is None:
        return None
    prefetch = rule.read_prefetch()
    blanks = " " * (33 if rule.layers.everywhere else 29)  # as in MindFormers
    lines.append(info(f"Set layer swap at layer {place.layer}{blanks}and value is: {prefetch}"))
    return prefetch


def _swap_operators(
    swapping: Swapping | None, place: LayerPlace, layer: LayerModule, lines: list[LogLine]
) -> tuple[tuple[Match, Prefetch], ...]:
    swaps: list[tuple[Match, Prefetch]] = []
    names = []
    for pattern, rules in swapping.op_swap.items() if swapping else ():
        rule = find_rule(rules, place)
        matches = find(pattern, layer) if rule else []
        if rule and matches:
            prefetch = rule.read_prefetch()
            swaps += [(match, prefetch) for match in matches]
            # A dot before names in the layer itself, a blank before deeper ones.
            lead = " " if SEPARATOR in pattern else "."
            named = [f"{name}, value={prefetch}" for name in name_last(matches)]
            names.append(lead + ", ".join(named))
    if names:
        lines.append(info(f"Set op_swap at layer {place.layer}: {', '.join(names)}"))
    return tuple(swaps)
