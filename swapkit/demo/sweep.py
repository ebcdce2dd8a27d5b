"""Step times of every policy at every budget, on a fast and on a slow link to the host.

The runs of one budget and one link (no limit, full recompute, and a session with each policy) take
turns step by step, so that machine noise affects all equally.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swapkit.demo.messages import RunKind
from swapkit.demo.options import DemoOptions
from swapkit.demo.progress import Progress
from swapkit.demo.race import (
    BUILD_UNITS,
    SETTLE_UNITS,
    build,
    catch_up,
    conclude,
    enter_runs,
    measure,
    settle,
    take_turns,
)
from swapkit.demo.results import RunResult
from swapkit.units import format_bytes

POLICIES = ("rescue", "swap", "recompute", "auto")
NO_LIMIT, FULL_RECOMPUTE = "none", "full"
SLOWDOWN = 0.5
"""On the slow link, swapping everything would cost this share of the step."""
FAST_LINK = 0.0
# If the link is busy for this share of the step in each direction, swapping everything costs
# `SLOWDOWN`: copies out end that much after forward, and copies back that much after backward.
_BUSY_SHARE = (1 + SLOWDOWN) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The runs at one budget over one link.

    Args:
        share: share of the activations that fits in the budget.
        bytes_per_s: speed of the link; 0: as fast as memory.
        results: results by policy, including those without a session.
    """

    share: float
    bytes_per_s: float
    results: dict[str, RunResult]

    @property
    def free(self) -> RunResult:
        """The run without a limit."""
        return self.results[NO_LIMIT]

    def recovered(self, name: str) -> float | None:
        """Return the share of full recompute's cost that a run avoids; None: it did not finish.

        Args:
            name: a key of `results`.
        """
        return self._recovered_by(self.results[name].seconds)

    def possible(self) -> float | None:
        """Return the same share for the lower bound of all plans; None: the bound is unknown."""
        bound = self.results["auto"].finished.bound_share
        if bound is None:
            return None
        free = self.free.seconds
        return self._recovered_by(tuple(bound * seconds for seconds in free))

    def _recovered_by(self, seconds: Sequence[float]) -> float | None:
        if not seconds:
            return None
        free, full = self.free.seconds, self.results[FULL_RECOMPUTE].seconds
        saved = [most - mine for most, mine in zip(full, seconds, strict=True)]
        cost = [most - least for most, least in zip(full, free, strict=True)]
        return statistics.median(saved) / statistics.median(cost)


def unit_count(options: DemoOptions) -> int:
    """Return the length of the progress bar.

    Args:
        options: options of the demo.
    """
    runs = len(POLICIES) + 2
    return 2 * len(options.shares) * runs * (BUILD_UNITS + SETTLE_UNITS + options.sweep_steps)


def sweep(options: DemoOptions, progress: Progress) -> tuple[Point, ...]:
    """Run the whole sweep.

    Args:
        options: options of the demo.
        progress: receives progress messages.

    Returns:
        The points, those on the fast link first.

    Raises:
        RunFailedError: a run crashed.
    """
    fast = [_run_point(options, share, FAST_LINK, progress) for share in options.shares]
    if not fast:
        return ()
    speed = _slow_link(fast[0])
    return (*fast, *(_run_point(options, share, speed, progress) for share in options.shares))


def link_name(bytes_per_s: float) -> str:
    """Return the display name of a link.

    Args:
        bytes_per_s: its speed; 0: as fast as memory.
    """
    return f"{format_bytes(int(bytes_per_s))}/s" if bytes_per_s else "as memory"


def _slow_link(point: Point) -> float:
    """Return the bytes per second at which swapping all activations costs `SLOWDOWN`."""
    seconds = point.free.median_seconds
    assert seconds is not None
    activation_bytes = point.free.peak_bytes - point.free.state_bytes
    return activation_bytes / (_BUSY_SHARE * seconds)


def _run_point(options: DemoOptions, share: float, bytes_per_s: float, progress: Progress) -> Point:
    where = f"at {share:.0%}, link {link_name(bytes_per_s)}"
    with enter_runs(options, bytes_per_s=bytes_per_s) as enter:
        entrants = {name: enter(f"{name} {where}", kind, policy) for name, kind, policy in _runs()}
        free = entrants[NO_LIMIT]
        measure(free, progress)
        assert free.latest is not None
        state_bytes = free.latest.state_bytes
        activation_bytes = free.latest.allocated_peak_bytes - state_bytes
        budget_bytes = int(state_bytes + share * activation_bytes)
        build(entrants[FULL_RECOMPUTE], None, progress)
        for policy in POLICIES:
            build(entrants[policy], budget_bytes, progress)
            settle(entrants[policy], progress)
        runs = tuple(entrants.values())
        catch_up(runs, progress)
        take_turns(runs, options.sweep_steps, progress)
        conclude(runs, progress)
        for run in runs:
            run.child.end()
        results = {name: entrant.result() for name, entrant in entrants.items()}
    return Point(share=share, bytes_per_s=bytes_per_s, results=results)


def _runs() -> Iterator[tuple[str, RunKind, str]]:
    yield NO_LIMIT, RunKind.PLAIN, ""
    yield FULL_RECOMPUTE, RunKind.RECOMPUTE, ""
    for policy in POLICIES:
        yield policy, RunKind.SWAPKIT, policy
