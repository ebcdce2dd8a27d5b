"""Two ranks, one of which fails; run by `test_rank_failures.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/rank_failures_program.py

Rank 0 prints, as one line of JSON, what became of each scenario, for each rank. Every scenario has
a process group of its own, because a failure ends it, with a timeout that no test waits for.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import swapkit
from tests.support import MIB
from tests.support.sessions import make_training

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sessions import Training

RANK = int(os.environ.get("RANK", "0"))
BUDGET = 64 * MIB
STEPS, FAILS_AT = 6, 2


def compare_parameters(model: nn.Module) -> None:
    """Wait for the other rank; as both have the same parameters, nothing changes."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.detach(), dist.ReduceOp.MAX)


def ask_for_too_much() -> None:
    torch.empty(2 * BUDGET)


class Scenario:
    """A run of both ranks; the methods are what differs."""

    on_oom = ("all", "all")

    def __init__(self, await_other: Callable[[], object]) -> None:
        self._await_other = await_other
        self.training: Training = make_training()
        self.caught = ""

    def before_step(self) -> None:
        """Run out of memory on rank 1, which goes on when rank 0 has failed."""
        if RANK == 1:
            try:
                ask_for_too_much()
            except torch.OutOfMemoryError as error:
                self.caught = str(error)
                self._await_other()

    def communicate(self) -> None:
        compare_parameters(self.training.model)

    def step(self, number: int) -> None:
        if number == FAILS_AT:
            self.before_step()
        self.training.step()
        self.communicate()

    def run(self) -> dict[str, Any]:
        """Train; return what the session raised, if anything."""
        found: dict[str, Any] = {"error": "", "cause": "", "rank": None}
        arguments = self.training.model, self.training.optimizer
        try:
            with swapkit.budget(BUDGET, *arguments, on_oom=self.on_oom[RANK]):
                for number in range(STEPS):
                    self.step(number)
        except Exception as error:  # noqa: BLE001 - whatever it is
            found["error"], found["text"] = type(error).__name__, str(error)
            found["cause"] = type(error.__cause__).__name__
            found["rank"] = getattr(error, "rank", None)
            found["budget"] = getattr(error, "budget_bytes", None)
        made = swapkit.memory_stats()["budget_bytes"]
        return {**found, "steps": self.training.steps_done, "caught": self.caught, "limit": made}


class Caught(Scenario):
    """Rank 0 waits in a collective."""


class Computing(Scenario):
    """Rank 0 trains on without a collective, one step further than rank 1."""

    def before_step(self) -> None:
        if RANK == 1:
            dist.barrier()
        super().before_step()

    def communicate(self) -> None:
        if RANK == 0 and self.training.steps_done == FAILS_AT + 1:
            dist.barrier()
        while RANK == 0 and self.training.steps_done > FAILS_AT:
            self.training.step()


class Distributed(Scenario):
    """Rank 0 waits inside the backward pass of DDP, in C++."""

    def __init__(self, await_other: Callable[[], object]) -> None:
        super().__init__(await_other)
        self.training.model = nn.parallel.DistributedDataParallel(self.training.model)

    def communicate(self) -> None:
        """DDP does."""


class Uncaught(Scenario):
    """Rank 1 does not go on."""

    def before_step(self) -> None:
        if RANK == 1:
            ask_for_too_much()


class Usual(Scenario):
    """Without the option, rank 0 waits until rank 1 comes."""

    on_oom = ("rank", "rank")

    def __init__(self, _await_other: Callable[[], object]) -> None:
        super().__init__(lambda: None)


class Unheard(Scenario):
    """Rank 0 has a session that does not listen."""

    on_oom = ("rank", "all")


class Dead(Scenario):
    """Rank 1 goes without a word."""

    def before_step(self) -> None:
        if RANK == 1:
            os._exit(0)


SCENARIOS: dict[str, type[Scenario]] = {
    "caught": Caught,
    "computing": Computing,
    "distributed": Distributed,
    "uncaught": Uncaught,
    "usual": Usual,
    "unheard": Unheard,
    "dead": Dead,  # the last one: rank 1 is gone
}


def main() -> NoReturn:
    torch.set_num_threads(1)
    swapkit.install()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: Any = dist  # torch's list of public names lacks them
    store = stores.TCPStore(host, port, is_master=False)
    found: dict[str, list[Any]] = {}
    for name, make in SCENARIOS.items():
        dist.init_process_group(
            "gloo",
            store=stores.PrefixStore(name, store),
            rank=RANK,
            world_size=2,
            timeout=datetime.timedelta(minutes=30),
        )
        others = f"found/{name}/{1 - RANK}"
        mine = make(functools.partial(store.wait, [others])).run()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        store.set(f"found/{name}/{RANK}", json.dumps(mine))
        found[name] = [mine]
        if name != "dead" and RANK == 0:
            found[name].append(json.loads(store.get(others)))
    if RANK == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
