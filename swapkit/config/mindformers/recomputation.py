r"""Normal form of a `recompute_config`.

Source:
    MindFormers, `LayerSetting` of its models ("legacy") and of its parallel core ("mcore").
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from swapkit.config.mindformers.log_lines import LogLine, info
from swapkit.config.mindformers.patterns import is_alike
from swapkit.config.mindformers.selections import LayerSelection, read_counts, read_indices
from swapkit.errors import WrongType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swapkit.config.mindformers.sections import RecomputeConfig
    from swapkit.config.mindformers.selections import Layout

# Patterns and their layers, in the order in which the patterns apply.
Patterns: TypeAlias = dict[str, LayerSelection]


class Flavour(enum.Enum):
    """The MindFormers implementation to follow."""

    LEGACY = "legacy"  # all keys
    MCORE = "mcore"  # other default patterns; neither exclusions nor swap


SELECT = "select_recompute"
SELECT_COMM = "select_comm_recompute"
EXCLUDE = "select_recompute_exclude"
EXCLUDE_COMM = "select_comm_recompute_exclude"
KEYS = {
    Flavour.LEGACY: (SELECT, SELECT_COMM, EXCLUDE, EXCLUDE_COMM),
    Flavour.MCORE: (SELECT, SELECT_COMM),
}
# Exclusions have no default patterns: without a pattern they exclude nothing.
DEFAULT_PATTERNS = {
    (Flavour.LEGACY, SELECT): (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"),
    (Flavour.LEGACY, SELECT_COMM): (r".*\.norm",),
    (Flavour.MCORE, SELECT): (
        r"mlp\.shared_experts\.mul",
        r"mlp\.shared_experts\.activation_func\.silu",
        r"mlp\.mul",
        r"mlp\.activation_func\.silu",
    ),
    (Flavour.MCORE, SELECT_COMM): (r".*\.norm",),
}
PRIORITY = (
    "The configuration of select_recompute_exclude and select_comm_recompute_exclude "
    "have the highest priority."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayers:
    """The layers recomputed as a whole, and the recomputed parts of the others."""

    flavour: Flavour
    by_index: bool  # swap is on: values are layer indices, and exclusions do not apply
    slice_activation: bool | None  # None: `recompute` is not True, so the key does not apply
    full: LayerSelection
    patterns: dict[str, Patterns]  # by key
    log_lines: tuple[LogLine, ...] = ()


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
    count = partial(read_counts, layout=layout)
    read: Callable[..., LayerSelection] = read_indices if by_index else count
    full = read(config.recompute, key="recompute")
    patterns = {
        key: _read_patterns(
            key,
            getattr(config, key),
            DEFAULT_PATTERNS.get((flavour, key), ()),
            # Exclusions are counts per stage even while swap is on.
            count if key in {EXCLUDE, EXCLUDE_COMM} else read,
        )
        for key in KEYS[flavour]
    }
    lines = [info(f"Formative layer_recompute: {full.printed}")]
    if flavour is Flavour.LEGACY:
        lines.append(info(PRIORITY))
        for key in (SELECT, SELECT_COMM):
            lines += _remove_excluded(key, patterns[key], patterns[f"{key}_exclude"])
    lines += [_describe(key, patterns[key]) for key in KEYS[flavour]]
    return RecomputedLayers(
        flavour=flavour,
        by_index=by_index,
        slice_activation=config.recompute_slice_activation if config.recompute is True else None,
        full=full,
        patterns=patterns,
        log_lines=tuple(lines),
    )


def _read_patterns(
    key: str, value: object, defaults: Sequence[str], read: Callable[..., LayerSelection]
) -> Patterns:
    """Return the layers of each given pattern, or of the default patterns if none is given."""
    if isinstance(value, Mapping):
        for pattern in value:
            if not isinstance(pattern, str):
                message = f"{key}: the pattern {pattern!r} is not a string; quote it"
                raise WrongType(message)
        return {name: read(layers, key=f"{key}({name})") for name, layers in value.items()}
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return {pattern: read(value, key=key) for pattern in value}
    return {pattern: read(value, key=key) for pattern in defaults}


def _remove_excluded(key: str, select: Patterns, exclude: Patterns) -> Iterator[LogLine]:
    """Remove the first pattern that resembles each excluded pattern, for all layers."""
    for pattern in exclude:
        like = next((other for other in select if is_alike(pattern, other)), None)
        if like is not None:
            del select[like]
            yield info(
                f"The pattern {like} in {key} conflicts with {key}_exclude and will be removed."
            )


def _describe(key: str, patterns: Patterns) -> LogLine:
    printed = {pattern: layers.printed for pattern, layers in patterns.items()}
    return info(f"Formative {key}: {printed}")
