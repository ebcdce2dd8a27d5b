"""The layers that a document selects, and the pipeline stage and chunk of each."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from swapkit.errors import InvalidArgument, InvalidConfiguration, WrongStage, WrongType

# ---- log lines -----------------------------------------------------------------------------------
#
# Log lines as values: the caller of the configuration decides where to log them.


class LogLine(NamedTuple):
    """A text and its `logging` level."""

    level: int
    text: str

    def __str__(self) -> str:
        return f"{logging.getLevelName(self.level)} - {self.text}"


info, warning = partial(LogLine, logging.INFO), partial(LogLine, logging.WARNING)

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


class Counts(NamedTuple):
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
            where = f"layer {place.layer}, which is in chunk {place.chunk} of stage {place.stage}"
            advice = "give a row for each chunk, with a count for each stage"
            raise WrongStage(f"{self.key}={self.given} has no count for {where}; {advice}")
        return 0 <= place.index < self.rows[place.chunk][place.stage]

    @property
    def printed(self) -> object:
        """The normal form as MindFormers prints it."""
        return as_lists(self.rows)


class Indices(NamedTuple):
    """Layers by index, as given; `everywhere` selects all layers."""

    layers: tuple[int, ...] = ()
    everywhere: bool = False

    def has_layer(self, layer: int) -> bool:
        """Return whether a layer is selected."""
        return self.everywhere or layer in self.layers

    def covers(self, place: LayerPlace) -> bool:
        """Return whether the layer at a place is selected."""
        return self.has_layer(place.layer)

    @property
    def printed(self) -> object:
        """The normal form as MindFormers prints it."""
        return True if self.everywhere else list(self.layers)


LayerSelection: TypeAlias = Counts | Indices


def read_indices(value: object, *, key: str) -> Indices:
    """Return the layers that a value names while swap is on.

    Raises:
        InvalidConfiguration: the value is neither a bool nor a flat list of numbers.
    """
    if isinstance(value, bool):
        return Indices(everywhere=value)
    if is_list_of(value, int):
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
    if value is False:
        rows: Table = ((0,) * layout.stages,) * layout.chunks
    elif is_list_of(value, int):
        rows = _spread_stages(value, layout, key)
    elif value is True or is_list_of(value, str):
        rows = layout.table  # names of operators are without counts: all layers
    elif isinstance(value, (list, tuple)):
        rows = tuple(_clamp_row(value, chunk, layout, key) for chunk in range(len(value)))
    else:
        raise _illegal(value, key, COUNTS)
    return Counts(key=key, rows=rows, given=repr(value))


def is_list_of(value: object, *kinds: type[Any]) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list or tuple of items of these types, or empty."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, kinds) for item in value)


def _illegal(value: object, key: str, accepted: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"Illegal input list for {key}: {value!r}. Give {accepted}")


def _spread_stages(value: Sequence[int], layout: Layout, key: str) -> Table:
    """Deal the count of each stage to its chunks in turn; earlier chunks get the remainder."""
    columns = []
    for stage, wanted in enumerate(value[: layout.stages]):
        sizes = [row[stage] for row in layout.table]
        count = min(_clamp(wanted, sum(sizes)), sum(sizes))
        if count < 0:
            asked = f"{wanted} of the {sum(sizes)} layers of stage {stage}"
            raise InvalidConfiguration(f"{key}={value!r}: cannot select {asked}; give {COUNTS}")
        turns = sorted((turn, chunk) for chunk, size in enumerate(sizes) for turn in range(size))
        dealt = [chunk for _, chunk in turns[:count]]
        columns.append([dealt.count(chunk) for chunk in range(layout.chunks)])
    columns += [[0] * layout.chunks] * (layout.stages - len(columns))
    if len(value) > layout.stages:
        counted = f"{len(value)} counts, but the pipeline has {layout.stages} stages"
        raise WrongStage(f"{key}={value!r}: {counted}")
    return tuple(zip(*columns, strict=True))


def _clamp_row(value: Sequence[object], chunk: int, layout: Layout, key: str) -> tuple[int, ...]:
    """Return the counts of one chunk, each at most the number of layers of its slot."""
    row = value[chunk]
    sizes = layout.table[chunk] if chunk < layout.chunks else ()
    counts = [row] * len(sizes) if isinstance(row, bool) else row
    if not is_list_of(counts, int):
        raise _illegal(value, key, COUNTS)
    surplus = counts[len(sizes) :]
    if any(item is not False for item in surplus) or (isinstance(row, bool) and not sizes):
        has = f"the pipeline has {layout.chunks} chunks of {layout.stages} stages"
        much = f"row {chunk} has more counts than there are slots"
        raise WrongStage(f"{key}={value!r}: {much}; {has}")
    return tuple(map(_clamp, counts, sizes)) + (0,) * len(surplus)


def _clamp(count: int, size: int) -> int:
    if isinstance(count, bool):
        return size if count else 0
    return min(count, size)


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


class ModelInputs(NamedTuple):
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
        least = {"pp_interleave_num": 1, "pipeline_stage": 1}
        for key in ("num_layers", *least, "start_stage", "stage_num"):
            _check_whole(key, getattr(self, key), least.get(key, 0))
        average = self.num_layers // (self.chunks * self.stages)
        table = tuple(tuple(average + n for n in row) for row in _spread_offset(self))
        totals = itertools.accumulate(n for row in table for n in row)
        cumulative = tuple(tuple(itertools.islice(totals, self.stages)) for _ in table)
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "cumulative", cumulative)

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
        raise InvalidArgument(f"layer {layer}: this layout has {self.num_layers} layers")

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


def lay_out(inputs: ModelInputs, **given: Any) -> Layout:
    """Return the layout from the arguments; the document fills in missing ones.

    Args:
        inputs: the document's values for the model.
        **given: arguments of `Layout`; None: as in the document, else the default.

    Raises:
        InvalidConfiguration: the number of layers is unknown, or the numbers do not fit.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    values = {name: value for name, value in inputs._asdict().items() if value is not None} | asked
    if "num_layers" not in values:
        where = "Pass num_layers=, or set model.model_config.num_layers in the document."
        raise InvalidConfiguration(f"num_layers is unknown. {where}")
    return Layout(**values)


def as_lists(table: Table) -> list[list[int]]:
    """Return a table in printed form."""
    return [list(row) for row in table]


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_whole(key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongType(f"{key}={value!r}: expected a whole number of at least {least}")
    if value < least:
        raise InvalidConfiguration(f"{key}={value!r}: expected at least {least}")


def _spread_offset(layout: Layout) -> Table:
    """Return the offset of every slot. Check its sum as given, before repeating it per slot."""
    stages, chunks, offset = layout.stages, layout.chunks, layout.offset
    rows = _read_offset(offset)
    if isinstance(offset, int):
        repeated: Table = ((offset,) * stages,) * chunks
    else:
        _check_shape(layout, offset, rows)
        repeated = rows if len(rows) == chunks else rows * chunks
    total = sum(map(sum, rows))
    remainder = layout.num_layers % (stages * chunks)
    if total != remainder:
        slots = f"(pp ({stages}) * pp_interleave_num ({chunks}))"
        raise InvalidConfiguration(
            f"The sum of `offset` ({total}) should equal to remainder of `num_layers` "
            f"({layout.num_layers}) % {slots} = {remainder}; `offset`: {offset}"
        )
    return repeated


def _read_offset(offset: object) -> Table:
    """Return the rows of an offset; a number or a list of numbers is one row."""
    row = [offset] if is_whole(offset) else offset
    rows = row if row and is_list_of(row, list, tuple) else [row]
    if not all(isinstance(each, (list, tuple)) and all(map(is_whole, each)) for each in rows):
        accepted = "a whole number, a list with one for each stage, or such a list for each chunk"
        raise WrongType(f"offset={offset!r}: expected {accepted}")
    return tuple(map(tuple, rows))


def _check_shape(layout: Layout, offset: Sequence[object], rows: Table) -> None:
    shapes = [("[-1]", "pp", layout.stages, len(row)) for row in rows]
    if rows and offset and not is_whole(offset[0]):
        shapes.append(("[-2]", "pp_interleave_num", layout.chunks, len(rows)))
    for axis, name, wanted, got in shapes:
        if got != wanted:
            must = f"offset.shape{axis} should equal to `{name}` ({wanted})"
            raise InvalidConfiguration(f"{must}, but got ({got}). `offset`: {offset}")
