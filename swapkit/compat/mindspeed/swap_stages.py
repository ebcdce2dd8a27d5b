"""The stages of a step, as SmartSwap names them: part of the step, microbatch, layer.

Source:
    MindSpeed, SmartSwap, `SwapStage` and `SwapStageType`.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.ir.traces import Phase
from swapkit.planning.policies.stage_swap import find_stages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.traces import Trace


class SwapStageType(enum.Enum):
    """The part of a step."""

    INIT = 0
    FWD = 1
    BWD = 2
    OPTIM = 3
    RESERVED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStage:
    """A stage; microbatches and layers count from 1, and 0 stands for none."""

    stage_type: SwapStageType | None = None
    micro_batch_index: int | None = None
    layer_index: int | None = None
    model_index: int = 0

    def copy(self) -> SwapStage:
        """Return the stage: it never changes."""
        return self

    def __str__(self) -> str:
        """Return the fields by MindSpeed's short names."""
        name = None if self.stage_type is None else self.stage_type.name
        return str(
            {
                "stage_type": name,
                "mbi": self.micro_batch_index,
                "li": self.layer_index,
                "model_id": self.model_index,
            }
        )


_TYPES = {
    Phase.FORWARD: SwapStageType.FWD,
    Phase.BACKWARD: SwapStageType.BWD,
    Phase.OPTIMIZER: SwapStageType.OPTIM,
}


def name_stages(trace: Trace, layers: Sequence[str] = ()) -> list[SwapStage]:
    """Return the stage of each operator.

    A stage of forward is a layer with attention, of which the first also has the operators before
    it; without layers, all of forward is one stage. A stage of backward begins at the first read of
    a storage that was saved in its stage of forward.

    Args:
        trace: the step.
        layers: paths of the layers; empty: modules with a number.
    """
    forward = _Layers(trace, find_stages(trace, layers=layers))
    stages: list[SwapStage] = []
    backward = 0
    for number, operator in enumerate(trace.operators):
        kind = _TYPES.get(operator.phase, SwapStageType.INIT)
        layer = 0
        if kind is SwapStageType.FWD:
            layer = forward.of(number)
        elif kind is SwapStageType.BWD:
            before = stages[-1] if stages else SwapStage()
            is_first = before.stage_type is not kind
            is_first = is_first or before.micro_batch_index != operator.microbatch + 1
            read = max(forward.saved(operator.microbatch, operator.reads), default=0)
            last = forward.count(operator.microbatch)
            backward = last if is_first else min(backward, read or backward)
            layer = max(backward, 1)
        is_numbered = kind in {SwapStageType.FWD, SwapStageType.BWD}
        microbatch = operator.microbatch + 1 if is_numbered else 0
        stages.append(SwapStage(stage_type=kind, micro_batch_index=microbatch, layer_index=layer))
    return stages


class _Layers:
    """The layers of forward, by operator and by saved storage."""

    def __init__(self, trace: Trace, firsts: Sequence[int]) -> None:
        self._operators = trace.operators
        self._firsts: dict[int, list[int]] = {}
        for first in firsts:
            self._firsts.setdefault(trace.operators[first].microbatch, []).append(first)
        # A storage belongs to the layer of forward that touched it last.
        self._last: dict[tuple[int, int], int] = {}
        for number, operator in enumerate(trace.operators):
            if operator.phase is Phase.FORWARD:
                for storage in (*operator.reads, *operator.writes):
                    if trace.storages[storage].is_saved:
                        self._last[operator.microbatch, storage] = self.of(number)

    def of(self, number: int) -> int:
        """Return the layer of an operator of forward, from 1."""
        firsts = self._firsts.get(self._operators[number].microbatch, [])
        return max(1, bisect_right(firsts, number))

    def count(self, microbatch: int) -> int:
        """Return the number of layers of a microbatch."""
        return len(self._firsts.get(microbatch, []))

    def saved(self, microbatch: int, storages: Sequence[int]) -> Iterator[int]:
        """Yield the layers of saved storages."""
        for storage in storages:
            layer = self._last.get((microbatch, storage))
            if layer is not None:
                yield layer
