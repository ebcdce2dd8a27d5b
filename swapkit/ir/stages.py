"""The place of a rank in a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The stages of a rank, and the pipeline that they belong to."""

    stages: tuple[int, ...]  # in order
    count: int  # of the pipeline's stages, on all ranks
    ranks: tuple[int, ...]  # of the default process group, which have a stage each, or several


def join_places(places: Iterable[StagePlace]) -> StagePlace | None:
    """Return the place of a rank with all these stages; None: none, or of several pipelines."""
    known = set(places)
    if len({(each.count, each.ranks) for each in known}) != 1:
        return None
    first = next(iter(known))
    stages = {stage for each in known for stage in each.stages}
    return StagePlace(tuple(sorted(stages)), first.count, first.ranks)
