"""Flags that ask for a plan, from the command line to the end of training."""

from __future__ import annotations

import argparse
import logging
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit.ir.plans import Action
from swapkit.planning.policies.stage_swap import find_stages
from tests.support.sessions import (
    LAYERS,
    Block,
    Log,
    Plain,
    Training,
    in_use_bytes,
    make_training,
    nothing,
    train_plainly,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit.api.command_line import Arguments

MIB = 1 << 20
STEPS = 8
SWAP, SIZE = "--adaptive-recompute-device-swap", "--adaptive-recompute-device-size"
PROFILE = "--adaptive-recompute-profiling-step"
SMALL = {"tensor_size_filter": 1024}


class Greedy(nn.Module):
    """Takes memory for a moment in forward, from some step on."""

    nbytes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.empty(self.nbytes, dtype=torch.uint8)
        return x


def make_greedy_training() -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(LAYERS) for part in (Block(), Greedy())])
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def parse(line: str, smart_swap: dict[str, object] | None = None) -> Arguments:
    parser = swapkit.add_arguments(argparse.ArgumentParser())
    return swapkit.from_arguments(parser.parse_args(line.split()), smart_swap=smart_swap)


@pytest.fixture(scope="module")
def plain() -> Plain:
    """The run without a budget."""
    swapkit.install()
    return train_plainly(make_training, STEPS)


@pytest.fixture(autouse=True)
def no_limit() -> Iterator[None]:
    yield
    Greedy.nbytes = 0
    swapkit.install(limit=None)


def train(
    asked: Arguments,
    *,
    steps: int = STEPS,
    make: Callable[[], Training] = make_training,
    before: Callable[[Training, int], object] = nothing,
    **options: Any,
) -> tuple[Log, Training, list[int]]:
    """Train as flags ask for; return the log, the training, and the peak of each step."""
    in_use_bytes()
    training = make()
    peaks = []
    with asked.budget(training.model, training.optimizer, **options) as session:
        log = Log(session)
        for step in range(steps):
            before(training, step)
            swapkit.reset_peak_memory_stats()
            training.step()
            peaks.append(swapkit.memory_stats()["allocated_bytes.all.peak"])
            log.note()
    return log, training, peaks


# ---- adaptive recompute --------------------------------------------------------------------------


@pytest.mark.promise("A5")
@pytest.mark.promise("D3")
def test_adaptive_recompute_when_steps_need_more_than_planned_then_as_figure_1_draws_it(
    plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swapkit")
    profiled = 5

    def become_greedy(_: Training, step: int) -> None:
        Greedy.nbytes = 5 * MIB if step >= profiled else 0

    limit = plain.budget(0.75)
    steps = 20
    log, training, _ = train(
        parse(f"{SWAP} {PROFILE} {profiled}"),
        steps=steps,
        make=make_greedy_training,
        before=become_greedy,
        limit=limit,
    )
    assert training.outcome() == train_plainly(make_greedy_training, steps).outcome
    # Profile n steps; try thresholds until one is found; keep it.
    probes = log.stages.count("search")
    assert log.stages == ["warmup"] * (profiled - 1) + ["search"] * probes + ["stable"] * (
        steps - profiled + 1 - probes
    )
    assert 2 <= probes <= math.ceil(math.log2(limit / MIB)) + 2
    events = [
        record.message
        for record in caplog.records
        if record.name == "swapkit.plan" and record.message.startswith(("search:", "threshold "))
    ]
    assert events[0] == f"search: the first threshold is {limit // MIB}.00 MiB"
    assert len(events) == probes + 1
    thresholds = [float(event.rsplit(" ", 2)[-2]) for event in events]
    rescued = [after > before for before, after in pairwise(log.rescues[profiled - 1 :])]
    for event, is_rescued, (now, then) in zip(
        events[1:], rescued, pairwise(thresholds), strict=False
    ):
        assert event.startswith(
            f"threshold {now:.2f} MiB: memory {'ran out' if is_rescued else 'held'}; "
        )
        assert then < now if is_rescued else then >= now
    assert "; found: " in events[-1]
    assert log.rescues_since(profiled + probes) == 0
    plan = log.session.plan
    assert plan is not None
    assert {decision.action for decision in plan.decisions} == {Action.RECOMPUTE}


@pytest.mark.promise("A7")
@pytest.mark.promise("A10")
@pytest.mark.promise("A11")
def test_adaptive_recompute_when_memory_is_enough_then_all_is_kept_after_the_profile(
    plain: Plain,
) -> None:
    log, training, _ = train(parse(f"{SWAP} {PROFILE} 7"))
    assert log.stages == ["warmup"] * 6 + ["search", "stable"]
    assert training.outcome() == plain.outcome
    assert log.session.plan is not None
    assert log.session.plan.decisions == ()
    assert log.rescues[-1] == 0


@pytest.mark.promise("A8")
def test_adaptive_recompute_when_the_size_is_tiny_then_as_full_recompute(plain: Plain) -> None:
    def make_checkpointed() -> Training:
        training = make_training()
        for layer in training.model:  # type: ignore[attr-defined]
            swapkit.checkpoint(layer)
        return training

    full = train_plainly(make_checkpointed, 3)
    log, training, peaks = train(parse(f"{SWAP} {SIZE} 1 {PROFILE} 5"))
    assert training.outcome() == plain.outcome
    assert peaks[-1] <= 1.1 * full.peak_bytes
    assert log.session.limit_bytes > 100 * plain.peak_bytes
    assert log.session.stats.recomputed_regions > 0
    assert log.session.stats.swapped_out_bytes == 0


@pytest.mark.promise("A9")
def test_fixed_size_when_it_is_enough_then_it_holds(
    plain: Plain,
) -> None:
    size = math.ceil(plain.budget(0.6) / MIB)
    log, training, _ = train(parse(f"{SIZE} {size} {PROFILE} 5"))
    assert training.outcome() == plain.outcome
    assert max(log.reserved_bytes) <= size * MIB == log.session.limit_bytes
    assert log.session.plan is not None
    assert {each.action for each in log.session.plan.decisions} == {Action.RECOMPUTE}
    del log, training


@pytest.mark.promise("F22")
@pytest.mark.parametrize("size", [2, 3])
def test_fixed_size_when_a_step_does_not_fit_then_fails_and_the_next_size_trains(
    size: int, plain: Plain
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(parse(f"{SIZE} {size}"))
    (found,) = re.findall(r"device-size gives \S+ MiB\. Try (\d+) \(MiB\)", str(caught.value))
    assert f"a budget of at least {found}MiB" in str(caught.value)
    del caught
    log, training, _ = train(parse(f"{SIZE} {found} {PROFILE} 5"))
    assert training.outcome() == plain.outcome
    assert max(log.reserved_bytes) <= int(found) * MIB == log.session.limit_bytes


# ---- adaptive memory -----------------------------------------------------------------------------


@pytest.mark.promise("D1")
@pytest.mark.promise("D5")
def test_adaptive_memory_when_memory_is_short_then_planned_inside_it(plain: Plain) -> None:
    limit = plain.budget(0.6)
    log, training, _ = train(parse("--adaptive-memory-optimization"), limit=limit)
    assert training.outcome() == plain.outcome
    assert max(log.reserved_bytes) <= limit
    assert log.session.plan is not None
    assert log.session.plan.policy == "auto"
    assert log.session.plan.decisions
    assert log.stages[-1] == "stable"


# ---- SmartSwap -----------------------------------------------------------------------------------


@pytest.mark.promise("C6")
@pytest.mark.promise("C9")
def test_smart_swap_when_memory_is_short_then_planned_for_what_there_is(plain: Plain) -> None:
    limit = plain.budget(0.7)
    log, training, _ = train(parse("--smart-swap"), limit=limit)
    assert training.outcome() == plain.outcome
    assert log.session.plan is not None
    assert {each.action for each in log.session.plan.decisions} == {Action.SWAP}
    assert log.stages[:2] == ["warmup", "search"]
    assert log.stages[-1] == "stable"


@pytest.mark.promise("C7")
def test_smart_swap_when_a_reduction_is_asked_for_then_the_peak_drops(plain: Plain) -> None:
    reduction = int(0.4 * (plain.peak_bytes - plain.between_bytes))
    free = train(parse("--smart-swap"), steps=4)[2]
    log, training, peaks = train(parse("--smart-swap", {"reduction_memory": reduction}))
    assert training.outcome() == plain.outcome
    assert free[-1] - peaks[-1] >= 0.95 * reduction
    assert log.rescues[-1] == 0


@pytest.mark.promise("C7")
def test_smart_swap_when_a_target_is_given_then_it_is_never_passed(plain: Plain) -> None:
    target = plain.budget(0.7)
    asked = parse("--smart-swap", {"target_mode": True, "target_memory": target})
    log, training, _ = train(asked)
    assert training.outcome() == plain.outcome
    assert max(log.reserved_bytes) <= log.session.limit_bytes == target
    assert log.session.plan is not None
    assert log.session.plan.decisions


@pytest.mark.promise("C10")
@pytest.mark.parametrize("layers", [1, 2])
def test_smart_swap_when_a_bucket_is_given_then_no_stage_swaps_more(
    plain: Plain, layers: int
) -> None:
    bucket = MIB
    config: dict[str, object] = {  # no tensor here reaches the default tensor_size_filter
        "swap_bucket_size": bucket,
        "num_attn_layers_per_stage": layers,
    }
    log, training, peaks = train(parse("--smart-swap", config))
    assert training.outcome() == plain.outcome
    plan, trace = log.session.plan, log.session.trace
    assert plan is not None
    assert trace is not None
    stages = find_stages(trace, layers)
    assert len(stages) == math.ceil(LAYERS / layers)
    swapped = dict.fromkeys(range(-1, len(stages)), 0)
    for decision in plan.decisions:
        storage = trace.storages[decision.storage]
        swapped[sum(storage.birth >= first for first in stages) - 1] += storage.nbytes
    assert 0 < max(swapped.values()) <= bucket
    assert peaks[-1] < plain.peak_bytes


@pytest.mark.promise("C10")
def test_smart_swap_when_the_bucket_is_empty_then_nothing_moves(plain: Plain) -> None:
    log, training, _ = train(parse("--smart-swap", {**SMALL, "swap_bucket_size": 0}))
    assert training.outcome() == plain.outcome
    assert log.session.stats.swapped_out_bytes == 0


@pytest.mark.promise("C10")
def test_smart_swap_when_memory_is_to_be_saved_then_optimizer_states_leave_too(
    plain: Plain,
) -> None:
    limit = plain.budget(0.7)
    used = {}
    for preference in ("BETTER_PERFORMANCE", "BETTER_MEMORY_SAVING"):
        asked = parse("--smart-swap", {"policy_pref": preference})
        log, training, _ = train(asked, limit=limit)
        assert training.outcome() == plain.outcome
        assert log.session.stats.swapped_out_bytes > 0
        assert training.optimizer is not None
        used[preference] = in_use_bytes()
        states = sum(
            each.nbytes
            for state in training.optimizer.state.values()
            for each in state.values()
            if each.nbytes >= 1024
        )
        del training, asked, log
    assert used["BETTER_PERFORMANCE"] - used["BETTER_MEMORY_SAVING"] >= 0.98 * states


def test_smart_swap_when_small_ones_are_filtered_then_only_large_ones_move(plain: Plain) -> None:
    least = 300 * 1024
    asked = parse("--smart-swap", {"tensor_size_filter": least})
    log, training, _ = train(asked, limit=plain.budget(0.8))
    assert training.outcome() == plain.outcome
    plan, trace = log.session.plan, log.session.trace
    assert plan is not None
    assert trace is not None
    assert plan.decisions
    assert min(trace.storages[each.storage].nbytes for each in plan.decisions) >= least
