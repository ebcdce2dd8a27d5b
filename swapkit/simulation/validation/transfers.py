"""Checks that copies are in order and no faster than the links."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swapkit.ir.machines import Machine
from swapkit.ir.plans import Decision, Schedule, Tier, Transfer
from swapkit.ir.traces import BEFORE, Trace
from swapkit.simulation.validation.computing import Demand, Span, overlap
from swapkit.simulation.validation.gaps import Gap, Touch, find_tails, is_clean


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedStorage:
    """A swapped storage: its transfer, its decision, and the operator that needs it back.

    `gone_at` is the end of the last operator that runs while the storage exists.
    """

    transfer: Transfer
    decision: Decision
    nbytes: int
    gap: Gap
    need: int
    gone_at: float
    is_clean: bool  # it is not copied out
    tail: int  # the last operator that touches a weight that goes on in the next step; BEFORE: none

    @property
    def free_at(self) -> float:
        """Return when its memory is free before it is back."""
        return self.transfer.released if self.tail == BEFORE else 0.0


def pair_transfers(
    trace: Trace,
    schedule: Schedule,
    swaps: Mapping[int, Decision],
    demand: Demand,
    touches: Sequence[Sequence[Touch]],
) -> tuple[list[SwappedStorage], list[str]]:
    """Return the transfers with their decisions, and a violation for each without a partner."""
    moves, violations = [], []
    missing = dict(swaps)
    tails = find_tails(trace, swaps)
    for transfer in schedule.transfers:
        decision = missing.pop(transfer.storage, None)
        if decision is None:
            violations.append(
                f"storage {transfer.storage}: is copied without a swap decision, or twice"
            )
            continue
        moves.append(
            SwappedStorage(
                transfer=transfer,
                decision=decision,
                nbytes=trace.storages[transfer.storage].nbytes,
                gap=demand.gaps[transfer.storage],
                need=demand.needs[transfer.storage],
                gone_at=schedule.ends[trace.storages[transfer.storage].death - 1],
                is_clean=is_clean(trace, touches, transfer.storage, swaps),
                tail=_find_tail(trace, transfer.storage, tails),
            )
        )
    violations += [f"storage {storage}: is swapped, but has no transfer" for storage in missing]
    return moves, violations


def _find_tail(trace: Trace, storage: int, tails: Mapping[int, int]) -> int:
    about = trace.storages[storage]
    return BEFORE if about.continues is None or about.birth != BEFORE else tails[about.continues]


def check_moves(
    moves: Sequence[SwappedStorage], schedule: Schedule, machine: Machine, tolerance: float
) -> Iterator[str]:
    """Yield violations of the order and the speed of copies."""
    for move in moves:
        yield from _check_order(move, schedule, tolerance)
    ways = {
        "out": [
            (each.transfer.out_start, each.transfer.out_end, each)
            for each in moves
            if not each.is_clean
        ],
        "back": [(each.transfer.in_start, each.transfer.in_end, each) for each in moves],
    }
    for way, other in (("out", "back"), ("back", "out")):
        copies = sorted(ways[way], key=lambda copy: copy[:2])
        for (_, end, before), (start, _, after) in itertools.pairwise(copies):
            if start < end - tolerance:
                yield (
                    f"storages {before.transfer.storage} and {after.transfer.storage}: are copied "
                    f"{way} at the same time, the second from {start:g}, the first until {end:g}"
                )
        against = sorted((start, end) for start, end, _ in ways[other])
        for start, end, move in copies:
            yield from _check_speed(way, (start, end), move, machine, against, tolerance)


def _check_order(move: SwappedStorage, schedule: Schedule, tolerance: float) -> Iterator[str]:
    """Yield violations of the order of a storage's copies and the operators around them."""
    copy, gap, decision = move.transfer, move.gap, move.decision
    ends, starts = (0.0, *schedule.ends), schedule.starts  # ends[k + 1] belongs to operator k
    goes_on = move.tail != BEFORE and not move.is_clean
    final, last = (move.tail, move.tail) if goes_on else (gap.final, gap.last)
    orders = [
        (ends[final + 1], copy.out_start, "its bytes are final", "its copy out starts"),
        (copy.out_start, copy.out_end, "its copy out starts", "it ends"),
        (copy.out_end, copy.released, "its copy out ends", "its memory is free"),
        (ends[last + 1], copy.released, "its last use in forward", "its memory is free"),
        (move.free_at, copy.in_start, "its memory is free", "its copy back starts"),
        (copy.in_start, copy.in_end, "its copy back starts", "it ends"),
        (copy.in_end, starts[move.need], "its copy back ends", f"operator {move.need} needs it"),
    ]
    if decision.release is not None:
        what = f"operator {decision.release}, its release, starts"
        orders.append((copy.released, starts[decision.release], "its memory is free", what))
    if decision.prefetch is not None:
        what = f"operator {decision.prefetch}, its prefetch, is next"
        orders.append((ends[decision.prefetch], copy.in_start, what, "its copy back starts"))
    for first, then, what, next_ in orders:
        if then < first - tolerance:
            yield f"storage {copy.storage}: {what} at {first:g}, but {next_} at {then:g} already"


def _check_speed(
    way: str,
    span: Span,
    move: SwappedStorage,
    machine: Machine,
    against: Sequence[Span],
    tolerance: float,
) -> Iterator[str]:
    """Yield a copy that is faster than the links allow, given the copies the other way."""
    speeds = {
        "out": (machine.out_bytes_per_second, machine.out_latency_seconds),
        "back": (machine.in_bytes_per_second, machine.in_latency_seconds),
    }
    speed, latency = speeds[way]
    other_latency = speeds["back" if way == "out" else "out"][1]
    if move.decision.tier is Tier.DISK:
        speed = min(
            speed,
            machine.disk_write_bytes_per_second
            if way == "out"
            else machine.disk_read_bytes_per_second,
        )
    least = latency + (move.nbytes / speed if speed else float("inf"))
    start, end = span
    lost = 1 - machine.duplex / 2
    shared, count = overlap(start, end, against)
    # Latencies may pass undisturbed, so that much of the overlap may cost nothing.
    undisturbed = latency + count * other_latency
    took = end - start - lost * max(0.0, shared - undisturbed)
    if took < least - tolerance:
        yield (
            f"storage {move.transfer.storage}: its copy {way} lasts {took:g} s, but {move.nbytes} "
            f"bytes take {least:g}"
        )
