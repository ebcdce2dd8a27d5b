"""Recordings of small pipelines, whose microbatches are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.pipelines.composing import PipelineRecordings
from benchmarks.pipelines.microbatches import read_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pipelines.orders import JobOrder
    from swapkit.ir.traces import Trace


def record(order: JobOrder, chunks: Sequence[Sequence[Trace]]) -> PipelineRecordings:
    """The recordings of a pipeline whose microbatches are alike."""
    stages = [read_chunks(own, order.microbatches) for own in chunks]
    return PipelineRecordings(order, stages)
