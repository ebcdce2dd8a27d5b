"""Small random steps and machines, to compare plans with the exact optimum."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from swapkit.ir.machines import Machine
from swapkit.ir.traces import Operator, Phase, Storage, Trace

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Node:
    """A forward operator: the results that it reads, and those that its backward reads."""

    layer: int
    seconds: float
    nbytes: int  # size of its result
    reads: tuple[int, ...]
    saves: tuple[int, ...]
    is_repeatable: bool


def make_random_step(seed: int, most_items: int) -> tuple[Trace, Machine]:
    """Return a step of 8 to `most_items` operators in layers, and a machine with too little memory.

    The number of operators is log-uniform. Results have 1 to 64 MiB; the link moves all of them
    within 0.3 to 3 times half the step.
    """
    draw = random.Random(seed)
    least = min(8, most_items)
    nodes = _draw_nodes(draw, round(least * (most_items / least) ** draw.random()))
    trace = _to_trace(nodes, draw)
    fewest, most = _activation_bytes(trace)
    speed = sum(node.nbytes for node in nodes) / (trace.seconds / 2) / draw.uniform(0.3, 3)
    machine = Machine(
        budget_bytes=int(fewest + draw.uniform(0.05, 0.8) * (most - fewest)),
        out_bytes_per_second=speed,
        in_bytes_per_second=speed * draw.uniform(0.8, 1.2),
        duplex=draw.choice((2.0, 2.0, 1.6)),
    )
    return trace, machine


def _draw_nodes(draw: random.Random, count: int) -> list[_Node]:
    nodes: list[_Node] = []
    layer, left = 0, draw.randint(3, 9)
    for number in range(count):
        if not left:
            layer, left = layer + 1, draw.randint(3, 9)
        left -= 1
        before = number - 1
        reads = {before} if before >= 0 else set()
        if before > 0 and nodes[before].layer == layer and draw.random() < 0.3:
            reads.add(before - 1)
        saves = {each for each in reads if draw.random() < 0.8} | {number}
        if draw.random() < 0.5:
            saves.discard(number)
        nodes.append(
            _Node(
                layer=layer,
                seconds=10 ** draw.uniform(-4, -2),
                nbytes=int(2 ** draw.uniform(0, 6)) * MIB,
                reads=tuple(sorted(reads)),
                saves=tuple(sorted(saves)),
                is_repeatable=draw.random() < 0.9,
            )
        )
    return nodes


def _to_trace(nodes: list[_Node], draw: random.Random) -> Trace:
    """Return forward and backward; a gradient lives from one backward operator to the next."""
    count = len(nodes)
    operators = [
        Operator(
            name="forward",
            seconds=node.seconds,
            phase=Phase.FORWARD,
            module=f"layers.{node.layer}.part{number}",
            reads=node.reads,
            writes=(number,),
            workspace_bytes=draw.randint(0, 4) * MIB,
            is_repeatable=node.is_repeatable,
        )
        for number, node in enumerate(nodes)
    ]
    last = list(range(count))  # the last operator that reads a result
    for number, node in enumerate(nodes):
        for each in node.reads:
            last[each] = max(last[each], number)
    saved: set[int] = set()
    for place, number in enumerate(reversed(range(count)), count):
        saved.update(nodes[number].saves)
        for each in nodes[number].saves:
            last[each] = max(last[each], place)
        gradient = () if place == count else (place - 1,)
        operators.append(
            Operator(
                name="backward",
                seconds=2 * nodes[number].seconds,
                phase=Phase.BACKWARD,
                module=f"layers.{nodes[number].layer}.part{number}",
                reads=(*nodes[number].saves, *gradient),
                writes=(place,),
            )
        )
    storages = [
        Storage(
            nbytes=node.nbytes,
            birth=number,
            death=last[number] + 1,
            is_saved=number in saved,
            module=f"layers.{node.layer}.part{number}",
        )
        for number, node in enumerate(nodes)
    ]
    storages += [
        Storage(nbytes=MIB, birth=place, death=min(place + 2, 2 * count))
        for place in range(count, 2 * count)
    ]
    return Trace(operators=tuple(operators), storages=tuple(storages), signature="random")


def _activation_bytes(trace: Trace) -> tuple[int, int]:
    """Return roughly the minimum memory of a step, and its peak without a plan."""
    changes = [0] * (len(trace.operators) + 1)
    for storage in trace.storages:
        changes[storage.birth] += storage.nbytes
        changes[storage.death] -= storage.nbytes
    needs = [
        operator.workspace_bytes
        + sum(trace.storages[each].nbytes for each in {*operator.reads, *operator.writes})
        for operator in trace.operators
    ]
    return max(needs), max(accumulate(changes))
