"""The pipeline stage and chunk of each layer.

A pipeline of P stages, each with V chunks (interleaves), has V x P *slots*. A slot holds the
average number of layers plus its `offset`. Layers are numbered through all stages of the first
chunk, then through all stages of the second, and so on.

Source:
    MindFormers, `LayerSetting`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from swapkit.config.mindformers.log_lines import LogLine, info
from swapkit.errors import InvalidArgument, InvalidConfiguration, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

    Offset: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]

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
