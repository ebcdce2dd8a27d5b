"""Cost of each way to train for the training thread, compared with training on the pool alone.

The demo's model with tiny kernels (12 layers, width 32, 16 tokens), so that host work dominates a
step, as for the host thread of a GPU. Measured is the CPU time of the training thread, which also
runs autograd; CPU kernels and copies are included. All ways take turns in one process, each after
the pool alone; a ratio is forward and backward over those of the pool alone, the median of all
turns.

- pool: only swapkit's allocator; 1.00 by definition;
- identity_hooks: saved tensor hooks that return their argument: the minimum cost of Python hooks;
  noop_mode: a dispatch mode around forward that does nothing: the minimum cost of watching;
- session_rescue, session_free: a session with more memory than it needs, without a plan, and
  following the planner's plan, which moves nothing;
- swap_all, recompute_all, mixed: a session that follows a plan to swap all movable storages, to
  recompute all that can be recomputed, or to swap a quarter and recompute another;
- offload, offload_prefetch4: `swapkit.offload(model)`, and with `prefetch=4`; save_on_cpu: torch's,
  which copies nothing on the CPU;
- checkpoint, checkpoint_save: each block under `swapkit.checkpoint`, and with `save=["matmul"]`;
  torch_checkpoint, torch_selective: the same by torch, saving the results of `mm`;
- gpt_...: the same ways with 10 layers as in GPT-2, width 64, two sequences of 16 tokens, AdamW,
  over gpt_pool;
- weights_session, weights_resident, weights_streamed, weights_planned: a frozen model (a norm of
  its first layer is trained) with 8 layers as in GPT-2, width 256, 64 tokens, over weights_pool:
  in a session whose weights stay; where they may leave, but have room; in a budget that leaves them
  the room of a fifth of them, by rescues; and there by a plan. The bytes swapped of the last three
  are those that come back;
- planner_recompute_50, planner_recompute_40: a session with `policy="recompute"` within 50 or 40
  per cent of a step's activations; 8 layers, width 64, 256 tokens, over planner_pool.

Sessions must follow their plan to the end of each step, without a rescue or a new plan.

`--json FILE` writes one flat object. For each way: `pool_forward_us`, `pool_backward_us`;
`mixed_ratio`; beyond the pool alone `mixed_us_per_operator` (forward and backward),
`mixed_us_per_saved_tensor`, and `mixed_optimizer_us` for the optimizer's step; per step
`mixed_swapped_bytes`, `mixed_recomputed`; and `mixed_us_per_recomputed_operator`, beyond
session_free. `forward_operators`, `backward_operators` and `saved_tensors` of the step, and the
same with the prefixes `gpt_`, `weights_` and `planner_`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import swapkit
from benchmarks._host_ways import (
    RESCUE,
    Counts,
    Gpt,
    InSession,
    InTurn,
    Plain,
    Times,
    Training,
    WithWeights,
    checkpoint_by_swapkit,
    checkpoint_by_torch,
    count_step,
    freeze,
    identity,
    leave,
    make_size,
)
from benchmarks._per_saved_tensor import Passing
from examples.language_model import LanguageModel
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from benchmarks._host_ways import Scope, Step, Way
    from examples.language_model import ModelSize
    from swapkit.planning.planner import Policy

    Make = Callable[[], Way]
    Figures = dict[str, float]

POOL, WEIGHTS_POOL, PLANNER_POOL = "pool", "weights_pool", "planner_pool"
SESSION = "session_free"
RECOMPUTING = ("recompute_all", "mixed")  # plans whose recomputed operators are counted
AMPLE_BYTES = 2 << 30
DIM, TOKENS = 32, 16
PLANNER_DIM, PLANNER_TOKENS = 64, 256
GPT_DIM, GPT_BATCH = 64, 2
WEIGHTS_DIM, WEIGHTS_TOKENS = 256, 64
PERCENTS = (50, 40)
MATMULS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm"))


# ---- the ways ------------------------------------------------------------------------------------


def list_ways(
    size: ModelSize, kind: type[LanguageModel] = LanguageModel, prefix: str = ""
) -> dict[str, Make]:
    """Return a factory for each way, the pool alone first."""

    def plain(
        change: Callable[[LanguageModel], object] = leave, scope: Scope = nullcontext
    ) -> Make:
        return lambda: Plain(Training(size, change, kind), scope)

    def session(name: str, policy: str | Policy) -> Make:
        return lambda: InSession(prefix + name, Training(size, kind=kind), policy, AMPLE_BYTES)

    ways = {
        POOL: plain(),
        "identity_hooks": plain(scope=partial(saved_tensors_hooks, identity, identity)),
        "noop_mode": plain(scope=Passing),
        "session_rescue": session("session_rescue", RESCUE),
        SESSION: session(SESSION, "auto"),
        "swap_all": session("swap_all", InTurn(SWAP)),
        "recompute_all": session("recompute_all", InTurn(RECOMPUTE)),
        "mixed": session("mixed", InTurn(SWAP, RECOMPUTE, KEEP, KEEP)),
        "offload": plain(swapkit.offload),
        "offload_prefetch4": plain(partial(swapkit.offload, prefetch=4)),
        "save_on_cpu": plain(scope=save_on_cpu),
        "checkpoint": plain(checkpoint_by_swapkit),
        "torch_checkpoint": plain(checkpoint_by_torch),
        "checkpoint_save": plain(partial(checkpoint_by_swapkit, save=("matmul",))),
        "torch_selective": plain(partial(checkpoint_by_torch, saves=MATMULS)),
    }
    return {prefix + name: make for name, make in ways.items()}


def list_planner_ways(size: ModelSize) -> dict[str, Make]:
    """Return a factory for each way with a budget that the planner must meet; all share a model."""
    training = cache(lambda: Training(size))
    memory = cache(lambda: measure_memory(training()))

    def session(name: str, share: float) -> Make:
        def make() -> Way:
            between_bytes, peak_bytes = memory()
            limit_bytes = int(between_bytes + share * (peak_bytes - between_bytes))
            return InSession(name, training(), "recompute", limit_bytes)

        return make

    names = {f"planner_recompute_{percent}": percent / 100 for percent in PERCENTS}
    return {
        PLANNER_POOL: lambda: Plain(training()),
        **{name: session(name, share) for name, share in names.items()},
    }


def list_weight_ways(size: ModelSize) -> dict[str, Make]:
    """Return a factory for each way to train a frozen model; all share it."""
    training = cache(lambda: Training(size, freeze, Gpt))
    session = "weights_session"
    return {
        WEIGHTS_POOL: lambda: Plain(training()),
        session: lambda: InSession(session, training(), RESCUE, AMPLE_BYTES),
        "weights_resident": lambda: WithWeights(training(), room=4),
        "weights_streamed": lambda: WithWeights(training(), room=-0.8),
        "weights_planned": lambda: WithWeights(training(), room=-0.8, policy="auto"),
    }


def measure_memory(training: Training) -> tuple[int, int]:
    """Return the bytes in use between steps, and the peak within a step."""
    training.step()
    gc.collect()
    swapkit.reset_peak_memory_stats()
    training.step()
    stats = swapkit.memory_stats()
    return stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]


# ---- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Times of a way in each turn and of the pool alone right before it, with its counts."""

    turns: list[Times]
    before: list[Times]
    counts: Counts

    @property
    def ratio(self) -> float:
        """Median ratio over turns: a slowdown of the machine affects both times of a turn."""
        pairs = zip(self.turns, self.before, strict=True)
        return statistics.median(own.both_us / plain.both_us for own, plain in pairs)

    @property
    def added_optimizer_us(self) -> float:
        """Optimizer time beyond the pool alone: the median over turns."""
        pairs = zip(self.turns, self.before, strict=True)
        return statistics.median(own.optimizer_us - plain.optimizer_us for own, plain in pairs)


def median_of(times: Sequence[Times]) -> Times:
    return Times(*map(statistics.median, zip(*times, strict=True)))


def measure(ways: Mapping[str, Make], base: str, *, rounds: int, steps: int) -> dict[str, Result]:
    """Run all ways in turns of `steps` steps, each after a turn of the base."""
    made = {name: make() for name, make in ways.items()}
    plain = made.pop(base)
    for way in made.values():
        way.run(1)
    turns: dict[str, list[Times]] = {name: [] for name in made}
    before: dict[str, list[Times]] = {name: [] for name in made}
    gc.collect()
    gc.freeze()  # else each collection would scan all loaded objects, in the time of some way
    try:
        for _ in range(rounds):
            for name, way in made.items():
                before[name].append(run_alone(plain, steps))
                turns[name].append(run_alone(way, steps))
    finally:
        gc.unfreeze()
    return {name: Result(turns[name], before[name], way.counts) for name, way in made.items()}


def run_alone(way: Way, steps: int) -> Times:
    """Return the median of a turn, without freeing garbage of other ways inside it."""
    gc.collect()
    return median_of(way.run(steps))


def summarize(results: Mapping[str, Result], base: str, step: Step) -> Figures:
    """Return the figures of the pool alone, and those of the other ways beyond it."""
    plain = median_of([times for result in results.values() for times in result.before])
    figures = {f"{base}_{key}": value for key, value in plain._asdict().items()}
    operators = step.forward_operators + step.backward_operators
    for name, result in results.items():
        times = median_of(result.turns)
        added_us = (result.ratio - 1) * plain.both_us
        found = {
            "ratio": result.ratio,
            "forward_us": times.forward_us,
            "backward_us": times.backward_us,
            "optimizer_us": result.added_optimizer_us,
            "us_per_operator": added_us / operators,
            "us_per_saved_tensor": added_us / step.saved_tensors,
            "swapped_bytes": result.counts.swapped_bytes,
            "recomputed": result.counts.recomputed,
        }
        session = name.replace(name.removeprefix("gpt_"), SESSION)
        if name.removeprefix("gpt_") in RECOMPUTING and session in results:
            beyond_us = (result.ratio - results[session].ratio) * plain.both_us
            found["us_per_recomputed_operator"] = beyond_us / result.counts.recomputed
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    return figures


# ---- the command ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ways that train models of one size."""

    base: str
    prefix: str
    size: ModelSize
    ways: dict[str, Make]
    kind: type[LanguageModel] = LanguageModel

    def choose(self, names: Collection[str]) -> dict[str, Make]:
        """Return the ways with one of the names, and the pool alone."""
        chosen = {name: make for name, make in self.ways.items() if name in names}
        chosen.pop(self.base, None)
        return {self.base: self.ways[self.base], **chosen} if chosen else {}


def list_groups(
    layers: int, gpt_layers: int, weights_layers: int, planner_layers: int
) -> tuple[Group, ...]:
    tiny = make_size(layers, DIM, TOKENS)
    gpt = replace(
        make_size(gpt_layers, GPT_DIM, TOKENS), heads=4, hidden=4 * GPT_DIM, batch=GPT_BATCH
    )
    frozen = replace(
        make_size(weights_layers, WEIGHTS_DIM, WEIGHTS_TOKENS), heads=4, hidden=4 * WEIGHTS_DIM
    )
    planned = make_size(planner_layers, PLANNER_DIM, PLANNER_TOKENS)
    return (
        Group(base=POOL, prefix="", size=tiny, ways=list_ways(tiny)),
        Group(base="gpt_pool", prefix="gpt_", size=gpt, ways=list_ways(gpt, Gpt, "gpt_"), kind=Gpt),
        Group(
            base=WEIGHTS_POOL,
            prefix="weights_",
            size=frozen,
            ways=list_weight_ways(frozen),
            kind=Gpt,
        ),
        Group(base=PLANNER_POOL, prefix="planner_", size=planned, ways=list_planner_ways(planned)),
    )


def run_group(group: Group, names: Collection[str], *, rounds: int, steps: int) -> Figures:
    """Measure the named ways of a group, and print the figures."""
    ways = group.choose(names)
    if not ways:
        return {}
    gc.collect()
    step = count_step(Training(group.size, kind=group.kind))
    print_heading(group.size, step)
    results = measure(ways, group.base, rounds=rounds, steps=steps)
    figures = summarize(results, group.base, step)
    for name in ways:
        print_row(name, figures)
    counts = step._asdict().items()
    return {**{f"{group.prefix}{key}": value for key, value in counts}, **figures}


def print_heading(size: ModelSize, step: Step) -> None:
    print(
        f"{size.layers} layers, width {size.dim}, {size.tokens} tokens: "
        f"{step.forward_operators} operators forward, {step.backward_operators} backward, "
        f"{step.saved_tensors} saved tensors; CPU time of the thread that trains"
    )
    print(
        f"{'':22}{'ratio':>7}{'forward':>9}{'backward':>9}{'optimizer':>10}{'us an':>10}{'us a':>8}"
        f"{'KiB':>9}{'times':>11}{'us a':>11}"
    )
    print(
        f"{'':22}{'':7}{'us':>9}{'us':>9}{'us added':>10}{'operator':>10}{'tensor':>8}"
        f"{'swapped':>9}{'recomputed':>11}{'recomputed':>11}",
        flush=True,
    )


def print_row(name: str, figures: Figures) -> None:
    def of(key: str) -> float:
        return figures[f"{name}_{key}"]

    times = f"{of('forward_us'):9.0f}{of('backward_us'):9.0f}"
    if f"{name}_ratio" not in figures:
        print(f"{name:22}{1:7.2f}{times}{'(' + format(of('optimizer_us'), '.0f') + ')':>10}")
        return
    each = figures.get(f"{name}_us_per_recomputed_operator")
    print(
        f"{name:22}{of('ratio'):7.2f}{times}{of('optimizer_us'):10.0f}"
        f"{of('us_per_operator'):10.1f}{of('us_per_saved_tensor'):8.1f}"
        f"{of('swapped_bytes') / 1024:9.0f}{of('recomputed'):11.0f}"
        f"{'' if each is None else format(each, '11.0f')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--gpt-layers", type=int, default=10)
    parser.add_argument("--weights-layers", type=int, default=8)
    parser.add_argument("--planner-layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps of each way in a round")
    parser.add_argument("--modes", help="comma-separated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    groups = list_groups(
        options.layers, options.gpt_layers, options.weights_layers, options.planner_layers
    )
    known = [name for group in groups for name in group.ways]
    names = known if options.modes is None else options.modes.split(",")
    if not set(names) <= set(known):
        parser.error(f"argument --modes: choose from {', '.join(known)}")
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    figures: Figures = {}
    for group in groups:
        figures |= run_group(group, names, rounds=options.rounds, steps=options.steps)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
