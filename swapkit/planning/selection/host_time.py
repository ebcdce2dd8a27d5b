"""The host's time for a step, fitted to host-bound steps of different plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from swapkit.ir.plans import Plan
from swapkit.ir.traces import HostTime


def find_host_time(steps: Iterable[tuple[Plan, float]]) -> HostTime | None:
    """Return the host time that explains the steps best; None: the steps do not determine it.

    This is a least-squares fit over all subsets of terms (swaps, recomputations), restricted to
    fits without a negative time.

    Args:
        steps: plans, and the seconds of host-bound steps with them.
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
    """Yield the error and the times of each fit, for each subset of terms besides the step."""
    choices = (itertools.combinations(varying, count) for count in range(len(varying) + 1))
    for chosen in itertools.chain.from_iterable(choices):
        columns = [0, *chosen]
        times, *_ = np.linalg.lstsq(counts[:, columns], taken, rcond=None)
        if (times >= 0).all():
            whole = np.zeros(counts.shape[1])
            whole[columns] = times
            yield float(np.sum((counts @ whole - taken) ** 2)), whole.tolist()
