"""Problems, machines and actions at random, for tests of bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from swapkit.planning.bounds.bound import Program
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK
from tests.support.problems import machine_for, random_problem

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.simulation.problems import Problem


def draw_case(seed: int, most_items: int) -> tuple[Problem, Machine, np.random.Generator]:
    """Return a problem, and a machine whose links, host and disk have limits now and then."""
    rng = np.random.default_rng(seed + 1_000_000)
    items = int(rng.integers(2, most_items + 1))
    problem = random_problem(seed, items=items, shuffle=int(rng.integers(0, 4)), weights=seed % 5)
    machine = machine_for(problem, rng.uniform(0.3, 1.02), 10 ** rng.uniform(8.7, 10.3))
    return problem, limit(machine, int(problem.item_bytes.sum()), rng), rng


def limit(machine: Machine, total: int, rng: np.random.Generator) -> Machine:
    if rng.random() < 0.4:
        machine = replace(machine, duplex=rng.uniform(1, 2))
    if rng.random() < 0.4:
        machine = replace(machine, interference=rng.uniform(0, 0.3))
    if rng.random() < 0.4:
        machine = replace(
            machine,
            out_latency_seconds=rng.uniform(0, 2e-3),
            in_latency_seconds=rng.uniform(0, 1e-3),
        )
    if rng.random() < 0.4:
        speed = machine.in_bytes_per_second * rng.uniform(0.3, 2)
        machine = replace(machine, in_bytes_per_second=speed)
    if rng.random() < 0.4:
        machine = replace(machine, host_bytes=int(total * rng.uniform(0, 0.6)))
    if rng.random() < 0.3:
        machine = replace(
            machine,
            disk_bytes=int(total * rng.uniform(0.1, 1)),
            disk_write_bytes_per_second=10 ** rng.uniform(8, 10),
            disk_read_bytes_per_second=10 ** rng.uniform(8, 10),
        )
    return machine


def draw_actions(
    problem: Problem, machine: Machine, rng: np.random.Generator, count: int
) -> list[np.ndarray]:
    """Return actions: some of any kind, some near what the linear program wants."""
    relaxation = Program(problem, machine).solve()
    nitems = len(problem.item_bytes)
    drawn = []
    for turn in range(count):
        actions = rng.choice(4, nitems, p=rng.dirichlet([1, 1, 1, 1]))
        if turn % 2 and relaxation is not None:
            dice = rng.random(nitems)
            swapped = dice < relaxation.swapped
            recomputed = ~swapped & (dice < relaxation.swapped + relaxation.recomputed)
            wanted = np.where(swapped, SWAP, np.where(recomputed, RECOMPUTE, KEEP))
            actions = np.where(rng.random(nitems) < 0.1, actions, wanted)
        actions = np.where((actions == RECOMPUTE) & ~problem.can_recompute, KEEP, actions)
        has_no_disk = problem.is_weight | (machine.disk_bytes == 0)
        actions = np.where((actions == SWAP_TO_DISK) & has_no_disk, SWAP, actions)
        drawn.append(actions.astype(np.int8))
    return drawn
