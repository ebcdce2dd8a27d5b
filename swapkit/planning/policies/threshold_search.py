"""The search for the memory threshold of adaptive recompute: bisection by trial steps.

Each trial step runs with the policy of a threshold. If memory runs out, so that tensors must be
swapped, the next threshold is smaller, otherwise larger, until the two meet. No policy is measured
twice: a policy with a known result costs no step.

Source:
    MindSpeed, adaptive selective recompute: the search of its figure 1, step by step. That search
    never ends if full recompute does not fit; this one ends with full recompute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

STEP_BYTES = 1 << 20
WATCHED_STEPS = 10  # after a threshold was found: an out-of-memory in one restarts the search


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The memory events of a step."""

    swapped_bytes: int = 0  # because memory ran out
    retries: int = 0  # allocations that succeeded only after the cache was freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The memory to plan for in the next step."""

    nbytes: int
    is_found: bool  # the search is over, as long as memory does not run out


class ThresholdSearch:
    """A bisection for the threshold. Not thread-safe."""

    def __init__(
        self,
        most_bytes: int,
        solve: Callable[[int], Hashable],
        *,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """Start with the largest threshold.

        Args:
            most_bytes: the first threshold: the device's memory, or the user's limit.
            solve: returns the policy for a threshold in bytes; equal policies do the same.
            step_bytes: resolution of the threshold.

        Raises:
            InvalidArgument: a size is not positive.
        """
        if most_bytes < step_bytes or step_bytes < 1:
            raise InvalidArgument(f"most_bytes={most_bytes}: expected at least {step_bytes}")
        self._most = most_bytes // step_bytes
        self._step_bytes = step_bytes
        self._solve = solve
        # In units of step_bytes: the largest known to run, the smallest known not to run.
        self._low = self._high = self._first_good = 0
        self._now: int | None = None
        self._is_found = False
        self._watched = 0
        self._retried = 0
        self._is_recheck = False
        self._policy: Hashable = None
        self._good: set[Hashable] = set()
        self._bad: set[Hashable] = set()

    def next(self, outcome: StepOutcome | None = None) -> Threshold:
        """Return the threshold of the next step.

        Args:
            outcome: of the step with the previous threshold; None: no step ran yet.
        """
        if self._now is None or outcome is None:
            self._now = self._most
            self._policy = self._solve(self._most * self._step_bytes)
            return self._answer()
        ran_out = self._judge(outcome)
        if self._is_found:
            self._watched += 1
            if not ran_out or self._watched > WATCHED_STEPS:
                return self._answer()
        if ran_out:
            self._bad.add(self._policy)
            self._good.discard(self._policy)
        elif self._retried == 0 and self._policy not in self._bad:
            self._good.add(self._policy)
        self._advance(ran_out=ran_out)
        return self._answer()

    def _advance(self, *, ran_out: bool) -> None:
        """Advance to a threshold whose policy has no known result."""
        while True:
            self._now = self._choose(ran_out=ran_out)
            if self._is_recheck:
                return
            self._policy = self._solve(self._now * self._step_bytes)
            if self._is_found:
                self._watched = 0
                return
            if self._policy in self._bad:
                ran_out = True
            elif self._policy in self._good:
                ran_out = False
            else:
                return

    def _choose(self, *, ran_out: bool) -> int:
        assert self._now is not None
        now = self._now
        if self._is_found:
            self._low, self._high, self._is_found = self._first_good, now, False
        if ran_out:
            self._is_recheck, self._retried = False, 0
            self._high = now
            if self._first_good >= now:
                self._first_good = 0
            if self._high <= self._low:
                self._low = 0
            self._is_found = now == 0  # even the smallest threshold runs out of memory
            return (self._low + self._high) // 2
        if self._retried and not self._is_recheck:
            self._is_recheck, self._retried = True, 0
            return now
        self._is_recheck, self._retried = False, 0
        self._low = now
        self._first_good = self._first_good or now
        self._is_found = self._high - self._low <= 1
        return self._low if self._is_found else (self._low + self._high) // 2

    def _judge(self, outcome: StepOutcome) -> bool:
        """Return whether memory ran out; a single retry needs a second step to decide."""
        if outcome.swapped_bytes > 0:
            return True
        if outcome.retries > 1 or (outcome.retries == 1 and self._is_recheck):
            return True
        self._retried += outcome.retries
        return self._retried > 1

    def _answer(self) -> Threshold:
        assert self._now is not None
        return Threshold(nbytes=self._now * self._step_bytes, is_found=self._is_found)
