"""A step of varying lengths fragments: within a budget, only planned addresses serve it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from benchmarks.replay.allocations import Allocation, AllocationTrace
from benchmarks.replay.comparing import compare_allocators
from swapkit.ir.traces import Phase

GIB = 1 << 30
LAYERS, WIDTH, VOCABULARY, BATCH, IN_FLIGHT = 4, 1024, 32000, 4, 16
SHORT, LONG = 64, 4096  # tokens
HALF, FULL = 2, 4  # bytes of a number
BUDGET_BYTES = int(15.06 * GIB)  # 20 MiB above what is in use at once
# Sequences of 64 to 764 tokens, whose activations have 0.5 to 6 MiB, and two long ones.
LENGTHS = [LONG if number % 8 == 7 else SHORT + 229 * number % 701 for number in range(24)]


@dataclass
class Program:
    """Takes and gives, as a transformer's forward and backward passes make them."""

    blocks: list[Allocation] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    phase: Phase = Phase.FORWARD

    def take(self, numbers: int, nbytes: int, label: str) -> int:
        """Take a block for so many numbers of so many bytes."""
        block = len(self.blocks)
        self.blocks.append(Allocation(nbytes=numbers * nbytes, label=label, phase=self.phase))
        self.moves.append(block)
        return block

    def give(self, *blocks: int) -> None:
        self.moves += [~block for block in blocks]

    def forward(self, tokens: int) -> list[int]:
        """Return the blocks saved for backward, the latest last."""
        self.phase = Phase.FORWARD
        rows = BATCH * tokens
        saved = [self.take(rows * WIDTH, HALF, "input")]
        for _ in range(LAYERS):
            saved.append(self.take(3 * rows * WIDTH, HALF, "query, key, value"))
            projected = self.take(rows * WIDTH, HALF, "attention")
            saved.append(self.take(rows * WIDTH, HALF, "norm"))
            self.give(projected)
            hidden = self.take(4 * rows * WIDTH, HALF, "hidden")
            saved.append(self.take(4 * rows * WIDTH, HALF, "activated"))
            self.give(hidden)
            saved.append(self.take(rows * WIDTH, HALF, "output"))
        logits = self.take(rows * VOCABULARY, HALF, "logits")
        wide = self.take(rows * VOCABULARY, FULL, "logits")
        saved.append(self.take(rows * VOCABULARY, FULL, "log softmax"))
        self.give(logits, wide)
        return saved

    def backward(self, tokens: int, saved: list[int]) -> None:
        self.phase = Phase.BACKWARD
        rows = BATCH * tokens
        loss = self.take(rows * VOCABULARY, FULL, "loss")
        logits = self.take(rows * VOCABULARY, FULL, "log softmax")
        self.give(loss, saved.pop())
        narrow = self.take(rows * VOCABULARY, HALF, "logits")
        self.give(logits)
        gradient = self.take(rows * WIDTH, HALF, "output")
        self.give(narrow)
        for _ in range(LAYERS):
            wide = self.take(4 * rows * WIDTH, HALF, "hidden")
            self.give(saved.pop(), saved.pop())
            narrow = self.take(rows * WIDTH, HALF, "norm")
            self.give(wide, gradient, saved.pop())
            gradient = self.take(rows * WIDTH, HALF, "attention")
            self.give(narrow, saved.pop())
        self.give(gradient, saved.pop())
        assert not saved


def make_step() -> AllocationTrace:
    """Return a step with several microbatches in flight, as the first stage of a pipeline runs."""
    program = Program()
    weights = [program.take(WIDTH * WIDTH * 12, HALF, "weights") for _ in range(2 * LAYERS)]
    in_flight: deque[tuple[int, list[int]]] = deque()
    for tokens in LENGTHS:
        in_flight.append((tokens, program.forward(tokens)))
        if len(in_flight) == IN_FLIGHT:
            program.backward(*in_flight.popleft())
    while in_flight:
        program.backward(*in_flight.popleft())
    return AllocationTrace(
        blocks=tuple(program.blocks), moves=tuple(program.moves), present=len(weights)
    )


@pytest.mark.promise("E4")
def test_varying_lengths_when_within_a_budget_then_only_planned_addresses_serve_the_step() -> None:
    step = make_step()
    reports = {each.key: each for each in compare_allocators(step, budget_bytes=BUDGET_BYTES)}
    failures = {key: each.within.failure for key, each in reports.items() if each.within}
    assert [key for key, failure in failures.items() if failure is None] == ["planned"]
    native = failures["torch_native"]
    assert native is not None
    assert native.reserved_bytes - native.allocated_bytes > GIB
    assert native.allocated_bytes + native.asked_bytes < BUDGET_BYTES
    assert reports["torch_native"].free.stranded_bytes > GIB


@pytest.mark.promise("F21")
def test_varying_lengths_when_the_step_is_planned_then_no_cached_block_is_split_for_it() -> None:
    unplanned, planned = compare_allocators(make_step())[-2:]
    assert planned.layout is not None
    assert planned.layout.splits == 0
    assert planned.layout.former_splits > planned.layout.requests // 4
    assert planned.free.peak_reserved_bytes <= unplanned.free.peak_reserved_bytes


def test_varying_lengths_when_the_step_is_planned_then_reserved_is_what_is_in_use() -> None:
    planned = compare_allocators(make_step())[-1]
    assert planned.layout is not None
    assert planned.layout.hit_share == 1
    assert planned.layout.maps == 0
    assert planned.active_utilisation > 0.98
