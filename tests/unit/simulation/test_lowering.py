"""From traces to problems: items, slots, chains, classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swapkit.errors import InvalidArgument
from swapkit.ir.passes import SHORTEST_WITHIN, divide_weights
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Operator, Phase, Storage, Trace
from swapkit.simulation.items import block_of
from swapkit.simulation.lowering import lower
from tests.support.layers import UNIT, layered_trace

PHASES = {"f": Phase.FORWARD, "b": Phase.BACKWARD, "o": Phase.OPTIMIZER, "i": Phase.IDLE}


def operator(
    phase: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), **more: Any
) -> Operator:
    """Return an operator of a second; those of forward can be repeated."""
    values = {"name": "op", "seconds": 1.0, "is_repeatable": phase == "f", **more}
    return Operator(phase=PHASES[phase], reads=reads, writes=writes, **values)


def saved(birth: int, death: int, nbytes: int = 10, **more: Any) -> Storage:
    return Storage(birth=birth, death=death, nbytes=nbytes, is_saved=True, **more)


def plain(birth: int, death: int, nbytes: int = 10, **more: Any) -> Storage:
    return Storage(birth=birth, death=death, nbytes=nbytes, **more)


def trace_of(operators: list[Operator], storages: list[Storage]) -> Trace:
    return Trace(operators=tuple(operators), storages=tuple(storages), base_bytes=100)


def chain_of(problem: Any, item: int) -> Any:
    return problem.chain_steps[problem.chain_starts[item] : problem.chain_starts[item + 1]].tolist()


def inputs_of(problem: Any, item: int) -> Any:
    return problem.inputs[problem.input_starts[item] : problem.input_starts[item + 1]].tolist()


def test_lower_when_storage_is_saved_then_item_from_birth_to_death() -> None:
    operators = [
        operator("f", (), (0,)),
        operator("f", (0,), (0,)),  # in place
        operator("f", (0,)),
        operator("f", workspace_bytes=7),
        operator("f", workspace_bytes=5),
        operator("b", (0,)),
        operator("b"),
        operator("b"),
    ]
    problem = lower(trace_of(operators, [saved(0, 7), plain(4, 5, 3)]))
    firsts = problem.slot_operators
    assert problem.item_storages.tolist() == [0]
    assert firsts[problem.births[0]] == 0
    assert firsts[problem.readies[0] + 1] == 2
    assert firsts[problem.releases[0] + 1] == 3
    assert firsts[problem.uses[0]] == 5
    assert firsts[problem.deaths[0] + 1] == 7
    assert firsts.tolist() == [0, 2, 3, 5, 7, 8]
    assert problem.slot_seconds.tolist() == [2, 1, 2, 2, 1]
    assert problem.slot_bytes.tolist() == [100, 100, 108, 100, 100]
    assert not problem.can_recompute[0]  # more than its maker wrote it


@pytest.mark.parametrize(
    ("operators", "storage"),
    [
        ([operator("f", (), (0,)), operator("f", (0,))], saved(0, 2)),
        ([operator("f", (), (0,)), operator("b", (), (0,)), operator("b", (0,))], saved(0, 3)),
        ([operator("f", (), (0,)), operator("b", (0,))], plain(0, 2)),
        ([operator("f", (), (0,)), operator("o", (0,))], saved(0, 2)),
        ([operator("b", (), (0,)), operator("b", (0,))], saved(0, 2)),
        ([operator("f", (0,)), operator("b", (0,))], saved(BEFORE, 2, kind=Kind.INPUT)),
    ],
    ids=["no backward", "written between", "not saved", "optimizer", "made by backward", "input"],
)
def test_lower_when_storage_is_not_idle_then_fixed(
    operators: list[Operator], storage: Storage
) -> None:
    problem = lower(trace_of(operators, [storage]))
    assert problem.item_bytes.size == 0
    assert problem.slot_operators.tolist() == [0, len(operators)]
    assert problem.slot_bytes.tolist() == [110]


def test_lower_when_forward_reads_again_after_a_backward_then_last_gap() -> None:
    operators = [operator("f", (), (0,)), operator("b", (0,)), operator("f", (0,))]
    operators += [operator("i"), operator("b", (0,))]
    problem = lower(trace_of(operators, [saved(0, 5)]))
    assert problem.slot_operators[problem.releases[0] + 1] == 3
    assert problem.slot_operators[problem.uses[0]] == 4


def test_lower_when_items_are_small_then_together_half_a_per_cent_stay() -> None:
    sizes = (2, 3, 6, 1000, 1000)
    operators = [operator("f", (), (number,)) for number in range(5)]
    operators += [operator("b", (number,)) for number in range(5)]
    trace = trace_of(operators, [saved(n, 6 + n, size) for n, size in enumerate(sizes)])
    assert lower(trace).item_bytes.tolist() == [6, 1000, 1000]  # 2 + 3 of 2011, not 6 more
    assert lower(trace, least_bytes=0).item_bytes.tolist() == list(sizes)
    assert lower(trace, least_bytes=7).item_bytes.tolist() == [1000, 1000]
    assert int(lower(trace, least_bytes=7).slot_bytes.max()) == 100 + 2 + 3 + 6


def test_lower_when_optimizer_states_are_asked_for_then_items_from_before() -> None:
    trace = layered_trace(2, optimizer=True)
    without, problem = lower(trace), lower(trace, optimizer_states=True)
    states = np.flatnonzero(problem.readies == -1)
    assert states.size == 4
    assert len(problem.item_bytes) == len(without.item_bytes) + 4
    assert (problem.births[states] == 0).all()
    assert (problem.releases[states] == -1).all()
    assert (problem.deaths[states] == len(problem.slot_seconds) - 1).all()
    first = problem.slot_operators[problem.uses[states]]
    assert all(trace.operators[number].name == "adam" for number in first)
    assert without.slot_bytes.max() > problem.slot_bytes.max()


def test_lower_when_trace_is_lowered_then_keeping_all_is_the_trace_itself() -> None:
    trace = layered_trace(3, optimizer=True)
    problem = lower(trace)
    assert problem.slot_seconds.sum() == pytest.approx(trace.seconds)
    kept = problem.slot_bytes.copy()
    for item, nbytes in enumerate(problem.item_bytes):
        kept[problem.births[item] : problem.deaths[item] + 1] += nbytes
    peak = max(
        trace.base_bytes
        + operator.workspace_bytes
        + sum(each.nbytes for each in trace.storages if each.birth <= number < each.death)
        for number, operator in enumerate(trace.operators)
    )
    assert kept.max() == peak


def recomputed(*, first: Storage, more: list[Operator], **maker: Any) -> Any:
    """Lower a step: operator 0 makes storage 0, operator 1 the saved storage 1 from it."""
    operators = [operator("f", (), (0,)), operator("f", (0,), (1,), **maker), *more]
    return lower(trace_of(operators, [first, saved(1, 4)]), least_bytes=1)


USE = [operator("f", (1,)), operator("b", (1,))]


def test_chain_when_operand_is_saved_longer_then_own_operator_alone() -> None:
    problem = recomputed(first=plain(0, 5), more=[*USE, operator("b", (0,))])
    assert problem.can_recompute.tolist() == [True]
    assert chain_of(problem, 0) == [0]
    assert problem.step_seconds[problem.own_steps[0]] == 1
    assert problem.chain_bytes[0] == 0


def test_chain_when_operand_is_gone_then_its_maker_is_a_step_and_its_memory_counts() -> None:
    problem = recomputed(first=plain(0, 2, 33), more=USE, workspace_bytes=4)
    assert chain_of(problem, 0) == [0, 1]
    assert problem.own_steps[0] == 1
    assert problem.chain_bytes[0] == 33 + 4


@pytest.mark.parametrize(("last", "is_found"), [(2, False), (3, True), (4, True)])
def test_chain_when_it_begins_at_an_input_then_autograd_has_to_have_saved_that(
    last: int, is_found: bool
) -> None:
    reads = {2: (), 3: (1,), 4: ()}
    more = [
        operator("b", (*reads[number], 0) if number == last else reads[number]) for number in reads
    ]
    problem = recomputed(first=plain(BEFORE, 5, kind=Kind.INPUT), more=more)
    assert problem.slot_operators[problem.uses[0]] == 3
    assert problem.can_recompute.tolist() == [is_found]


def test_slots_when_a_chain_takes_memory_then_only_the_operator_that_needs_it_is_there() -> None:
    more = [*USE, operator("b", workspace_bytes=50), operator("b", (1,))]
    operators = [operator("f", (), (0,)), operator("f", (0,), (1,)), *more]
    problem = lower(trace_of(operators, [plain(0, 2, 33), saved(1, 6)]), least_bytes=1)
    slot = problem.uses[0]
    assert problem.chain_bytes[0] == 33
    assert problem.slot_operators[[slot, slot + 1]].tolist() == [3, 4]
    assert problem.slot_bytes[[slot, slot + 1]].tolist() == [100, 150]


def test_chain_when_operand_is_an_item_then_input() -> None:
    problem = recomputed(first=saved(0, 5), more=[*USE, operator("b", (0,))])
    assert chain_of(problem, 1) == [1]
    assert inputs_of(problem, 1) == [0]


def test_chain_when_operand_item_dies_before_then_not_recomputed() -> None:
    more = [operator("b", (0,)), operator("b", (1,))]
    problem = recomputed(first=saved(0, 3), more=more)
    assert problem.can_recompute.tolist() == [True, False]


def test_chain_when_operand_item_is_written_after_it_was_read_then_not_recomputed() -> None:
    more = [operator("f", (0,), (0,)), *USE, operator("b", (0,))]
    operators = [operator("f", (), (0,)), operator("f", (0,), (1,)), *more]
    problem = lower(trace_of(operators, [saved(0, 6), saved(1, 5)]))
    assert problem.can_recompute.tolist() == [False, False]


@pytest.mark.parametrize(
    ("first", "more", "maker"),
    [
        (plain(0, 4), USE, {"is_repeatable": False}),
        (plain(0, 4), [operator("f", (1,), (0,)), operator("b", (1,))], {}),
        (plain(BEFORE, 4), [operator("b", (), (0,)), operator("b", (1,))], {}),
        (plain(0, 4), [operator("f", (0,), (1,)), operator("b", (1,))], {}),
        (plain(0, 4), USE, {"writes": (0, 1)}),
        (plain(BEFORE, 4), USE, {"reads": (), "writes": (0, 1)}),
    ],
    ids=[
        "not repeatable",
        "operand written",
        "state written",
        "written twice",
        "changes operand",
        "changes state",
    ],
)
def test_chain_when_it_would_not_give_the_same_then_not_recomputed(
    first: Storage, more: list[Operator], maker: dict[str, Any]
) -> None:
    values = {"reads": (0,), "writes": (1,), **maker}
    operators = [operator("f", (), (0,)), operator("f", **values), *more]
    problem = lower(trace_of(operators, [first, saved(1, 4)]))
    assert problem.can_recompute.tolist() == [False]
    assert problem.own_steps.tolist() == [-1]


def test_anchor_when_another_block_reads_then_never_recomputed() -> None:
    trace = layered_trace(4)
    problem = lower(trace)
    outputs = {
        number
        for number, storage in enumerate(trace.storages)
        if storage.is_saved and trace.operators[storage.birth].name in {"add", "embedding"}
    }
    for item, storage in enumerate(problem.item_storages.tolist()):
        block = block_of(trace.operators[trace.storages[storage].birth].module)
        readers = {
            block_of(each.module)
            for each in trace.operators
            if each.phase is Phase.FORWARD and storage in each.reads
        }
        assert problem.can_recompute[item] == (readers <= {block})
        assert problem.can_recompute[item] or storage in outputs
    assert problem.can_recompute.sum() == 4 * 8


def test_anchor_when_there_are_no_blocks_then_chains_are_limited() -> None:
    problem = lower(layered_trace(12, numbered=False))
    depths = [0] * len(problem.item_bytes)
    for item in np.argsort(problem.births, kind="stable"):
        if problem.can_recompute[item]:
            before = [depths[other] for other in inputs_of(problem, item)]
            depths[item] = len(chain_of(problem, item)) + max(before, default=0)
    assert 4 <= max(depths) <= 16
    assert problem.can_recompute.mean() > 0.7
    assert not problem.can_recompute.all()


def test_classes_when_layers_are_alike_then_same_part_has_same_class() -> None:
    trace = layered_trace(5)
    problem = lower(trace)
    members: dict[int, list[Storage]] = {}
    for item, storage in enumerate(problem.item_storages):
        members.setdefault(int(problem.classes[item]), []).append(trace.storages[storage])
    sizes = sorted(len(each) for each in members.values())
    assert sizes == [1, *[5] * 7, 10]  # both adds of a layer look the same
    for each in members.values():
        assert len({(storage.nbytes, storage.index) for storage in each}) == 1


def test_siblings_when_one_operator_makes_two_items_then_same_own_step() -> None:
    problem = lower(layered_trace(1), least_bytes=1)
    attention = [
        item for item in range(len(problem.births)) if problem.item_bytes[item] in {UNIT, 2 * UNIT}
    ]
    twins = [item for item in attention if (problem.births == problem.births[item]).sum() == 2]
    assert len(twins) == 2
    assert problem.own_steps[twins[0]] == problem.own_steps[twins[1]] >= 0


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("model.layers.7.mlp.up", "model.layers.7"),
        ("layers.3", "layers.3"),
        ("0.linear", "0"),
        ("model.layers.7.experts.12.w1", "model.layers.7"),
        ("model.conv1", ""),
        ("model.layer1x.2b.c", ""),
        ("", ""),
    ],
)
def test_block_when_path_is_numbered_then_up_to_the_first_number(module: str, block: str) -> None:
    assert block_of(module) == block


def test_lower_when_trace_is_empty_then_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="without operators"):
        lower(Trace(operators=(), storages=()))


def test_lower_when_nothing_is_saved_then_one_slot() -> None:
    trace = layered_trace(1)
    bare = replace(
        trace, storages=tuple(replace(storage, is_saved=False) for storage in trace.storages)
    )
    problem = lower(bare)
    assert len(problem.slot_seconds) == 1
    assert problem.item_bytes.size == problem.chain_steps.size == 0


def test_chain_when_operator_ran_in_no_module_then_not_recomputed() -> None:
    def lowered(module: str) -> Any:
        operators = [
            operator("f", (), (0,), module="head"),
            operator("f", (0,), (1,), module=module),
            operator("f", (1,), module="head"),
            operator("b", (1,)),
            operator("b", (0,)),
        ]
        return lower(trace_of(operators, [saved(0, 5), saved(1, 4)]), least_bytes=1)

    assert lowered("head").can_recompute.tolist() == [True, True]
    assert lowered("").can_recompute.tolist() == [True, False]


def test_lower_when_forward_writes_after_a_save_then_fixed() -> None:
    operators = [
        operator("f", (), (0,)),
        operator("f", (0,), (0,)),  # a piece of it, in place
        operator("f", (0,), (0,)),  # another one
        operator("b", (0,)),
    ]
    trace = trace_of(operators, [saved(0, 4)])

    def items_if_saved_before(number: int) -> int:
        event = Event(kind=EventKind.SAVE, storage=0, operator=number)
        return len(lower(replace(trace, events=(event,)), least_bytes=1).item_bytes)

    assert items_if_saved_before(2) == 0
    assert items_if_saved_before(3) == 1


@pytest.mark.parametrize("is_written", [False, True])
def test_lower_when_a_weight_is_written_before_backward_then_what_read_it_is_not_made_again(
    is_written: bool,
) -> None:
    operators = [
        operator("f", (0,), (1,)),
        operator("f", (), (0,) if is_written else ()),
        operator("b", (1,)),
        operator("b", (0,)),
        *[operator("b")] * SHORTEST_WITHIN,
    ]
    weight = plain(BEFORE, len(operators), kind=Kind.STATE)
    trace = divide_weights(trace_of(operators, [weight, saved(0, 4)]))
    problem = lower(trace)
    assert problem.item_storages.tolist() == [0, 1]
    assert bool(problem.can_recompute[1]) is not is_written
