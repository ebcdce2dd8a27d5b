"""Chunks of an optimizer's groups: the parameters whose states are on the device together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Group = dict[str, Any]
_ABSENT = object()


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Some parameters of one group, in the group's order."""

    group: Group
    params: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0  # of their states that are on the device during the step


def divide(group: Group, sizes: list[int], chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of one group, at least one. `sizes`: bytes of states per parameter."""
    params = group["params"]
    if len({id(param) for param in params}) < len(params):
        # Keep the group whole: the step updates a parameter listed twice two times in a row.
        return [Chunk(group=group, params=params, nbytes=sum(sizes))]
    chunks = [Chunk(group=group)]
    for param, nbytes in zip(params, sizes, strict=True):
        if chunks[-1].nbytes and chunks[-1].nbytes + nbytes > chunk_bytes:
            chunks.append(Chunk(group=group))
        chunks[-1].params.append(param)
        chunks[-1].nbytes += nbytes
    return chunks


def take_over(given: Group, group: Group) -> None:
    """Copy entries that a step changed in the group it was given to the original group."""
    for key, value in given.items():
        if key != "params" and group.get(key, _ABSENT) is not value:
            group[key] = value
