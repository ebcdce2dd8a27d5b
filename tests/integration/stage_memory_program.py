"""Four ranks that train a pipeline whose first stage is slow; run by `test_stage_memory.py`.

    python -m torch.distributed.run --nproc-per-node=4 tests/integration/stage_memory_program.py

Rank 0 has 60 per cent of the memory that it takes, the other ranks have plenty. Rank 0 prints, as
one line of JSON, what became of each session, by the schedule, for each rank. With two pipelines,
ranks 0 and 1 are one, 2 and 3 the other.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import swapkit
from swapkit.testing import planning_at_once
from tests.support.ranks import publish_and_exit
from tests.support.sessions import Plain, digest, in_use_bytes

WIDTH, LAYERS, TOKENS = 32, 3, 128  # of a microbatch
MICROBATCHES = 4
STEPS = 40
SEARCH_STEPS = 2
SHARE, PLENTY = 0.6, 3.0  # of the memory of plain training
SAVED = 0.9  # times the peak of the own plan: a stage that waits takes less
# Trainings, at most: where other programs slow a stage down, its plan for less memory looks slower.
TRIES = 3
# Of the slow layer. Other ranks need little time beside it, and a sleeping rank takes none of it.
SLEEP_SECONDS = 0.08
_sleeps = threading.Event()  # only in sessions


@torch.library.custom_op("swapkit_tests::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    """Return a copy, later."""
    if _sleeps.is_set():
        time.sleep(SLEEP_SECONDS)
    return x.clone()


@slow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


slow.register_autograd(lambda _, grad: grad)


class Layer(nn.Module):
    """A feed-forward layer; a slow one takes its time."""

    def __init__(self, *, is_slow: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)
        self.is_slow = is_slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_slow:
            x = slow(x)
        return torch.add(x, self.down(nn.functional.gelu(self.up(x))))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@dataclass(frozen=True)
class Scenario:
    """The pipelines of a world, and the rank whose stage is slow."""

    ranks: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    slow: int = 0

    def waits(self, rank: int) -> bool:
        """Return whether a rank's stage waits for the slow one."""
        return rank != self.slow and any({rank, self.slow} <= {*ranks} for ranks in self.ranks)


SCENARIOS = {
    "one": Scenario(),
    "two": Scenario(((0, 1), (2, 3))),
}


class Pipeline:
    """The stage of this rank, and the results of its steps."""

    def __init__(self, scenario: Scenario) -> None:
        rank = dist.get_rank()
        groups = [dist.new_group(list(ranks)) for ranks in scenario.ranks]
        number = next(at for at, ranks in enumerate(scenario.ranks) if rank in ranks)
        index, count = scenario.ranks[number].index(rank), len(scenario.ranks[number])
        torch.manual_seed(rank)
        is_slow = rank == scenario.slow
        self.part = nn.Sequential(*[Layer(is_slow=is_slow and at == 0) for at in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=1e-3)
        stage = pipelining.PipelineStage(
            self.part, index, count, torch.device("cpu"), group=groups[number]
        )
        self.schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, mean_square)
        self.is_first, self.is_last = index == 0, index == count - 1
        self.results: list[str] = []
        self.steps_done = 0

    def step(self) -> None:
        """Train one step."""
        torch.manual_seed(self.steps_done)
        batch = torch.randn(MICROBATCHES * TOKENS, WIDTH)
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {"target": -batch, "losses": losses} if self.is_last else {}
        self.schedule.step(*([batch] if self.is_first else []), **given)
        self.results += [float(each.detach()).hex() for each in losses]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1

    def outcome(self) -> list[str]:
        """Return losses, parameters and optimizer states."""
        tensors = [*self.part.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += state.values()
        return [*self.results, digest(tensors)]


def train_plainly(scenario: Scenario) -> Plain:
    pipeline = Pipeline(scenario)
    for _ in range(2):
        pipeline.step()
    swapkit.reset_peak_memory_stats()
    for _ in range(STEPS - 2):
        pipeline.step()
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    return Plain(pipeline.outcome(), peak_bytes, in_use_bytes())


def run(scenario: Scenario) -> dict[str, Any]:
    """Train without a session, and with one; return the result of the session."""
    gc.collect()  # torch's stages are in cycles: those of the scenario before would count
    plain = train_plainly(scenario)
    for _ in range(TRIES):
        gc.collect()
        found = train_within(scenario, plain)
        own, *_, last = found["planned"]
        done = torch.tensor(int(last <= SAVED * own or not scenario.waits(dist.get_rank())))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done:
            break
    return found


def train_within(scenario: Scenario, plain: Plain) -> dict[str, Any]:
    """Train with a session; return what became of it."""
    pipeline = Pipeline(scenario)
    limit = plain.budget(SHARE if dist.get_rank() == 0 else PLENTY)
    planned: list[int] = []
    _sleeps.set()
    with swapkit.budget(
        limit, pipeline.part, pipeline.optimizer, search_steps=SEARCH_STEPS
    ) as session:
        with planning_at_once():
            for _ in range(STEPS):
                pipeline.step()
                if session.plan is not None and session.plan.prediction is not None:
                    planned.append(session.plan.prediction.peak_bytes)
        _sleeps.clear()
        explained = session.explain().splitlines()
        place = None if session.trace is None else session.trace.place
        return {
            "ranks": None if place is None else place.ranks,
            "same": pipeline.outcome() == plain.outcome,
            "limit": limit,
            "peak": session.stats.peak_bytes,
            "planned": planned,
            "stage": session.stage,
            "rescues": session.stats.oom_rescues,
            "explained": [line for line in explained if line.startswith("stage ")],
        }


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("swapkit").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    swapkit.install()
    found = {name: run(SCENARIOS[name]) for name in sys.argv[1:] or SCENARIOS}
    publish_and_exit(found)


if __name__ == "__main__":
    main()
