"""The slots in which recomputing can take place, and the steps that several items share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swapkit.simulation.problems import Flags, Floats, Indexes, Problem


class SharedSteps(NamedTuple):
    """Steps that run once for several items that may be needed in the same slot."""

    seconds: float
    items: tuple[int, ...]
    first: int  # first and last slot in which they may run
    last: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """The cost and the place of recomputing: item j in a slot from `earliest[j]` to `uses[j]`."""

    earliest: Indexes  # N
    own_seconds: Floats  # N: steps that no other item can share
    shared: tuple[SharedSteps, ...]
    chains: Indexes  # items that, if recomputed, take their `chain_bytes` in the slot `uses`


def find_windows(problem: Problem, can_recompute: Flags) -> Windows:
    """Return the windows of the items that may be recomputed."""
    earliest = find_earliest_needs(problem, can_recompute)
    own_seconds, shared = _find_costs(problem, can_recompute, earliest)
    is_certain = can_recompute & (earliest == problem.uses) & (problem.chain_bytes > 0)
    siblings = np.bincount(problem.own_steps[can_recompute], minlength=1)
    is_certain[is_certain] = siblings[problem.own_steps[is_certain]] == 1
    return Windows(
        earliest=earliest,
        own_seconds=own_seconds,
        shared=shared,
        chains=np.flatnonzero(is_certain).astype(np.int32),
    )


def find_earliest_needs(problem: Problem, can_recompute: Flags) -> Indexes:
    """Return the first slot that can need each item: its use, or that of an item made from it."""
    earliest = problem.uses.copy()
    makers = np.repeat(np.arange(len(earliest)), np.diff(problem.input_starts))
    used = can_recompute[makers]
    makers, inputs = makers[used], problem.inputs[used]
    items = np.flatnonzero(can_recompute)
    steps = problem.own_steps[items]
    together = np.full(len(problem.step_seconds), len(problem.slot_seconds), dtype=np.int32)
    while True:
        before = earliest.copy()
        np.minimum.at(together, steps, earliest[items])
        earliest[items] = together[steps]  # the items of one operator are recomputed together
        np.minimum.at(earliest, inputs, earliest[makers])
        # An item is present anyway while forward needs it.
        earliest = np.maximum(earliest, problem.releases + 1)
        if np.array_equal(before, earliest):
            return earliest


def _find_costs(
    problem: Problem, can_recompute: Flags, earliest: Indexes
) -> tuple[Floats, tuple[SharedSteps, ...]]:
    """Charge each step to its only user, or once to each group of users with connected windows.

    Items of different groups never run a step in the same slot, so each group pays.
    """
    users = np.repeat(np.arange(len(earliest)), np.diff(problem.chain_starts))
    pairs = np.unique(np.stack([problem.chain_steps, users])[:, can_recompute[users]], axis=1)
    own = np.zeros(len(earliest))
    shared: dict[tuple[int, ...], list[float]] = {}
    for step, items in _group(pairs[0], pairs[1]):
        for together in _split(items, earliest, problem.uses):
            seconds = float(problem.step_seconds[step])
            if len(together) == 1:
                own[together[0]] += seconds
            else:
                shared.setdefault(together, []).append(seconds)
    return own, tuple(
        SharedSteps(
            sum(seconds),
            items,
            int(np.min(earliest[list(items)])),
            int(np.max(problem.uses[list(items)])),
        )
        for items, seconds in shared.items()
        if sum(seconds) > 0
    )


def _group(keys: Indexes, values: Indexes) -> list[tuple[int, list[int]]]:
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    parts = np.split(values, firsts[1:]) if len(firsts) else []
    return [(int(keys[i]), part.tolist()) for i, part in zip(firsts, parts, strict=True)]


def _split(items: list[int], earliest: Indexes, uses: Indexes) -> list[tuple[int, ...]]:
    """Split items into groups so that windows of different groups have no slot in common."""
    if len(items) == 1:
        return [tuple(items)]
    groups: list[list[int]] = []
    last = -1
    for item in sorted(items, key=lambda item: (earliest[item], item)):
        if not groups or earliest[item] > last:
            groups.append([])
        groups[-1].append(item)
        last = max(last, int(uses[item]))
    return [tuple(group) for group in groups]
