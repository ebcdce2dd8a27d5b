"""Two ranks that train, each in a session of its own; run by `test_ranks.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/ranks_program.py

Rank 0 prints, as one line of JSON, what became of each session, by the scenario, for each rank.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import swapkit
from swapkit.testing import planning_at_once
from tests.support.ranks import publish_and_exit
from tests.support.sessions import TOKENS, WIDTH, Training, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK = int(os.environ.get("RANK", "0"))
STEPS = 14
distributed: Any = dist  # torch's list of public names lacks some


@dataclass(frozen=True)
class Scenario:
    """For each rank: the share of its memory that is its budget (0: no session), and its tokens.

    `evaluator`: the rank with a session for evaluation around the one that trains; -1: none.
    `strays`: the rank that runs another code path in every third step; -1: none does.
    `joins`: for each rank, how many steps its session trains before there is a process group, at
    most; -1: the session begins in it.
    """

    shares: tuple[float, float]
    tokens: tuple[int, int] = (TOKENS, TOKENS)
    evaluator: int = -1
    strays: int = -1
    joins: tuple[int, int] = (-1, -1)


SCENARIOS = {  # in this order: the sessions of one rank alone come before those of both
    "alone": Scenario((0.6, 0.0)),
    "agreed": Scenario((0.9, 0.6)),
    "evaluated": Scenario((0.7, 0.9), evaluator=0),
    "unlike": Scenario((0.5, 0.9), tokens=(TOKENS // 2, 2 * TOKENS)),
    "another path": Scenario((0.7, 0.7), strays=1),
    "joined": Scenario((0.9, 0.6), joins=(0, 0)),
    "one joined": Scenario((0.9, 0.6), joins=(0, -1)),
    "joined after plans": Scenario((0.9, 0.6), joins=(8, 8)),
}


@dataclass
class Straying(Training):
    """A program that skips the model's middle in every third step."""

    def forward(self) -> torch.Tensor:
        if self.steps_done % 3 != 2:
            return super().forward()
        assert isinstance(self.model, torch.nn.Sequential)
        loss: torch.Tensor = self.model[0](torch.randn(self.tokens, WIDTH)).square().mean()
        return loss


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def watch(messages: Messages) -> Iterator[None]:
    """Keep what swapkit logs in the block."""
    logger = logging.getLogger("swapkit")
    logger.setLevel(logging.INFO)
    logger.addHandler(messages)
    yield
    logger.removeHandler(messages)


def make(tokens: int, *, strays: bool = False) -> Training:
    training = make_training()
    if strays:
        training = Straying(training.model, training.optimizer)
    training.tokens = tokens
    return training


def begin_group(name: str) -> None:
    """Make the default process group. Each has keys of its own in the store of the launcher."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = distributed.TCPStore(host, port, is_master=False)
    store = distributed.PrefixStore(f"group {name}", server)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)


def train(training: Training, session: Any = None, join: tuple[int, str] = (-1, "")) -> list[str]:
    """Train in step with the other rank; return the stage after each step."""
    stages = []
    for step in range(STEPS):
        if step == join[0]:
            begin_group(join[1])
        training.step()
        if dist.is_initialized():
            dist.barrier()
        stages.append("" if session is None else session.stage)
    return stages


def run(name: str) -> dict[str, Any]:
    """Train without a session, and with one; return what became of that."""
    scenario, rank = SCENARIOS[name], RANK
    joins = scenario.joins[rank]
    share, tokens = scenario.shares[rank], scenario.tokens[rank]
    make_one = functools.partial(make, tokens, strays=scenario.strays == rank)
    plain = train_plainly(make_one, STEPS)
    training = make_one()
    if not share:
        train(training)
        return {"same": training.outcome() == plain.outcome}
    messages = Messages()
    limit = plain.budget(share)
    if max(scenario.joins) >= 0:
        dist.destroy_process_group()
        if joins < 0:
            begin_group(name)
    swapkit.reset_peak_memory_stats()
    with contextlib.ExitStack() as stack:
        stack.enter_context(watch(messages))
        if rank == scenario.evaluator:
            stack.enter_context(swapkit.budget(limit, training.model))
        session = stack.enter_context(
            swapkit.budget(limit, training.model, training.optimizer, search_steps=2)
        )
        with planning_at_once():
            stages = train(training, session, (joins, name))
        plan = session.plan
        found = {
            "limit": limit,
            "stages": stages,
            "planned": None if plan is None else plan.budget_bytes,
            "peak": session.stats.peak_bytes,
            "explained": " ".join(session.explain().split()),
        }
    return {**found, "same": training.outcome() == plain.outcome, "messages": messages.texts}


def main() -> None:
    torch.set_num_threads(1)
    begin_group("")
    swapkit.install()
    found = {name: run(name) for name in sys.argv[1:] or SCENARIOS}
    publish_and_exit(found)


if __name__ == "__main__":
    main()
