"""The choice of a way for each stage of a pipeline: first the least time, then the least memory.

Each stage's own fastest way is not the best for the pipeline: where a stage waits for others
anyway, it can run its jobs more slowly, in less memory, without any loss. Times only grow with the
durations of jobs, because their order is fixed. So a stage that cannot take less memory while other
stages are fast cannot do so later, either, and one pass over the stages is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.pipelines.orders import JobTiming
    from benchmarks.pipelines.ways import StageWays

LEAST_GAIN = 1e-9  # of the step's time; less is a rounding error
# Limits for the work of a choice: timings of the whole pipeline, and jobs timed.
LEAST_TIMINGS, MOST_TIMINGS, MOST_JOBS = 40, 3000, 40_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JointChoice:
    """The number of each stage's way. `separate`: those that each stage would choose alone."""

    ways: tuple[int, ...]
    seconds: float
    separate: tuple[int, ...]
    separate_seconds: float
    timings: int = 0  # how many times the pipeline was timed
    is_complete: bool = True  # False: the limit of timings was reached


def choose_ways(
    timing: JobTiming,
    stages: Sequence[StageWays],
    budgets: Sequence[int],
    *,
    tolerance: float = 0.0,
    most_timings: int | None = None,
) -> JointChoice | None:
    """Return a way for each stage; None: a stage has no way within its budget.

    No choice that the search finds makes a shorter step. Among those of this time, each stage takes
    little memory, those that take the most first. The same arguments give the same choice.

    Args:
        timing: of the pipeline's jobs.
        stages: the ways of each stage.
        budgets: of each stage, in bytes.
        tolerance: share of its time that the step may take more if that saves memory.
        most_timings: limit of the search; None: suitable for the size of the pipeline.
    """
    pairs = zip(stages, budgets, strict=True)
    allowed = [_fastest_first(own, budget_bytes) for own, budget_bytes in pairs]
    if not all(allowed):
        return None
    if most_timings is None:
        affordable = MOST_JOBS // max(1, timing.firsts[-1])
        most_timings = min(max(LEAST_TIMINGS, affordable), MOST_TIMINGS)
    search = _WaySearch(timing, stages, allowed, most_timings)
    separate, separate_seconds = tuple(search.chosen), search.seconds
    search.hasten()
    seconds = search.seconds
    search.shrink(seconds * (1 + LEAST_GAIN + tolerance))
    return JointChoice(
        ways=tuple(search.chosen),
        seconds=search.seconds,
        separate=separate,
        separate_seconds=separate_seconds,
        timings=search.count,
        is_complete=search.count < most_timings,
    )


def _fastest_first(own: StageWays, budget_bytes: int) -> list[int]:
    """Return the ways within a budget."""

    def rank(way: int) -> tuple[float, int, int]:
        return own.total_seconds(way), own.ways[way].peak_bytes, way

    allowed = [way for way, each in enumerate(own.ways) if each.peak_bytes <= budget_bytes]
    return sorted(allowed, key=rank)


class _WaySearch:
    """A choice that is improved; `seconds`: the time of its step."""

    def __init__(
        self,
        timing: JobTiming,
        stages: Sequence[StageWays],
        allowed: Sequence[Sequence[int]],
        most_timings: int,
    ) -> None:
        """`allowed`: for each stage the ways within its budget, the fastest first."""
        self._timing, self._stages, self._allowed = timing, stages, allowed
        self._most, self.count = most_timings, 0
        self.chosen = [0] * len(stages)
        self._durations = [0.0] * timing.firsts[-1]
        self._early = [0.0] * timing.firsts[-1]
        for stage, own in enumerate(allowed):
            self._put(stage, own[0])
        self.seconds = self._time()
        # By stages where there are few of them, by blocks of stages where there are many.
        work = 2 * sum(map(len, allowed))
        self._has_time = work <= most_timings

    def hasten(self) -> None:
        """Take other ways as long as the step gets shorter."""
        improved = self.seconds > self._find_bound() * (1 + LEAST_GAIN)
        while improved and self.count < self._most // 2:
            improved = False
            for block in self._blocks():
                for moves in self._alternatives(block):
                    if self.count >= self._most // 2:
                        return
                    improved |= self._move(moves, self.seconds * (1 - LEAST_GAIN))

    def _find_bound(self) -> float:
        """Return a time that no choice can beat: each job takes the least of any way."""
        seconds: list[float] = []
        early: list[float] = []
        for own, numbers in zip(self._stages, self._allowed, strict=True):
            several = list(zip(*(own.ways[number].costs for number in numbers), strict=True))
            least = [min(each.seconds for each in costs) for costs in several]
            most = [max(each.early_seconds for each in costs) for costs in several]
            seconds += [least[kind] for kind in own.kinds]
            early += [most[kind] for kind in own.kinds]
        self.count += 1
        return max(self._timing.run(seconds, early))

    def shrink(self, most_seconds: float) -> None:
        """Take ways with less memory that leave the step within `most_seconds`."""
        if not self._has_time:
            for block in self._blocks():
                self._shrink_block(block, most_seconds)
            return
        peaks = [self._peak(stage, way) for stage, way in enumerate(self.chosen)]
        for stage in sorted(range(len(peaks)), key=lambda each: (-peaks[each], each)):
            for way in self._by_memory(stage):
                if self._peak(stage, way) >= peaks[stage]:
                    break
                if self._move({stage: way}, most_seconds):
                    break

    def _shrink_block(self, block: range, most_seconds: float) -> None:
        """Shrink a block of stages together, by the same number of ways."""
        smaller = {stage: self._list_smaller(stage) for stage in block}
        done, left = 0, max(map(len, smaller.values()))
        step = 1  # most blocks allow nothing, or everything
        while done < left and self.count < self._most:
            moves = {
                stage: ways[min(done + step, len(ways)) - 1]
                for stage, ways in smaller.items()
                if ways
            }
            if self._move(moves, most_seconds):
                done += step
                step = left - done if done == 1 else (left - done + 1) // 2
            else:
                left = done + step - 1
                step = (left - done + 1) // 2

    def _list_smaller(self, stage: int) -> list[int]:
        """Return the allowed ways with less memory than now, the one with the most first."""
        now = self._peak(stage, self.chosen[stage])
        ways = self._by_memory(stage)
        return [way for way in reversed(ways) if self._peak(stage, way) < now]

    def _by_memory(self, stage: int) -> list[int]:
        """Return the allowed ways, the one with the least memory first."""
        return sorted(self._allowed[stage], key=lambda way: (self._peak(stage, way), way))

    def _peak(self, stage: int, way: int) -> int:
        return self._stages[stage].ways[way].peak_bytes

    def _blocks(self) -> Iterator[range]:
        """Yield blocks of stages to change together, from all stages to single ones."""
        count = size = len(self.chosen)
        while size >= 1:
            for first in range(0, count, size):
                yield range(first, min(count, first + size))
            size = size // 2 if size > 1 else 0

    def _alternatives(self, block: range) -> Iterator[Mapping[int, int]]:
        """Yield other ways for all stages of a block: the second fastest of each, and so on."""
        for rank in range(max(len(self._allowed[stage]) for stage in block)):
            moves = {
                stage: self._allowed[stage][min(rank, len(self._allowed[stage]) - 1)]
                for stage in block
            }
            if any(self.chosen[stage] != way for stage, way in moves.items()):
                yield moves

    def _move(self, moves: Mapping[int, int], most_seconds: float) -> bool:
        """Take other ways if the step is within a time then; return whether it is."""
        before = {stage: self.chosen[stage] for stage in moves}
        for stage, way in moves.items():
            self._put(stage, way)
        seconds = self._time()
        if seconds <= most_seconds:
            self.seconds = seconds
            return True
        for stage, way in before.items():
            self._put(stage, way)
        return False

    def _put(self, stage: int, way: int) -> None:
        own = self._stages[stage]
        costs, part = own.ways[way].costs, slice(*self._timing.firsts[stage : stage + 2])
        seconds = [each.seconds for each in costs]
        early = [each.early_seconds for each in costs]
        self._durations[part] = [seconds[kind] for kind in own.kinds]
        self._early[part] = [early[kind] for kind in own.kinds]
        self.chosen[stage] = way

    def _time(self) -> float:
        self.count += 1
        pairs = zip(self._stages, self.chosen, strict=True)
        tail = max(own.ways[way].tail_seconds for own, way in pairs)
        return max(self._timing.run(self._durations, self._early)) + tail
