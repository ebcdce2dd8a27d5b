"""Ranks that train with a plan that another number of ranks made; run by `test_elastic_ranks.py`.

    python -m torch.distributed.run --nproc-per-node=N elastic_ranks_program.py FOLDER

If the folder has no plan, the ranks make one and save it. All then train in a session that is given
the plan. Rank 0 prints, as one line of JSON, what became of that session, for each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import swapkit
from swapkit.testing import planning_at_once
from tests.integration.ranks_program import Messages, watch
from tests.support.ranks import publish_and_exit
from tests.support.sessions import make_training, train_plainly

if TYPE_CHECKING:
    from tests.support.sessions import Training

STEPS, SHARE = 10, 0.7


def make() -> Training:
    training = make_training()
    training.model = nn.parallel.DistributedDataParallel(training.model)
    return training


def train(limit: int, plan: Path | None, expected: list[str]) -> dict[str, Any]:
    """Train in a session; return what became of that."""
    training, messages = make(), Messages()
    swapkit.reset_peak_memory_stats()
    first = ""
    with (
        watch(messages),
        swapkit.budget(
            limit, training.model, training.optimizer, search_steps=2, plan=plan
        ) as session,
        planning_at_once(),
    ):
        for _ in range(STEPS):
            training.step()
            first = first or session.stage
        made = session.plan
        found = {
            "first": first,
            "last": session.stage,
            "planned": None if made is None else made.budget_bytes,
            "ranks": None if session.trace is None else session.trace.ranks,
            "peak": session.stats.peak_bytes,
            "limit": limit,
            "explained": " ".join(session.explain().split()),
            "refusals": [text for text in messages.texts if "is not followed" in text],
        }
        if plan is None and dist.get_rank() == 0:
            session.save_plan(Path(sys.argv[1]) / "plan.json")
    return {**found, "same": training.outcome() == expected}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install(device="cpu")
    saved = Path(sys.argv[1]) / "plan.json"
    plain = train_plainly(make, STEPS)
    limit = plain.budget(SHARE)
    is_new = not saved.exists()
    dist.barrier()
    found = {}
    if is_new:
        found["made"] = train(limit, None, plain.outcome)
        dist.barrier()
    found["given"] = train(limit, saved, plain.outcome)
    publish_and_exit(found)


if __name__ == "__main__":
    main()
