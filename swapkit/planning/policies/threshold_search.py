"""The search for the memory threshold of adaptive recompute: bisection by trial steps.

A step is run with the policy of a threshold. If tensors had to be swapped because memory ran out, a
smaller threshold is tried next, else a larger one, until the two meet. Nothing is measured
twice: policies that are known to run out, or not to, cost no step.

Source:
    MindSpeed, adaptive selective recompute: the search of its figure 1, step by step. It never ends
    there if not even full recompute fits; here that is what is found then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

STEP_BYTES = 1 << 20
WATCHED_STEPS = 10  # after a threshold was found: running out of memory in one begins anew


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step showed about memory."""

    swapped_bytes: int = 0  # because memory ran out
    retries: int = 0  # allocations that only worked when cached memory was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The memory to plan for in the next step."""

    nbytes: int
    is_found: bool  # the search is over, for as long as memory does not run out


class ThresholdSearch:
    """Bisects the threshold; thread-unsafe."""

    def __init__(
        self,
        most_bytes: int,
        solve: Callable[[int], Hashable],
        *,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """Begin with the most.

        Args:
            most_bytes: the first threshold; what the device has, or what the user gave.
            solve: returns the policy for a threshold in bytes; equal ones do the same.
            step_bytes: how exactly the threshold is found.

        Raises:
            InvalidArgument: a size is not positive.
        """
        if most_bytes < step_bytes or step_bytes < 1:
            raise InvalidArgument(f"most_bytes={most_bytes}: expected at least {step_bytes}")
        self._most = most_bytes // step_bytes
        self._step_bytes = step_bytes
        self._solve = solve
        # In steps of step_bytes: between what is known to run and what is known not to.
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
            outcome: of the step that ran with the threshold returned before; None: of none yet.
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
        """Go on to a threshold whose policy is not known."""
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
            self._is_found = now == 0  # even the least runs out: nothing smaller is left
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
        """Return whether memory ran out; one retry alone is looked at twice."""
        if outcome.swapped_bytes > 0:
            return True
        if outcome.retries > 1 or (outcome.retries == 1 and self._is_recheck):
            return True
        self._retried += outcome.retries
        return self._retried > 1

    def _answer(self) -> Threshold:
        assert self._now is not None
        return Threshold(nbytes=self._now * self._step_bytes, is_found=self._is_found)
