"""The layers that a document selects, and the pipeline stage and chunk of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from swapkit.config.mindformers.log_lines import LogLine, info
from swapkit.errors import InvalidArgument, InvalidConfiguration, WrongStage, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

    Offset: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]

# ---- selections ----------------------------------------------------------------------------------
#
# The layers that a value of a configuration document selects.
#
# With swap off a value *counts* layers at the start of each stage, or of each slot (a stage and
# chunk). With swap on it *names* layers by index, and stages do not matter. Values are never
# changed.
#
# Source:
#   MindFormers, `LayerSetting`: `_format_recompute_list` and its index form.

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


# ---- layouts -------------------------------------------------------------------------------------
#
# The pipeline stage and chunk of each layer.
#
# A pipeline of P stages, each with V chunks (interleaves), has V x P *slots*. A slot holds the
# average number of layers plus its `offset`. Layers are numbered through all stages of the first
# chunk, then through all stages of the second, and so on.
#
# Source:
#   MindFormers, `LayerSetting`.

# One number for each slot: a row for each chunk, with a column for each stage.
Table: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """The document's values for the model and its pipeline; None: not specified."""

    num_layers: int | None = None
    offset: Offset = 0
    pp_interleave_num: int | None = None
    pipeline_stage: int | None = None
    pipeline_interleave: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """The position of a layer in the pipeline."""

    layer: int
    chunk: int
    stage: int  # counted from 0, without the layout's start stage
    index: int  # among the layers of its slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The distribution of a model's layers over the stages and chunks of a pipeline.

    Args:
        num_layers: number of all layers, including multi-token prediction (MTP) layers.
        offset: layers above (or below) the average: one number for all slots, one for each stage,
            or a row of such numbers for each chunk.
        pp_interleave_num: chunks of each stage.
        pipeline_stage: stages of the pipeline.
        start_stage: added to every reported stage, if `stage_num` is given.
        stage_num: if not 0, the number of stages instead of `pipeline_stage`.
        pipeline_interleave: if False, each stage has one chunk, despite `pp_interleave_num`.

    Raises:
        InvalidConfiguration: a number is out of range, or `offset` contradicts the others.
        WrongType: a value is not a whole number, or `offset` contains something else.
    """

    num_layers: int
    offset: Offset = 0
    pp_interleave_num: int = 1
    pipeline_stage: int = 1
    start_stage: int = 0
    stage_num: int = 0
    pipeline_interleave: bool = True
    table: Table = field(init=False)
    cumulative: Table = field(init=False)

    def __post_init__(self) -> None:
        for key, least in (
            ("num_layers", 0),
            ("pp_interleave_num", 1),
            ("pipeline_stage", 1),
            ("start_stage", 0),
            ("stage_num", 0),
        ):
            _check_whole(key, getattr(self, key), least)
        average = self.num_layers // (self.chunks * self.stages)
        rows = _spread_offset(self)
        object.__setattr__(self, "table", tuple(tuple(average + n for n in row) for row in rows))
        totals = list(itertools.accumulate(n for row in self.table for n in row))
        starts = range(0, len(totals), self.stages)
        object.__setattr__(
            self, "cumulative", tuple(tuple(totals[i : i + self.stages]) for i in starts)
        )

    @property
    def stages(self) -> int:
        """The number of stages in force."""
        return self.stage_num or self.pipeline_stage

    @property
    def chunks(self) -> int:
        """The number of chunks in force."""
        return self.pp_interleave_num if self.pipeline_interleave else 1

    @property
    def first_stage(self) -> int:
        """The number of the first stage in reports."""
        return self.start_stage if self.stage_num else 0

    def find_place(self, layer: int) -> LayerPlace:
        """Return the position of a layer."""
        before = 0
        for chunk, row in enumerate(self.cumulative):
            for stage, count in enumerate(row):
                if layer < count:
                    return LayerPlace(layer=layer, chunk=chunk, stage=stage, index=layer - before)
                before = count
        message = f"layer {layer}: this layout has {self.num_layers} layers"
        raise InvalidArgument(message)

    def stage(self, layer: int) -> int:
        """Return the stage of a layer as reported."""
        return self.find_place(layer).stage + self.first_stage

    def chunk(self, layer: int) -> int:
        """Return the chunk of a layer."""
        return self.find_place(layer).chunk

    @property
    def log_lines(self) -> tuple[LogLine, ...]:
        """The lines that MindFormers logs for a layout."""
        layers = range(self.num_layers)
        return (
            info(f"num_layers per stage: {as_lists(self.table)}"),
            info(f"Accumulated num_layers per stage: {as_lists(self.cumulative)}"),
            info(f"Pipeline id list with start_stage: {[self.stage(layer) for layer in layers]}"),
            info(f"Interleave id list: {[self.chunk(layer) for layer in layers]}"),
        )


def lay_out(
    inputs: ModelInputs,
    *,
    num_layers: int | None = None,
    offset: Offset | None = None,
    pp_interleave_num: int | None = None,
    pipeline_stage: int | None = None,
) -> Layout:
    """Return the layout from the arguments; the document fills in missing ones.

    Args:
        inputs: the document's values for the model.
        num_layers: see `Layout`, also for the other arguments.
        offset: by default 0.
        pp_interleave_num: by default 1.
        pipeline_stage: by default 1.

    Raises:
        InvalidConfiguration: the number of layers is unknown, or the numbers do not fit.
    """
    layers = inputs.num_layers if num_layers is None else num_layers
    if layers is None:
        message = (
            "num_layers is unknown. Pass num_layers=, or set model.model_config.num_layers in the "
            "document."
        )
        raise InvalidConfiguration(message)
    interleave = inputs.pipeline_interleave
    return Layout(
        num_layers=layers,
        offset=inputs.offset if offset is None else offset,
        pp_interleave_num=_first(pp_interleave_num, inputs.pp_interleave_num, 1),
        pipeline_stage=_first(pipeline_stage, inputs.pipeline_stage, 1),
        pipeline_interleave=True if interleave is None else interleave,
    )


def as_lists(table: Table) -> list[list[int]]:
    """Return a table in printed form."""
    return [list(row) for row in table]


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _check_whole(key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        message = f"{key}={value!r}: expected a whole number of at least {least}"
        raise WrongType(message)
    if value < least:
        message = f"{key}={value!r}: expected at least {least}"
        raise InvalidConfiguration(message)


def _spread_offset(layout: Layout) -> Table:
    """Return the offset of every slot. Check its sum as given, before repeating it per slot."""
    stages, chunks = layout.stages, layout.chunks
    rows = _read_offset(layout.offset)
    if not isinstance(layout.offset, int):
        _check_shape(layout, layout.offset, rows)
    total = sum(map(sum, rows))
    remainder = layout.num_layers % (stages * chunks)
    if total != remainder:
        message = (
            f"The sum of `offset` ({total}) should equal to remainder of `num_layers` "
            f"({layout.num_layers}) % (pp ({stages}) * pp_interleave_num ({chunks})) = {remainder}"
            f"; `offset`: {layout.offset}"
        )
        raise InvalidConfiguration(message)
    if isinstance(layout.offset, int):
        return ((layout.offset,) * stages,) * chunks
    return rows if len(rows) == chunks else rows * chunks


def _read_offset(offset: object) -> Table:
    """Return the rows of an offset; a number or a list of numbers is one row."""
    if is_whole(offset):
        return _read_offset([offset])
    if isinstance(offset, (list, tuple)):
        if all(is_whole(item) for item in offset):
            return (tuple(offset),)
        if all(isinstance(row, (list, tuple)) and all(map(is_whole, row)) for row in offset):
            return tuple(tuple(row) for row in offset)
    message = (
        f"offset={offset!r}: expected a whole number, a list with one for each stage, or such a "
        "list for each chunk"
    )
    raise WrongType(message)


def _check_shape(layout: Layout, offset: Sequence[object], rows: Table) -> None:
    for row in rows:
        if len(row) != layout.stages:
            message = (
                f"offset.shape[-1] should equal to `pp` ({layout.stages}), "
                f"but got ({len(row)}). `offset`: {offset}"
            )
            raise InvalidConfiguration(message)
    if not is_whole(offset[0]) and len(rows) != layout.chunks:
        message = (
            f"offset.shape[-2] should equal to `pp_interleave_num` ({layout.chunks}), "
            f"but got ({len(rows)}). `offset`: {offset}"
        )
        raise InvalidConfiguration(message)
