"""The stack of a thread's running modules, and of kernels that run as if they were modules.

Threads: each uses its own stack; no lock is needed.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class Sites(Protocol):
    """Finds the save sites inside a call that bypasses the hooks (see `hook_bypass.py`)."""

    needs_modules: bool  # set if a user on the thread needs all modules after all

    def find_site(self) -> tuple[int, int] | None:
        """Return the site of the current save; None: unknown."""

    def set_blind(self, *, is_blind: bool) -> None:
        """Set whether `find_site` gives the sites of this thread's saves."""


class _BypassedCall:
    """Replaces the module calls inside a bypassing call, which are not tracked."""

    __slots__ = ("depth", "saves", "sites")

    def __init__(self, depth: int, sites: Sites) -> None:
        self.depth = depth  # of the stack of tracked modules
        self.sites = sites
        self.saves: Counter[int] = Counter()  # so far, by module


class RunningOperator:
    """A kernel among the running modules of its thread. Made by `ModuleTracker.enter_operator`."""

    __slots__ = ("position", "tag")

    def __init__(self, tag: int, position: int) -> None:
        """Create it with its tag and its index in the thread's stack."""
        self.tag = tag
        self.position = position


class ModuleStack:
    """Tags of the modules whose forward is running on a thread, outermost first."""

    __slots__ = ("bypass", "operators", "period", "saves", "step", "tags")

    def __init__(self) -> None:
        """Create an empty stack."""
        self.tags: list[int] = []
        self.operators: list[RunningOperator] = []  # those of `tags` that are no modules
        self.saves: list[int] = [0]  # so far, in each of them; outside modules first
        self.bypass: _BypassedCall | None = None
        self.period = 0
        self.step = 0

    @property
    def is_blind(self) -> bool:
        """Whether the innermost module may be an untracked one."""
        return self.bypass is not None and self.bypass.depth == len(self.tags)

    def begin_bypass(self, sites: Sites) -> None:
        """Stop tracking modules until the innermost one ends."""
        self.bypass = _BypassedCall(len(self.tags), sites)
        sites.set_blind(is_blind=True)

    def end_bypass(self) -> None:
        """Track modules again."""
        if self.bypass is not None:
            self.bypass.sites.set_blind(is_blind=False)
            self.bypass = None

    def enter(self, tag: int) -> None:
        """Push a module that begins."""
        if self.is_blind and self.bypass is not None:
            self.bypass.sites.set_blind(is_blind=False)
        self.tags.append(tag)
        self.saves.append(0)

    def leave(self) -> None:
        """Pop the innermost module, unless tracking began inside it, and operators left inside."""
        depth = len(self.tags) - 1
        while self.operators and self.operators[-1].position == depth:
            self.operators.pop()
            depth -= 1
        depth = max(0, depth)
        del self.tags[depth:], self.saves[depth + 1 :]
        self._note_end()

    def enter_operator(self, tag: int) -> RunningOperator:
        """Push an operator that begins."""
        operator = RunningOperator(tag, len(self.tags))
        self.enter(tag)
        self.operators.append(operator)
        return operator

    def leave_operator(self, operator: RunningOperator) -> bool:
        """Remove an operator if it is there; return whether it was the innermost entry."""
        if operator not in self.operators:
            return False
        at = self.operators.index(operator)
        for inner in self.operators[at + 1 :]:
            inner.position -= 1
        position = operator.position
        del self.operators[at], self.tags[position], self.saves[position + 1]
        if self.bypass is not None and position + 1 == self.bypass.depth:
            self.end_bypass()
        elif self.bypass is not None and position < self.bypass.depth:
            self.bypass.depth -= 1
        self._note_end()
        return position == len(self.tags)

    def _note_end(self) -> None:
        """Adapt the bypass after an entry was removed."""
        if self.bypass is not None and len(self.tags) < self.bypass.depth:
            self.end_bypass()
        elif self.is_blind and self.bypass is not None:
            self.bypass.sites.set_blind(is_blind=True)
