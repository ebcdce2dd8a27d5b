r"""The actions of a document for each layer of a model.

    document ── read_document ──► Document ─┐
    num_layers, offset, ... ──────► Layout ─┴─ settle ──► Settings ── actions ──► LayerActions

MindFormers marks modules and operators; this module only lists the actions for them. Conflicts
between several choices for one operator are resolved where the choices are applied: exclusion beats
recomputation, whole layers beat parts, recomputation beats swap, and the last swap holds.

Source:
    MindFormers, `LayerSetting` of its models ("legacy") and of its parallel core ("mcore");
    recompute over swap: its description of mixed recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from swapkit.config.mindformers.documents import Document, RecomputeConfig, SwapConfig
from swapkit.config.mindformers.patterns import (
    SEPARATOR,
    LayerModule,
    Match,
    distinct,
    find,
    is_alike,
    name_last,
)
from swapkit.config.mindformers.selections import (
    Indices,
    LayerPlace,
    LayerSelection,
    Layout,
    LogLine,
    info,
    is_list_of,
    read_counts,
    read_indices,
    warning,
)
from swapkit.errors import InvalidConfiguration, WrongType

# ---- recomputation -------------------------------------------------------------------------------
#
# Normal form of a `recompute_config`.

# Patterns and their layers, in the order in which the patterns apply.
Patterns: TypeAlias = dict[str, LayerSelection]


# The MindFormers implementation to follow: "mcore" has other default patterns, and neither
# exclusions nor swap.
Flavour: TypeAlias = Literal["legacy", "mcore"]
SELECT, SELECT_COMM = "select_recompute", "select_comm_recompute"
EXCLUDE, EXCLUDE_COMM = "select_recompute_exclude", "select_comm_recompute_exclude"
# The keys of each flavour and their default patterns. Without a pattern an exclusion has none.
DEFAULT_PATTERNS: dict[Flavour, dict[str, tuple[str, ...]]] = {
    "legacy": {
        SELECT: (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"),
        SELECT_COMM: (r".*\.norm",),
        EXCLUDE: (),
        EXCLUDE_COMM: (),
    },
    "mcore": {
        SELECT: (
            *(r"mlp\.shared_experts\.mul", r"mlp\.shared_experts\.activation_func\.silu"),
            *(r"mlp\.mul", r"mlp\.activation_func\.silu"),
        ),
        SELECT_COMM: (r".*\.norm",),
    },
}


class RecomputedLayers(NamedTuple):
    """The layers recomputed as a whole, and the recomputed parts of the others."""

    flavour: Flavour
    by_index: bool  # swap is on: values are layer indices, and exclusions do not apply
    slice_activation: bool | None  # None: `recompute` is not True, so the key does not apply
    full: LayerSelection
    patterns: dict[str, Patterns]  # by key
    log_lines: tuple[LogLine, ...]

    def name_action(self, key: str) -> str:
        """Return what log lines call the action of a key."""
        is_counted = self.flavour == "legacy" and not self.by_index and "exclude" not in key
        return key.replace("_", " ") + (" on" if is_counted else "")


def settle_recomputation(
    config: RecomputeConfig, layout: Layout, *, flavour: Flavour, by_index: bool
) -> RecomputedLayers:
    """Normalise a `recompute_config`.

    Args:
        config: the section.
        layout: stages and chunks that the counts refer to.
        flavour: determines the keys, the default patterns and the log.
        by_index: whether swap is on, so that values are layer indices.

    Raises:
        InvalidConfiguration: a value has a form that its key does not accept.
        WrongStage: a value has more counts than the layout has stages.
        WrongType: a pattern is not a text.
        InvalidPattern: a pattern that is compared with others is not a valid regular expression.
    """
    count: Callable[..., LayerSelection] = partial(read_counts, layout=layout)
    read = read_indices if by_index else count
    full = read(config.recompute, key="recompute")
    patterns = {}
    for key, defaults in DEFAULT_PATTERNS[flavour].items():
        # Exclusions are counts per stage even while swap is on.
        reader = count if key in {EXCLUDE, EXCLUDE_COMM} else read
        patterns[key] = _read_patterns(key, getattr(config, key), defaults, reader)
    lines = [info(f"Formative layer_recompute: {full.printed}")]
    if flavour == "legacy":
        both = f"{EXCLUDE} and {EXCLUDE_COMM}"
        lines.append(info(f"The configuration of {both} have the highest priority."))
        for key in (SELECT, SELECT_COMM):
            lines += _remove_excluded(key, patterns[key], patterns[f"{key}_exclude"])
    for key, of_key in patterns.items():
        printed = {pattern: layers.printed for pattern, layers in of_key.items()}
        lines.append(info(f"Formative {key}: {printed}"))
    slices = config.recompute_slice_activation if config.recompute is True else None
    return RecomputedLayers(flavour, by_index, slices, full, patterns, tuple(lines))


def _read_patterns(
    key: str, value: object, defaults: Sequence[str], read: Callable[..., LayerSelection]
) -> Patterns:
    """Return the layers of each given pattern, or of the default patterns if none is given."""
    if isinstance(value, Mapping):
        for pattern in value:
            if not isinstance(pattern, str):
                raise WrongType(f"{key}: the pattern {pattern!r} is not a string; quote it")
        return {name: read(layers, key=f"{key}({name})") for name, layers in value.items()}
    names = value if is_list_of(value, str) else defaults
    return {pattern: read(value, key=key) for pattern in names}


def _remove_excluded(key: str, select: Patterns, exclude: Patterns) -> Iterator[LogLine]:
    """Remove the first pattern that resembles each excluded pattern, for all layers."""
    for pattern in exclude:
        like = next((other for other in select if is_alike(pattern, other)), None)
        if like is not None:
            del select[like]
            conflict = f"conflicts with {key}_exclude and will be removed."
            yield info(f"The pattern {like} in {key} {conflict}")


# ---- swap ----------------------------------------------------------------------------------------
#
# Normal form of a `swap_config`, with warnings where a `recompute_config` makes it void. Runs of
# blanks in the log lines are MindFormers'.

# Prefetch distance in operators before the use; "Auto" is 1.
Prefetch: TypeAlias = int | Literal["Auto"]


class SwapRule(NamedTuple):
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
        value, kind = self.backward_prefetch, type(self.backward_prefetch).__name__
        if value == "Auto":
            return "Auto"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        error: type[InvalidConfiguration] = WrongType
        must = f"int, but got '{kind}': {value}."
        if isinstance(value, str):
            must, error = f"'Auto' if it is str, but got '{value}'.", InvalidConfiguration
        elif isinstance(value, int):
            must = f"int and must >= 0, but got '{value}' with type '{kind}'."
            error = WrongType if isinstance(value, bool) else InvalidConfiguration
        accepted = f"{self.key} takes a whole number of at least 0, or 'Auto'"
        raise error(f"The input value must be {must} {accepted}")


Rules: TypeAlias = tuple[SwapRule, ...]
OpSwaps: TypeAlias = tuple[tuple[Match, Prefetch], ...]


class Swapping(NamedTuple):
    """Rules for whole layers and for each operator pattern; the first that fits holds."""

    layer_swap: Rules
    op_swap: dict[str, Rules]
    log_lines: tuple[LogLine, ...] = ()

    def swap_layer(self, place: LayerPlace, lines: list[LogLine]) -> Prefetch | None:
        """Return the prefetch of a whole layer, and append its log line; None: it does not move."""
        rule = _find_rule(self.layer_swap, place)
        if rule is None:
            return None
        prefetch = rule.read_prefetch()
        blanks = " " * (33 if rule.layers.everywhere else 29)  # as in MindFormers
        lines.append(info(f"Set layer swap at layer {place.layer}{blanks}and value is: {prefetch}"))
        return prefetch

    def swap_parts(self, place: LayerPlace, layer: LayerModule, lines: list[LogLine]) -> OpSwaps:
        """Return the parts of a layer that move and their prefetch, and append a log line."""
        swaps: list[tuple[Match, Prefetch]] = []
        names = []
        for pattern, rules in self.op_swap.items():
            rule = _find_rule(rules, place)
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

    def list_conflicts(self, recompute: RecomputeConfig) -> Iterator[str]:
        """Yield a warning for each swap that recomputation makes void, judging by names alone."""
        full, select = recompute.recompute, recompute.select_recompute
        nothing = "enabled swap do not work!"
        if full is True:
            yield f"All layers and ops that are {nothing}{' ' * 27}Because recompute = True."
        elif is_list_of(full, int):
            yield from self._list_void("All", full, self.op_swap)
        for name, layers in select.items() if isinstance(select, Mapping) else ():
            if layers is True:
                what = f"{name} operator in all layers that is {nothing}{' ' * 35}"
                yield f"{what}Because it is enabled recompute."
            elif is_list_of(layers, int):
                yield from self._list_void(name, layers, {name: self.op_swap.get(name, ())})

    def _list_void(self, name: str, full: Iterable[int], named: dict[str, Rules]) -> Iterator[str]:
        """Yield a warning for each rule for whole layers, and each operator, that has a layer."""
        void = "is enabled swap do not work! Because it is enabled recompute."
        for layer in full:
            for rule in self.layer_swap:
                if rule.layers.has_layer(layer):
                    blanks = " " * (31 if rule.layers.everywhere else 35)
                    yield f"{name} operator in layer {layer} that{blanks}{void}"
        for operator, rules in named.items():
            for layer in full:
                if any(rule.layers.has_layer(layer) for rule in rules):
                    yield f"{operator} operator in layer {layer} that{' ' * 35}{void}"


def settle_swapping(config: SwapConfig, recompute: RecomputeConfig) -> Swapping:
    """Normalise a `swap_config` that is switched on.

    Args:
        config: the section.
        recompute: the other section, with values already checked.

    Raises:
        InvalidConfiguration: the layers of an entry are neither a bool nor a flat list.
    """
    entries = config.read_entries()
    read = Swapping(
        layer_swap=_read_rules("layer_swap", entries.layer_swap),
        op_swap={name: _read_rules(f"op_swap({name})", of) for name, of in entries.op_swap.items()},
    )
    printed = {name: [rule.printed for rule in rules] for name, rules in read.op_swap.items()}
    lines = (
        info(f"Formative layer swap: {[rule.printed for rule in read.layer_swap]}"),
        info(f"Formative op swap: {printed}"),
    )
    return read._replace(log_lines=(*lines, *map(warning, read.list_conflicts(recompute))))


def _read_rules(key: str, entries: Iterable[tuple[object, object]]) -> Rules:
    return tuple(
        SwapRule(f"{key}.backward_prefetch", read_indices(layers, key=f"{key}.layers"), prefetch)
        for prefetch, layers in entries
    )


def _find_rule(rules: Rules, place: LayerPlace) -> SwapRule | None:
    """Return the first rule that covers a layer."""
    return next((rule for rule in rules if rule.layers.covers(place)), None)


# ---- actions -------------------------------------------------------------------------------------


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
    op_swaps: OpSwaps  # swap these; a later one overrides an earlier one
    log_lines: tuple[LogLine, ...]


class NormalSettings(NamedTuple):
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
        recomputation, swapping = self.recomputation, self.swapping
        lines: list[LogLine] = []
        full, slices = recomputation.full.covers(place), recomputation.slice_activation
        # MindFormers logs nothing where swap is on and every layer is recomputed.
        if full and not (swapping and slices is not None):
            lines.append(info(f"Set full recompute at layer {layer_id}"))
        # Exclusions apply to fully recomputed layers, too, but not while swap is on.
        skips = {SELECT: full, SELECT_COMM: full}
        targets = {
            key: self._find_targets(key, place, layer, lines)
            for key in recomputation.patterns
            if not skips.get(key, recomputation.by_index)
        }
        layer_swap = swapping.swap_layer(place, lines) if swapping else None
        stage = place.stage + self.layout.first_stage
        return LayerActions(
            stage=stage,
            chunk=place.chunk,
            pipeline_stage=None if swapping else stage,
            full=full,
            slice_activation=slices if full else None,
            select=targets.get(SELECT, ()),
            comm=targets.get(SELECT_COMM, ()),
            select_exclude=targets.get(EXCLUDE, ()),
            comm_exclude=targets.get(EXCLUDE_COMM, ()),
            layer_swap=layer_swap,
            op_swaps=swapping.swap_parts(place, layer, lines) if swapping else (),
            log_lines=tuple(lines),
        )

    def _find_targets(
        self, key: str, place: LayerPlace, layer: LayerModule, lines: list[LogLine]
    ) -> tuple[Match, ...]:
        """Return the matches of a key's patterns in a layer, and append their log lines."""
        targets: list[Match] = []
        names: list[str] = []
        is_legacy = self.recomputation.flavour == "legacy"
        for pattern, layers in self.recomputation.patterns[key].items():
            matches = find(pattern, layer) if layers.covers(place) else []
            if key != SELECT:
                modules = [match for match in matches if not match.operator]
                lines += [_reject_module(key, match) for match in modules if is_legacy]
                matches = [match for match in matches if match.operator]
            targets += matches
            names += name_last(matches)
        if names:
            action = self.recomputation.name_action(key)
            lines.append(info(f"Set {action} at layer {place.layer}: {', '.join(names)}"))
        return tuple(distinct(targets))


def settle(document: Document, layout: Layout, flavour: Flavour = "legacy") -> NormalSettings:
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
    if flavour not in DEFAULT_PATTERNS:
        raise InvalidConfiguration(f"flavour={flavour!r}: expected one of {[*DEFAULT_PATTERNS]}")
    asked, swaps = document.recompute, document.swap.swap and flavour == "legacy"
    recomputation = settle_recomputation(asked, layout, flavour=flavour, by_index=swaps)
    swapping = settle_swapping(document.swap, asked) if swaps else None
    lines = layout.log_lines + recomputation.log_lines + (swapping.log_lines if swapping else ())
    return NormalSettings(layout, recomputation, swapping, lines)


def _reject_module(key: str, match: Match) -> LogLine:
    excludes = "select recompute/comm_recompute exclude"
    kind = "communication recompute" if key == SELECT_COMM else excludes
    return info(
        f"For {kind}, {'.'.join(match.path[:-1])}.{match.path[-1]} is expected to be operation "
        "but got cell, this configuration will not be effective."
    )
