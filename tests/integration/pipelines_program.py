"""Two ranks that train stages of a pipeline by torch's schedules; run by `test_pipelines.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/pipelines_program.py

Rank 0 prints, as one line of JSON, what became of each session, by the scenario, for each rank.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import swapkit
from swapkit.testing import planning_at_once
from tests.support.ranks import publish_and_exit
from tests.support.sessions import Plain, digest, in_use_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.traces import Trace

WIDTH = 32
TOKENS = 128  # of a microbatch
MICROBATCHES = 6
STEPS = 10
SEARCH_STEPS = 2


@dataclass(frozen=True)
class Scenario:
    """A schedule, the layers of each stage, the stages of each rank, and what the session gets.

    `model`: a list of the rank's stages, the only "stage", or "none".
    """

    schedule: str
    model: str
    layers: tuple[int, ...] = (2, 2, 2, 2)
    stages: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))

    @property
    def is_mirrored(self) -> bool:
        """Whether a rank has two stages in a row."""
        return self.stages == MIRRORED


SINGLE, MIRRORED = ((0,), (1,)), ((0, 3), (1, 2))
SHARE = 0.85
SCENARIOS = {
    "GPipe": Scenario("GPipe", "none", (4, 4), SINGLE),
    "1F1B": Scenario("1F1B", "stage", (4, 4), SINGLE),
    "1F1B, uneven": Scenario("1F1B", "none", (2, 6), SINGLE),
    "LoopedBFS": Scenario("LoopedBFS", "list"),
    "Interleaved1F1B": Scenario("Interleaved1F1B", "list"),
    "InterleavedZeroBubble": Scenario("InterleavedZeroBubble", "none"),
    "ZBVZeroBubble": Scenario("ZBVZeroBubble", "list", stages=MIRRORED),
    "DualPipeV": Scenario("DualPipeV", "list", stages=MIRRORED),
}


class Layer(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.down(nn.functional.gelu(self.up(x))))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Pipeline:
    """The stages of this rank, and what came of each step."""

    def __init__(self, scenario: Scenario) -> None:
        rank, count = dist.get_rank(), len(scenario.layers)
        own = scenario.stages[rank]
        torch.manual_seed(rank)
        self.parts = nn.ModuleList(
            nn.Sequential(*[Layer() for _ in range(scenario.layers[index])]) for index in own
        )
        self.optimizer = torch.optim.AdamW(self.parts.parameters(), lr=1e-3)
        stages = [
            pipelining.PipelineStage(part, index, count, torch.device("cpu"))
            for part, index in zip(self.parts, own, strict=True)
        ]
        kind: Any = getattr(pipelining, f"Schedule{scenario.schedule}")
        self.schedule = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, mean_square)
        self.has_first, self.has_last = 0 in own, count - 1 in own
        self.output: torch.Tensor | None = None
        self.steps_done = 0
        self.results: list[str] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Train one step. Gradients, the output and the batch last until the next step begins."""
        began = time.perf_counter()
        torch.manual_seed(self.steps_done)
        self.optimizer.zero_grad()
        self.batch = torch.randn(MICROBATCHES * TOKENS, WIDTH)
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {"target": -self.batch, "losses": losses} if self.has_last else {}
        self.output = self.schedule.step(*([self.batch] if self.has_first else []), **given)
        self.results += [float(each.detach()).hex() for each in losses]
        self.optimizer.step()
        self.steps_done += 1
        self.seconds.append(time.perf_counter() - began)

    def outcome(self) -> list[str]:
        """Return losses, gradients, parameters and optimizer states."""
        tensors = [*self.parts.state_dict().values()]
        tensors += [each.grad for each in self.parts.parameters() if each.grad is not None]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += state.values()
        return [*self.results, digest(tensors)]


def train(pipeline: Pipeline, steps: int, after: Callable[[], object] = lambda: None) -> None:
    for _ in range(steps):
        pipeline.step()
        after()
        dist.barrier()


def train_plainly(scenario: Scenario) -> tuple[Plain, int, float]:
    """Return how training went, its peak after the first step, and the least time of a step."""
    pipeline = Pipeline(scenario)
    train(pipeline, 2)
    swapkit.reset_peak_memory_stats()
    train(pipeline, STEPS - 2)
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    outcome = pipeline.outcome()
    pipeline.optimizer.zero_grad()
    pipeline.output = pipeline.batch = None  # type: ignore[assignment]
    return Plain(outcome, peak_bytes, in_use_bytes()), peak_bytes, min(pipeline.seconds)


def place_of(trace: Trace | None) -> dict[str, Any]:
    place = None if trace is None else trace.place
    if place is None:
        return {"stages": None, "of": 0, "ranks": None}
    return {"stages": place.stages, "of": place.count, "ranks": place.ranks}


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(scenario: Scenario) -> dict[str, Any]:
    """Train without a session, and with one; return what became of that."""
    gc.collect()  # torch's stages are in cycles: those of the scenario before would count
    plain, peak_bytes, seconds = train_plainly(scenario)
    pipeline = Pipeline(scenario)
    model = {"none": None, "stage": pipeline.parts[0], "list": pipeline.parts}[scenario.model]
    limit = plain.budget(SHARE)
    rescues: list[int] = []
    swapkit.reset_peak_memory_stats()
    with swapkit.budget(limit, model, pipeline.optimizer, search_steps=SEARCH_STEPS) as session:
        with planning_at_once():
            train(pipeline, STEPS, lambda: rescues.append(session.stats.oom_rescues))
        plan, trace, stats = session.plan, session.trace, session.stats
        found = {
            "limit": limit,
            "peak": stats.peak_bytes,
            "plain peak": peak_bytes,
            "plain seconds": seconds,
            "traced peak": None if trace is None else trace.peak_bytes,
            **place_of(trace),
            "traced base": None if trace is None else trace.base_bytes,
            "traced seconds": None if trace is None else trace.step_seconds,
            "wall seconds": pipeline.seconds,
            "step seconds": stats.step_seconds,
            "planned": None if plan is None else plan.budget_bytes,
            "moved": 0 if plan is None else len(plan.decisions),
            "stage": session.stage,
            "rescues": [late - early for early, late in itertools.pairwise([0, *rescues])],
            "explained": " ".join(session.explain().split()),
        }
    return {**found, "same": pipeline.outcome() == plain.outcome}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install()
    messages = Messages()
    logger = logging.getLogger("swapkit")
    logger.setLevel(logging.INFO)
    logger.addHandler(messages)
    found = {}
    for name in sys.argv[1:] or SCENARIOS:
        messages.texts = []
        found[name] = {**run(SCENARIOS[name]), "messages": messages.texts}
    publish_and_exit(found)


if __name__ == "__main__":
    main()
