"""Swapping by stages: what is idle across a stage of forward goes out, up to a bucket of bytes.

A *stage* is a number of layers with attention, in forward or in backward. What one stage of forward
makes and uses, and backward reads, is copied out after its last use in forward, is gone when that
is done (there: two stages later), and is copied back one stage before it is read. Nothing is
searched or simulated: whether the step fits, and how fast it is, comes out as it may.

Source:
    MindSpeed, SmartSwap, policy version 2.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import Kind, Phase
from swapkit.simulation.lowering import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace

_log = logging.getLogger(__name__)

LEAST_BYTES = 20 << 20
LEAST_STAGES = 2  # between out and back
_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSwapPolicy:
    """A policy for `make_plan`, by the fields of SmartSwap's configuration."""

    bucket_bytes: int | None = None  # most that a stage swaps; None: all that it can, 0: nothing
    layers_per_stage: int = 1
    least_bytes: int = LEAST_BYTES  # what is smaller stays
    moves_optimizer: bool = False  # optimizer states, too
    layers: tuple[str, ...] = ()  # paths of the model's layers; none: modules with a number

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return what the stages swap; of the machine, only the budget is noted."""
        stages = find_stages(trace, self.layers_per_stage, self.layers)
        if not stages:
            _log.warning("no layers were found, so there are no stages that swap anything")
        gaps = list(self._list_gaps(trace, stages))
        # A stage of backward begins where something of its stage of forward is first read.
        begins = {stage: min(gap.use for gap in gaps if gap.stage == stage) for stage in
                  {gap.stage for gap in gaps}}  # fmt: skip
        bounds = sorted({*stages, *begins.values()})
        decisions = [*self._swap(gaps, bounds), *self._swap_states(trace, bounds)]
        return Plan(
            decisions=tuple(sorted(decisions, key=lambda each: each.storage)),
            budget_bytes=machine.budget_bytes,
            policy="stages",
            signature=trace.signature,
        )

    def _list_gaps(self, trace: Trace, stages: Sequence[int]) -> Iterator[_Gap]:
        """Yield what one stage of forward makes and uses, in the order of its last use there."""
        problem = lower(trace, least_bytes=self.least_bytes)
        firsts = problem.slot_operators.tolist()
        gaps = []
        for item, storage in enumerate(problem.item_storages.tolist()):
            if trace.storages[storage].continues is not None:
                continue  # no stage of forward makes it
            birth, use = firsts[problem.births[item]], firsts[problem.uses[item]]
            last = firsts[problem.releases[item] + 1] - 1
            stage = bisect_right(stages, last)
            if bisect_right(stages, birth) == stage and stage:
                gaps.append(_Gap(last, storage, trace.storages[storage].nbytes, stage, use))
        yield from sorted(gaps, key=lambda gap: (gap.last, gap.storage))

    def _swap(self, gaps: Sequence[_Gap], bounds: Sequence[int]) -> Iterator[Decision]:
        left: dict[int, float] = {}
        for gap in gaps:
            room = left.setdefault(
                gap.stage, float("inf") if self.bucket_bytes is None else self.bucket_bytes
            )
            out, back = bisect_right(bounds, gap.last), bisect_right(bounds, gap.use) - 1
            # The last stage of forward and the first of backward are neighbours: nothing is won.
            if gap.nbytes > room or back - out < LEAST_STAGES:
                continue
            left[gap.stage] = room - gap.nbytes
            yield Decision(
                storage=gap.storage,
                action=Action.SWAP,
                prefetch=bounds[back - 1],
            )

    def _swap_states(self, trace: Trace, bounds: Sequence[int]) -> Iterator[Decision]:
        """Swap all optimizer states, to be back with the last stage of backward."""
        if not self.moves_optimizer:
            return
        problem = lower(trace, optimizer_states=True, least_bytes=self.least_bytes)
        for item, storage in enumerate(problem.item_storages.tolist()):
            if trace.storages[storage].kind is Kind.OPTIMIZER_STATE:
                use = int(problem.slot_operators[problem.uses[item]])
                before = bounds[: bisect_right(bounds, use)]
                yield Decision(
                    storage=storage,
                    action=Action.SWAP,
                    prefetch=before[-1] if before else use,
                )


@dataclass(frozen=True, slots=True)
class _Gap:
    """When a storage is idle: after operator `last`, before `use`."""

    last: int
    storage: int
    nbytes: int
    stage: int  # of forward, from 1
    use: int


def find_stages(
    trace: Trace, layers_per_stage: int = 1, layers: Sequence[str] = ()
) -> tuple[int, ...]:
    """Return the first operator of each stage of forward.

    Args:
        trace: the step; each microbatch has stages of its own.
        layers_per_stage: layers with attention; where no layer has any, all count.
        layers: their paths. None: a layer is the outermost module whose name is a number.
    """
    pattern = _layer_pattern(layers)
    forward = [
        (number, operator.microbatch, match.group(), operator)
        for number, operator in enumerate(trace.operators)
        if operator.phase is Phase.FORWARD and (match := pattern.match(operator.module))
    ]
    attending = {
        layer
        for _, _, layer, operator in forward
        if _ATTENTION.search(operator.name) or _ATTENTION.search(operator.module)
    }
    begins: dict[tuple[int, str], int] = {}
    counts: dict[int, int] = {}
    stages = []
    for number, microbatch, layer, _ in forward:
        if (microbatch, layer) in begins or (attending and layer not in attending):
            continue
        begins[microbatch, layer] = number
        count = counts[microbatch] = counts.get(microbatch, 0) + 1
        if (count - 1) % layers_per_stage == 0:
            stages.append(number)
    return tuple(stages)


def _layer_pattern(layers: Sequence[str]) -> re.Pattern[str]:
    """Return what matches the beginning of a module's path that is a layer's."""
    if not layers:
        return _LAYER
    paths = "|".join(map(re.escape, sorted(layers, key=len, reverse=True)))
    return re.compile(rf"(?:{paths})(?=\.|$)")
