"""What the host takes for a step, from steps of different plans that it was the limit of."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from swapkit.ir.traces import HostTime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from swapkit.ir.plans import Plan


def find_host_time(steps: Iterable[tuple[Plan, float]]) -> HostTime | None:
    """Return what explains how long steps with different plans took; None: they do not tell.

    Nothing takes less than no time: of all choices of what may take some, the one that comes
    nearest and has no negative time.

    Args:
        steps: plans, and seconds of steps that the host was the limit of.
    """
    rows, times = [], []
    for plan, seconds in steps:
        rows.append((1, *plan.count_moved()))
        times.append(seconds)
    if len(rows) < 2:
        return None
    counts, taken = np.array(rows, dtype=np.float64), np.array(times)
    varying = [column for column in (1, 2) if np.ptp(counts[:, column]) > 0]
    if not varying or np.linalg.matrix_rank(counts[:, [0, *varying]]) <= len(varying):
        return None
    found = min(_fit_each(counts, taken, varying), key=lambda each: each[0])
    step, swap, recompute = found[1]
    return HostTime(step_seconds=step, swap_seconds=swap, recompute_seconds=recompute)


def _fit_each(
    counts: NDArray[np.float64], taken: NDArray[np.float64], varying: list[int]
) -> Iterable[tuple[float, list[float]]]:
    """Yield errors and times, for each choice of what takes time besides the step as such."""
    choices = (itertools.combinations(varying, count) for count in range(len(varying) + 1))
    for chosen in itertools.chain.from_iterable(choices):
        columns = [0, *chosen]
        times, *_ = np.linalg.lstsq(counts[:, columns], taken, rcond=None)
        if (times >= 0).all():
            whole = np.zeros(counts.shape[1])
            whole[columns] = times
            yield float(np.sum((counts @ whole - taken) ** 2)), whole.tolist()
