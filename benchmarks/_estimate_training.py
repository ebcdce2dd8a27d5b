"""The estimate of a program, or its training within a budget, in a process of its own.

`_estimate_training.py estimate PROGRAM BUDGET` prints the estimate's values as one line of JSON.
`_estimate_training.py train PROGRAM BATCH BUDGET STEPS` prints whether all steps fit the budget (in
bytes), and the stage of the session at the end. Plans are made between steps, so that each run
follows plans for the same steps.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import swapkit
from benchmarks._estimate_programs import PROGRAMS, Program
from swapkit.errors import OverBudget
from swapkit.testing import planning_at_once

Facts = dict[str, object]


def estimate(program: Program, budget: str) -> Facts:
    begin = time.perf_counter()
    found = swapkit.estimate(
        program.step,
        program.model,
        program.optimizer,
        budget=budget,
        batch_sizes=(program.batch // 2, program.batch),
    )
    seconds = time.perf_counter() - begin
    return {**found.to_dict(), "seconds": seconds, "table": str(found)}


def train(program: Program, batch: int, budget_bytes: int, steps: int) -> Facts:
    facts: Facts = {"fits": False}
    try:
        with (
            planning_at_once(),
            swapkit.budget(budget_bytes, program.model, program.optimizer) as session,
        ):
            for _ in range(steps):
                program.step(batch)
    except (torch.OutOfMemoryError, OverBudget) as error:
        return facts | {"error": str(error)}
    return facts | {"fits": True, "stage": session.stage, "peak_bytes": session.stats.peak_bytes}


def main() -> None:
    command, name, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    program = PROGRAMS[name]()
    facts = estimate(program, *rest) if command == "estimate" else train(program, *map(int, rest))
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
