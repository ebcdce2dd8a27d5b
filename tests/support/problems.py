"""Steps made up for tests: problems at random, and traces like those of a model of layers.

problem = random_problem(seed, items=24)        actions = random_actions(problem, seed)
trace = layered_trace(layers=4, seed=3)         machine = machine_for(problem, share=0.5)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from swapkit.ir.machines import Machine
from swapkit.simulation.problems import Problem
from tests.support.layers import layered_trace

__all__ = [
    "copied_items",
    "kept_peak",
    "layered_trace",
    "machine_for",
    "random_actions",
    "random_problem",
]

MIB = 1 << 20


def random_problem(seed: int, items: int = 12, *, shuffle: int = 3, weights: int = 0) -> Problem:
    """Return a problem with one forward and one backward; items are used in about reverse order.

    Args:
        seed: of everything that is drawn.
        items: how many.
        shuffle: by how many slots uses are moved about, and forward uses delayed.
        weights: how many of them are idle parts of weights: frozen, or written in the step.
    """
    rng = np.random.default_rng(seed)
    nslots = 2 * items + 2
    births = np.arange(items, dtype=np.int32)
    readies = births + rng.integers(0, min(2, shuffle + 1), items, dtype=np.int32)
    releases = np.minimum(readies + rng.integers(0, shuffle + 1, items, dtype=np.int32), items)
    uses = np.clip(
        nslots - 1 - births - rng.integers(0, shuffle + 1, items), items + 1, nslots - 1
    ).astype(np.int32)
    deaths = np.minimum(uses + rng.integers(0, 2, items), nslots - 1).astype(np.int32)
    can_recompute = rng.random(items) < 0.7
    own_steps = np.where(can_recompute, births, -1).astype(np.int32)
    chains, inputs = [], []
    for item in range(items):
        may_be_made_from = item > 0 and deaths[item - 1] >= uses[item]
        chain, made_from = _random_chain(rng, item, may_be_made_from=bool(may_be_made_from))
        chains.append(chain if can_recompute[item] else [])
        inputs.append(made_from if can_recompute[item] else [])
    problem = Problem(
        slot_seconds=rng.uniform(0.5e-3, 2e-3, nslots),
        slot_bytes=rng.integers(2 * MIB, 6 * MIB, nslots),
        since=np.arange(nslots, dtype=np.int32),
        waits=np.empty(0, np.int32),
        slot_operators=np.arange(nslots + 1, dtype=np.int32),
        item_bytes=rng.integers(MIB, 8 * MIB, items),
        item_storages=np.arange(items, dtype=np.int32) + 3,
        births=births,
        readies=readies.astype(np.int32),
        releases=releases.astype(np.int32),
        uses=uses,
        deaths=deaths,
        tails=np.full(items, -1, np.int32),
        formers=np.full(items, -1, np.int32),
        is_weight=np.zeros(items, np.bool_),
        can_swap=np.ones(items, np.bool_),
        can_recompute=can_recompute,
        chain_bytes=np.where([len(chain) > 1 for chain in chains], MIB, 0).astype(np.int64),
        classes=(births % 4).astype(np.int32),
        own_steps=own_steps,
        step_seconds=rng.uniform(0.2e-3, 2e-3, items),
        chain_starts=_starts(chains),
        chain_steps=np.array([step for chain in chains for step in chain], np.int32),
        input_starts=_starts(inputs),
        inputs=np.array([other for made_from in inputs for other in made_from], np.int32),
    )
    return _with_weights(problem, np.random.default_rng(seed), min(weights, items))


def _with_weights(problem: Problem, rng: np.random.Generator, weights: int) -> Problem:
    """Turn some items into idle parts of weights: every other one goes on in the next step."""
    nslots = len(problem.slot_bytes)
    chosen = rng.choice(len(problem.item_bytes), weights, replace=False)
    parts, rounds = chosen[::2], chosen[1::2]
    problem.is_weight[chosen] = True
    problem.formers[chosen] = np.where(rng.random(weights) < 0.5, chosen, -1)
    problem.can_recompute[chosen] = False
    problem.own_steps[chosen] = -1
    problem.readies[parts] = problem.releases[parts] = problem.births[parts]
    for item in rounds:
        problem.births[item] = 0
        problem.readies[item] = problem.releases[item] = -1
        problem.uses[item] = rng.integers(0, nslots - 1)
        problem.deaths[item] = rng.integers(problem.uses[item], nslots - 1)
        problem.tails[item] = rng.integers(problem.deaths[item] + 1, nslots + 1)
        # The use before the tail is one of the same weight.
        problem.slot_bytes[problem.tails[item] - 1] += problem.item_bytes[item]
    _link_parts(problem, parts, rounds)
    inputs = np.split(problem.inputs, problem.input_starts[1:-1])
    chains, froms = [], []
    for item, made_from in enumerate(inputs):
        is_weight = item in chosen
        chains.append([] if is_weight else problem.steps_of(item))
        froms.append([other for other in made_from if not is_weight and other not in rounds])
    return replace(
        problem,
        chain_starts=_starts(chains),
        chain_steps=np.array([step for chain in chains for step in chain], np.int32),
        input_starts=_starts(froms),
        inputs=np.array([other for row in froms for other in row], np.int32),
    )


def _link_parts(problem: Problem, parts: np.ndarray, rounds: np.ndarray) -> None:
    for part, former in zip(parts, rounds, strict=False):
        is_written = problem.formers[former] < 0 and problem.tails[former] > problem.deaths[part]
        if is_written and problem.births[part] >= problem.deaths[former]:
            problem.formers[part] = former


def has_copy(problem: Problem, actions: np.ndarray, item: int) -> bool:
    """Return whether an item has a copy when it becomes idle."""
    former = int(problem.formers[item])
    if former in {-1, item}:
        return former == item
    return bool(actions[former] % 2 == 1) or has_copy(problem, actions, former)


def copied_items(problem: Problem, actions: np.ndarray) -> np.ndarray:
    """Return the items that are copied out."""
    swapped = np.flatnonzero(actions % 2 == 1).tolist()
    return np.array([each for each in swapped if not has_copy(problem, actions, each)], np.int64)


def _random_chain(
    rng: np.random.Generator, item: int, *, may_be_made_from: bool
) -> tuple[list[int], list[int]]:
    """Return steps and inputs: made from the item before, through its operator, or neither."""
    drawn = rng.random()
    if may_be_made_from and drawn < 0.6:
        return [item], [item - 1]
    return ([item - 1, item], []) if item > 0 and drawn < 0.8 else ([item], [])


def kept_peak(problem: Problem) -> int:
    """Return the most bytes in use when everything is kept."""
    level = np.array(problem.slot_bytes)
    for birth, death, nbytes in zip(
        problem.births, problem.deaths, problem.item_bytes, strict=True
    ):
        level[birth : death + 1] += nbytes
    for tail, nbytes in zip(problem.tails, problem.item_bytes, strict=True):
        level[tail if tail >= 0 else len(level) :] += nbytes
    return int(level.max())


def machine_for(problem: Problem, share: float, bytes_per_second: float = 4e9) -> Machine:
    """Return a machine with a share of what keeping everything takes."""
    return Machine(
        budget_bytes=int(kept_peak(problem) * share),
        out_bytes_per_second=bytes_per_second,
        in_bytes_per_second=bytes_per_second,
    )


def _starts(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def random_actions(problem: Problem, seed: int, *, disk: bool = False) -> np.ndarray:
    """Return an action for each item that it can have."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, 4 if disk else 3, len(problem.item_bytes)).astype(np.int8)
    actions[(actions == 2) & ~problem.can_recompute] = 1
    actions[(actions == 3) & problem.is_weight] = 1
    return actions
