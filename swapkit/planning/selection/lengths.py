"""Inputs of any length: one plan for all steps that differ only in sizes.

Such steps run the same operators. The plan is made from one recorded step, scaled to the longest
inputs seen so far: a plan that fits these fits all shorter ones. Sizes and times are assumed to
grow with the inputs. If they do not, a rescue helps, and then plans for less memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swapkit.ir.traces import Kind
from swapkit.planning.selection.cases import RECORDINGS, Case

if TYPE_CHECKING:
    from swapkit.ir.traces import Storage, Trace

GROWING = frozenset({Kind.ACTIVATION, Kind.INPUT})
AHEAD = 1.125  # times a length beyond the plan: the next planned one, as lengths keep growing


@dataclass(slots=True, eq=False)
class Lengths:
    """Steps whose inputs differ only in their sizes. Lengths are numbers of elements."""

    case: Case = field(default_factory=lambda: Case(recordings=RECORDINGS))
    longest: int = 0  # of all steps seen
    planned: int = 0  # the longest inputs that the plan is for
    may_grow: bool = True  # whether longer inputs may have a plan
    _trace: Trace | None = None  # as recorded,
    _recorded: int = 0  # with inputs of this length

    def see(self, length: int) -> None:
        """Count the length of a step."""
        self.longest = max(self.longest, length)

    def record(self, trace: Trace, length: int) -> Trace:
        """Store a recorded step; return the step scaled to the longest inputs."""
        self._trace, self._recorded, self.may_grow = trace, length, True
        return self._scale(self.longest)

    def as_recorded(self) -> Trace | None:
        """Return the unscaled step, after no plan was found for the scaled one; None: tried."""
        if self.planned <= self._recorded:
            return None
        self.may_grow = False
        return self._scale(self._recorded)

    def grow(self) -> Trace | None:
        """Return the step for inputs longer than planned; None: the plan covers all seen so far."""
        if not self.may_grow or self._trace is None or self.longest <= self.planned:
            return None
        return self._scale(math.ceil(self.longest * AHEAD))

    def _scale(self, length: int) -> Trace:
        assert self._trace is not None
        self.planned = length
        return scale(self._trace, length / self._recorded if self._recorded else 1.0)


def scale(trace: Trace, factor: float) -> Trace:
    """Return the step with inputs that are `factor` times as long."""
    if factor == 1.0:
        return trace
    return replace(
        trace,
        operators=tuple(
            replace(
                each,
                seconds=each.seconds * factor,
                workspace_bytes=math.ceil(each.workspace_bytes * factor),
            )
            for each in trace.operators
        ),
        storages=tuple(_scale_storage(each, factor) for each in trace.storages),
        step_seconds=trace.step_seconds * factor,
    )


def _scale_storage(storage: Storage, factor: float) -> Storage:
    if storage.kind not in GROWING:
        return storage
    return replace(storage, nbytes=math.ceil(storage.nbytes * factor))
