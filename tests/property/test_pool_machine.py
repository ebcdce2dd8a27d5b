"""The pool against a model: whatever is done in whatever order, its promises hold.

Live blocks never overlap and keep their bytes, reserved bytes never pass the budget, the statistics
are those of the model, every structure is sound after every step, and a request is refused only if
it could not have been served.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from swapkit._native.backend import Backend, CopyKind, Stream
from swapkit._native.pool import BlockState, Pool
from swapkit.errors import OverBudget

KIB = 1 << 10
MIB = 1 << 20
ROUNDING = 512
GRANULE = 64 * KIB
SHARED = 2 * GRANULE
"""Most bytes that a block keeps from others besides its own: parts of two granules."""
START_BUDGET = 8 * MIB
CAPACITY = 256 * MIB
NSTREAMS = 3
COPIED = 4 * KIB
EDGE = 4 * KIB

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.builds(
        lambda base, offset: base + offset,
        st.sampled_from([ROUNDING, GRANULE, 3 * GRANULE, MIB, 2 * MIB]),
        st.integers(-1, 1),
    ),
    st.integers(1, 512 * KIB),
    st.integers(MIB, 6 * MIB),
)
STREAMS = st.integers(0, NSTREAMS)


@dataclass(eq=False, kw_only=True)
class Block:
    """What the model knows of a block in use."""

    address: int
    nbytes: int
    fill: int
    stream: int

    @property
    def rounded(self) -> int:
        return -(-self.nbytes // ROUNDING) * ROUNDING

    def write(self) -> None:
        ctypes.memset(self.address, self.fill, self.nbytes)

    def assert_intact(self) -> None:
        edge = min(self.nbytes, EDGE)
        expected = bytes([self.fill]) * edge
        assert ctypes.string_at(self.address, edge) == expected
        assert ctypes.string_at(self.address + self.nbytes - edge, edge) == expected


class PoolMachine(RuleBasedStateMachine):
    """Random takes, gives, copies, trims, budgets and rescues on one pool."""

    whole_segments = False
    blocks: Bundle[Block] = Bundle("blocks")

    @initialize()
    def open(self) -> None:
        self.budget = START_BUDGET
        self.live: dict[int, Block] = {}
        self.parked: list[Block] = []
        self.fills = 0
        self.rescues = 0
        self.backend = Backend.cpu(capacity_bytes=CAPACITY, copy_latency_ns=20_000)
        self.streams: list[Stream | None] = [
            None,
            *(self.backend.stream() for _ in range(NSTREAMS)),
        ]
        self.pool = Pool(self.backend, budget_bytes=self.budget, whole_segments=self.whole_segments)
        self.pool.set_rescue(self.rescue)
        self.host = ctypes.create_string_buffer(COPIED)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for block in list(self.live.values()):
            block.assert_intact()
            self.pool.give(block.address)
        self.pool.set_rescue(None)
        self.pool.trim()
        self.pool.check()
        assert self.pool.stats()["reserved_bytes.all.current"] == 0
        self.pool.close()
        info = self.backend.memory_info()
        assert info.free_bytes == info.total_bytes
        self.backend.close()

    def rescue(self, needed_bytes: int) -> int:
        """Give the block that was parked last, as a session would evict one."""
        assert needed_bytes > 0
        if not self.parked:
            return 0
        block = self.parked.pop()
        block.assert_intact()
        del self.live[block.address]
        self.pool.give(block.address)
        self.rescues += 1
        return block.nbytes

    def must_fit(self, nbytes: int) -> bool:
        """Whether refusing `nbytes` would be wrong, wherever the blocks in use lie."""
        kept = sum(block.rounded + SHARED for block in self.live.values())
        return not self.whole_segments and kept + nbytes + SHARED <= self.budget

    @rule(target=blocks, nbytes=SIZES, stream=STREAMS)
    def take(self, nbytes: int, stream: int) -> Block:
        try:
            address = self.pool.take(nbytes, self.streams[stream])
        except OverBudget:
            assert not self.must_fit(nbytes)
            # The rescue was asked for all there was, unless it could never have been enough.
            assert not self.parked or nbytes > self.budget
            return multiple()  # type: ignore[return-value]
        self.fills = self.fills % 255 + 1
        block = Block(address=address, nbytes=nbytes, fill=self.fills, stream=stream)
        self.assert_apart(block)
        target = self.streams[stream]
        if target is not None:
            target.synchronize()  # what the stream still did there is over
        block.write()
        self.live[address] = block
        return block

    def assert_apart(self, new: Block) -> None:
        assert new.address % ROUNDING == 0
        for block in self.live.values():
            assert new.address + new.nbytes <= block.address or (
                block.address + block.nbytes <= new.address
            )

    @rule(block=consumes(blocks))
    def give(self, block: Block) -> None:
        if block.address not in self.live or self.live[block.address] is not block:
            return  # the rescue was faster
        block.assert_intact()
        if block in self.parked:
            self.parked.remove(block)
        del self.live[block.address]
        self.pool.give(block.address)

    @rule(block=blocks)
    def park(self, block: Block) -> None:
        if self.live.get(block.address) is block and block not in self.parked:
            self.parked.append(block)

    @rule(block=blocks, stream=STREAMS)
    def copy_on(self, block: Block, stream: int) -> None:
        if self.live.get(block.address) is not block:
            return
        target = self.streams[stream]
        self.pool.use(block.address, target)
        self.backend.copy(
            to=ctypes.addressof(self.host),
            source=block.address,
            nbytes=min(block.nbytes, COPIED),
            kind=CopyKind.DEVICE_TO_HOST,
            stream=target,
        )

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        if not self.live:
            assert self.pool.stats()["reserved_bytes.all.current"] == 0

    @rule(budget=st.integers(1, 12).map(lambda count: count * MIB))
    def set_budget(self, budget: int) -> None:
        try:
            self.pool.set_budget(budget)
        except OverBudget:
            kept = sum(block.rounded + SHARED for block in self.live.values())
            assert self.whole_segments or kept > budget
        else:
            self.budget = budget

    @rule()
    def synchronize(self) -> None:
        for stream in self.streams:
            if stream is not None:
                stream.synchronize()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        stats = self.pool.stats()
        assert stats["reserved_bytes.all.current"] <= self.budget
        assert stats["budget_bytes"] == self.budget
        assert self.pool.peak_take() <= max(self.budget, START_BUDGET * 2)
        assert stats["num_rescues"] == self.rescues
        assert stats["allocation.all.current"] == len(self.live)
        requested = sum(block.nbytes for block in self.live.values())
        assert stats["requested_bytes.all.current"] == requested
        info = self.backend.memory_info()
        held = info.total_bytes - info.free_bytes
        assert held == stats["reserved_bytes.all.current"]
        allocated = stats["allocated_bytes.all.current"]
        in_use = [each for each in self.pool.blocks() if each.state is BlockState.IN_USE]
        assert {each.address for each in in_use} == set(self.live)
        assert sum(each.nbytes for each in in_use) == allocated
        if not self.whole_segments:
            assert allocated == sum(block.rounded for block in self.live.values())


class WholeSegmentsMachine(PoolMachine):
    """The same on a backend without virtual memory."""

    whole_segments = True


@pytest.mark.parametrize("machine", [PoolMachine, WholeSegmentsMachine])
def test_pool_when_used_at_random_then_model_and_invariants_hold(
    machine: type[PoolMachine],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
