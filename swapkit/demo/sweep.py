"""Every policy at every budget: step times over a sweep, on a fast and on a slow link to the host.

The runs of one budget and one link take turns step by step, so that all meet the same noise: no
limit, full recompute, and a session with each policy. Only half of the processors compute: copies
need some, too, on a CPU, where other devices have engines for them.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from swapkit.demo.children import RunFailedError
from swapkit.demo.messages import RunKind
from swapkit.demo.options import DemoOptions
from swapkit.demo.race import Entrant, Progress, enter_runs, take_turns
from swapkit.demo.results import RunResult

POLICIES = ("rescue", "swap", "recompute", "auto")
NO_LIMIT, FULL_RECOMPUTE = "none", "full"
SIZE = "sweep"
UNTIMED = 9
"""By then sessions with a plan are stable."""
SLOWDOWN = 0.5
"""On the slow link, swapping everything would cost this share of the step."""
FAST_LINK = 0.0
# A link that is busy for this share of the step in each direction makes swapping everything cost
# `SLOWDOWN`: copies out then end that much after forward, and copies back that much after backward.
_BUSY_SHARE = (1 + SLOWDOWN) / 2
UNITS_PER_RUN = 1 + UNTIMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The runs at one budget over one link.

    Args:
        share: of the activations, which the budget leaves room for.
        bytes_per_s: of the link; 0: as fast as memory.
        results: by policy, those without a session included.
    """

    share: float
    bytes_per_s: float
    results: dict[str, RunResult]

    def seconds(self, name: str) -> float | None:
        """Median of a run's timed steps.

        Args:
            name: of `results`.
        """
        return self.results[name].median_seconds

    def recovered(self, name: str) -> float | None:
        """Share of what full recompute costs that a run does not pay; None: it did not finish.

        Args:
            name: of `results`.
        """
        return self._recovered_by(self.results[name].seconds)

    def possible(self) -> float | None:
        """The same share for the bound that no plan can beat; None: it is not known."""
        bound = self.results["auto"].finished.bound_share
        if bound is None:
            return None
        free = self.results[NO_LIMIT].seconds
        return self._recovered_by(tuple(bound * seconds for seconds in free))

    def _recovered_by(self, seconds: Sequence[float]) -> float | None:
        if not seconds:
            return None
        free, full = self.results[NO_LIMIT].seconds, self.results[FULL_RECOMPUTE].seconds
        saved = [most - mine for most, mine in zip(full, seconds, strict=True)]
        cost = [most - least for most, least in zip(full, free, strict=True)]
        return statistics.median(saved) / statistics.median(cost)


def unit_count(options: DemoOptions) -> int:
    """Length of the progress bar.

    Args:
        options: of the demo.
    """
    runs = len(POLICIES) + 2
    return 2 * len(options.shares) * runs * (UNITS_PER_RUN + options.sweep_steps)


def sweep(options: DemoOptions, progress: Progress) -> tuple[Point, ...]:
    """Run everything.

    Args:
        options: of the demo.
        progress: told how it goes.

    Returns:
        The points, those on the fast link first.

    Raises:
        RunFailedError: a run crashed.
    """
    options = replace(options, threads=max(1, options.threads // 2))
    fast = [_run_point(options, share, FAST_LINK, progress) for share in options.shares]
    if not fast:
        return ()
    speed = _slow_link(fast[0])
    return (*fast, *(_run_point(options, share, speed, progress) for share in options.shares))


def _slow_link(point: Point) -> float:
    """Bytes per second at which swapping all activations would cost `SLOWDOWN`."""
    result = point.results[NO_LIMIT]
    seconds = result.median_seconds
    assert seconds is not None
    activation_bytes = result.peak_bytes - result.state_bytes
    return activation_bytes / (_BUSY_SHARE * seconds)


def _run_point(options: DemoOptions, share: float, bytes_per_s: float, progress: Progress) -> Point:
    with ExitStack() as stack:
        enter = stack.enter_context(
            enter_runs(options, size=SIZE, untimed=UNTIMED, bytes_per_s=bytes_per_s)
        )
        free = enter(NO_LIMIT, RunKind.POOL, None)
        _warm(free, progress)
        if free.warmed is None:
            msg = "the run without a limit ran out of memory"
            raise RunFailedError(msg)
        state_bytes = free.warmed.state_bytes
        activation_bytes = free.warmed.pool_peak_bytes - state_bytes
        budget_bytes = int(state_bytes + share * activation_bytes)
        entrants = {NO_LIMIT: free}
        for name, kind, policy in _others():
            limit = budget_bytes if kind == RunKind.BUDGETED else None
            entrants[name] = enter(name, kind, limit, policy)
            _warm(entrants[name], progress)
        take_turns(list(entrants.values()), options.sweep_steps, progress)
        for entrant in entrants.values():
            if entrant.finished is None:
                entrant.finish()
        results = {name: entrant.result() for name, entrant in entrants.items()}
    return Point(share=share, bytes_per_s=bytes_per_s, results=results)


def _others() -> Iterator[tuple[str, RunKind, str]]:
    yield FULL_RECOMPUTE, RunKind.RECOMPUTE, ""
    for policy in POLICIES:
        yield policy, RunKind.BUDGETED, policy


def _warm(entrant: Entrant, progress: Progress) -> None:
    label = entrant.child.spec.label
    progress(f"sweep, {label}: first steps", 0)
    entrant.warm()
    progress(f"sweep, {label}: first steps", UNITS_PER_RUN)
