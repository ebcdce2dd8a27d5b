"""The layers that a value of a configuration document selects.

With swap off a value *counts* layers at the start of each stage, or of each slot (a stage and
chunk). With swap on it *names* layers by index, and stages do not matter. Values are never changed.

Source:
    MindFormers, `LayerSetting`: `_format_recompute_list` and its index form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swapkit.config.mindformers.layouts import as_lists
from swapkit.errors import InvalidConfiguration, WrongStage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.config.mindformers.layouts import LayerPlace, Layout, Table

COUNTS = (
    "True or False for all layers, or how many layers from the first on: "
    "[one count or bool for each stage], or [[one for each stage], ... for each chunk]"
)
INDICES = "with swap on: True or False for all layers, or a flat list of layer indices"


class LayerSelection(Protocol):
    """A selection of a model's layers."""

    def covers(self, place: LayerPlace) -> bool:
        """Return whether the layer at a place is selected."""
        ...

    @property
    def printed(self) -> object:
        """The normal form as MindFormers prints it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The first layers of each slot, by count."""

    key: str
    rows: Table
    given: str  # for messages

    def covers(self, place: LayerPlace) -> bool:
        """Return whether the layer at a place is selected.

        Raises:
            WrongStage: there is no count for the slot of the layer.
        """
        if place.chunk >= len(self.rows) or place.stage >= len(self.rows[place.chunk]):
            message = (
                f"{self.key}={self.given} has no count for layer {place.layer}, which is in chunk "
                f"{place.chunk} of stage {place.stage}; give a row for each chunk, with a count "
                "for each stage"
            )
            raise WrongStage(message)
        return 0 <= place.index < self.rows[place.chunk][place.stage]

    @property
    def printed(self) -> object:
        """The normal form as MindFormers prints it."""
        return as_lists(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Layers by index, as given; `everywhere` selects all layers."""

    layers: tuple[int, ...] = ()
    everywhere: bool = False

    def covers(self, place: LayerPlace) -> bool:
        """Return whether the layer at a place is selected."""
        return self.everywhere or place.layer in self.layers

    @property
    def printed(self) -> object:
        """The normal form as MindFormers prints it."""
        return True if self.everywhere else list(self.layers)


def read_indices(value: object, *, key: str) -> Indices:
    """Return the layers that a value names while swap is on.

    Raises:
        InvalidConfiguration: the value is neither a bool nor a flat list of numbers.
    """
    if isinstance(value, bool):
        return Indices(everywhere=value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return Indices(layers=tuple(value))
    raise _illegal(value, key, INDICES)


def read_counts(value: object, layout: Layout, *, key: str) -> Counts:
    """Return the number of layers of each slot that a value selects while swap is off.

    Args:
        value: value from the document.
        layout: the slots and their sizes.
        key: key of the value, for messages.

    Raises:
        InvalidConfiguration: the value has another form, or a negative count for a stage.
        WrongStage: the value has more rows or columns than the layout.
    """
    if isinstance(value, bool):
        rows = layout.table if value else _zeros(layout)
    elif not isinstance(value, (list, tuple)):
        raise _illegal(value, key, COUNTS)
    elif all(isinstance(item, int) for item in value):
        rows = _spread_stages(value, layout, key)
    elif all(isinstance(item, str) for item in value):
        rows = layout.table  # names of operators, without counts: all layers
    else:
        rows = tuple(_clamp_row(value, chunk, layout, key) for chunk in range(len(value)))
    return Counts(key=key, rows=rows, given=repr(value))


def _illegal(value: object, key: str, accepted: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"Illegal input list for {key}: {value!r}. Give {accepted}")


def _zeros(layout: Layout) -> Table:
    return ((0,) * layout.stages,) * layout.chunks


def _spread_stages(value: Sequence[int], layout: Layout, key: str) -> Table:
    """Deal the count of each stage to its chunks in turn; earlier chunks get the remainder."""
    columns = [_deal(value, stage, layout, key) for stage in range(len(value))]
    columns += [[0] * layout.chunks] * (layout.stages - len(columns))
    return tuple(zip(*columns, strict=True))


def _deal(value: Sequence[int], stage: int, layout: Layout, key: str) -> list[int]:
    if stage >= layout.stages:
        message = (
            f"{key}={value!r}: {len(value)} counts, but the pipeline has {layout.stages} stages"
        )
        raise WrongStage(message)
    sizes = [row[stage] for row in layout.table]
    wanted, all_layers = value[stage], sum(sizes)
    count = (all_layers if wanted else 0) if isinstance(wanted, bool) else wanted
    count = min(count, all_layers)
    if count < 0:
        message = (
            f"{key}={value!r}: cannot select {wanted} of the {all_layers} layers of stage "
            f"{stage}; give {COUNTS}"
        )
        raise InvalidConfiguration(message)
    dealt = [0] * layout.chunks
    while count:
        for chunk, size in enumerate(sizes):
            if count and dealt[chunk] < size:
                dealt[chunk] += 1
                count -= 1
    return dealt


def _clamp_row(value: Sequence[object], chunk: int, layout: Layout, key: str) -> tuple[int, ...]:
    """Return the counts of one chunk, each at most the number of layers of its slot."""
    row = value[chunk]
    sizes = layout.table[chunk] if chunk < layout.chunks else ()
    if isinstance(row, bool):
        if not sizes:
            raise _no_slot(value, chunk, layout, key)
        return tuple(_clamp(row, size) for size in sizes)
    if not isinstance(row, (list, tuple)) or not all(isinstance(item, int) for item in row):
        raise _illegal(value, key, COUNTS)
    surplus = row[len(sizes) :]
    if any(item is not False for item in surplus):
        raise _no_slot(value, chunk, layout, key)
    return tuple(map(_clamp, row, sizes)) + (0,) * len(surplus)


def _clamp(count: int, size: int) -> int:
    if isinstance(count, bool):
        return size if count else 0
    return min(count, size)


def _no_slot(value: object, chunk: int, layout: Layout, key: str) -> WrongStage:
    return WrongStage(
        f"{key}={value!r}: row {chunk} has more counts than there are slots; the pipeline has "
        f"{layout.chunks} chunks of {layout.stages} stages"
    )
