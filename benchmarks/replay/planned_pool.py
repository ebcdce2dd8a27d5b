"""The pool with planned addresses: a step that repeats, as a session serves it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from benchmarks.replay.pool import ReplayedPool
from benchmarks.replay.repeating import repeat_step
from benchmarks.replay.replaying import (
    Failure,
    ReplayFigures,
    ReplayOutcome,
    describe_failure,
)
from benchmarks.replay.texts import LayoutReport
from swapkit._native.layout import TAG_BACKWARD, TAG_OPTIMIZER, Lives, NativeItems
from swapkit._native.pool import set_tag
from swapkit._runtime.allocators.pool_layout import PoolLayout
from swapkit.errors import OverBudget
from swapkit.ir.traces import Phase
from swapkit.planning.beside import at_once
from swapkit.planning.layout.steps import read_step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.replay.allocations import Allocation, AllocationTrace
    from swapkit._native.layout import LayoutStats

_MOST_STEPS = 8  # without a layout; a session makes one sooner, or this step gets none
_LABELS = TAG_OPTIMIZER - 1  # bits of a tag for the call site
_PHASES = {Phase.BACKWARD: TAG_BACKWARD, Phase.OPTIMIZER: TAG_OPTIMIZER}


class PlannedPool:
    """swapkit's pool after the step of a trace has repeated often enough to have a layout.

    The first steps run without a limit: in training, a session then gives memory back as the pool
    asks for it. The layout is made and kept by the code that does so for a session. Addresses of
    other streams than the largest are not planned.
    """

    def __init__(self, trace: AllocationTrace) -> None:
        """Repeat the step until its addresses are planned; a step may get no layout.

        Args:
            trace: with at least one block.
        """
        self._trace = trace
        self._step = repeat_step(trace)
        self._tags = [_tag_of(block) for block in trace.blocks]
        self._allocator = ReplayedPool()
        self._lives = Lives(self._allocator.pool)
        self._at: dict[int, int] = {}  # block -> its address
        self.layout: LayoutReport | None = None  # of a step without a limit
        self._layout = PoolLayout(self._allocator.pool)
        self._layout.start(self)
        with at_once():
            self._prepare()

    def run(self, budget_bytes: int | None = None) -> ReplayOutcome:
        """Replay the step once more, within a budget, and return to the steps without a limit."""
        pool = self._allocator.pool
        figures = ReplayFigures()
        failure: Failure | None
        self._drop()  # else it would count towards the budget of this step
        try:
            pool.set_budget(budget_bytes or 0)
        except OverBudget:
            failure = self._find_first_above(budget_bytes or 0)
            figures.reserved = figures.allocated = failure.reserved_bytes
            has_begun = False
        else:
            figures.reserved = figures.last_reserved = self._allocator.reserved_bytes
            failure = self._begin(figures) or self._play_step(figures)
            has_begun = True
            pool.set_budget(0)
        self._recover(has_failed=has_begun and failure is not None)
        return figures.outcome(failure)

    def close(self) -> None:
        """Give all blocks and the memory back."""
        self._layout.stop(self)
        self._allocator.close()

    # ---- steps -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Repeat the step until it lies as planned."""
        self._play(range(self._trace.present))
        for _ in range(_MOST_STEPS):
            former_splits = -self._count_splits()
            self._play_step()
            former_splits += self._count_splits()
            self._end()
            if self._layout.stats().height_bytes:
                break
            self._begin()
        else:
            self._play_step()
            self._allocator.end_step()
            return
        self._begin()
        self._play_step()
        self._end()  # gives back what the layout replaces
        before, maps = self._layout.stats(), self._allocator.pool.maps()
        splits = self._count_splits()
        self._begin()
        self._play_step()
        self._allocator.end_step()
        if before.height_bytes:
            self.layout = self._report(
                before,
                maps=self._allocator.pool.maps() - maps,
                splits=self._count_splits() - splits,
                former_splits=former_splits,
            )

    def _end(self) -> None:
        self._allocator.end_step()
        self._layout.end_step(is_settled=True)

    def _begin(self, figures: ReplayFigures | None = None) -> Failure | None:
        """Begin the step: what the former one left is given, or serves in this one."""
        self._drop()
        for block, former in self._step.handed.items():
            self._at[block] = self._at.pop(former)
        failure = self._play(self._step.renewed, figures)
        if figures is not None:
            figures.note(self._allocator)
        return failure

    def _drop(self) -> None:
        """Give what the former step left and no other takes over, unless it was given before."""
        for block in self._step.dropped:
            if block in self._at:
                self._allocator.give(self._at.pop(block))

    def _recover(self, *, has_failed: bool) -> None:
        """Return to steps that lie as planned, after one within a budget."""
        self._allocator.end_step()
        if has_failed:
            present = self._trace.present
            for move in self._trace.moves[present:]:
                block = max(move, ~move)
                if block in self._at:
                    self._allocator.give(self._at.pop(block))
            self._play([block for block in range(present) if block not in self._at])
            self._play_step()
            self._allocator.end_step()
        self._begin()
        self._play_step()
        self._allocator.end_step()
        self._lives.trim_unplanned()

    def _play_step(self, figures: ReplayFigures | None = None) -> Failure | None:
        present = self._trace.present
        return self._play(self._trace.moves[present:], figures, first=present)

    def _play(
        self, moves: Iterable[int], figures: ReplayFigures | None = None, *, first: int = 0
    ) -> Failure | None:
        """Take and give blocks; return the first failure, which ends this.

        Args:
            moves: as in a trace: takes of what exists before the step, or the step's own.
            figures: of these moves.
            first: the number of the step's first move.
        """
        outer_tag = set_tag(0)
        try:
            for number, move in enumerate(moves, first):
                if move < 0:
                    self._allocator.give(self._at.pop(~move))
                    continue
                block = self._trace.blocks[move]
                set_tag(self._tags[move])
                address = self._allocator.take(block.nbytes, block.stream)
                if address is None:
                    event = move if move < self._trace.present else number
                    return describe_failure(self._allocator, event, move, block.nbytes)
                self._at[move] = address
                if figures is not None:
                    figures.note(self._allocator)
        finally:
            set_tag(outer_tag)
        return None

    # ---- figures ---------------------------------------------------------------------------------

    def _count_splits(self) -> int:
        return self._allocator.pool.stats()["num_splits"]

    def _report(self, before: LayoutStats, **counts: int) -> LayoutReport:
        after = self._layout.stats()
        lifetimes = read_step(*self._lives.read()).lifetimes()
        items = NativeItems(lifetimes.starts, lifetimes.ends, lifetimes.nbytes, None)
        return LayoutReport(
            height_bytes=after.height_bytes,
            lower_bound_bytes=items.measure(),
            hits=after.hits - before.hits,
            hit_bytes=after.hit_bytes - before.hit_bytes,
            requests=_count_requests(after) - _count_requests(before),
            request_bytes=after.served_bytes - before.served_bytes,
            **counts,
        )

    def _find_first_above(self, budget_bytes: int) -> Failure:
        """Return the first block of those before the step that does not fit into the budget."""
        in_use = 0
        for block in range(self._trace.present):
            nbytes = self._trace.blocks[block].nbytes
            if in_use + nbytes > budget_bytes:
                break
            in_use += nbytes
        else:
            in_use -= nbytes  # all fit in bytes, but not in whole pieces of memory
        return Failure(
            event=block,  # the first moves take the first blocks
            block=block,
            asked_bytes=nbytes,
            reserved_bytes=in_use,
            allocated_bytes=in_use,
        )


def _count_requests(stats: LayoutStats) -> int:
    return stats.hits + stats.holes + stats.misses + stats.unplanned


def _tag_of(block: Allocation) -> int:
    """Return the tag of a block's call site, as the threads of a session have one."""
    label = zlib.crc32(block.label.encode()) & _LABELS
    return label | (_PHASES.get(block.phase, 0) if block.phase is not None else 0)
