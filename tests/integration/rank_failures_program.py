"""Two ranks, one of which fails; run by `test_rank_failures.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/rank_failures_program.py

Rank 0 prints, as one line of JSON, what became of each scenario, for each rank. Every scenario has
a process group of its own, because a failure ends it, with a timeout that no test waits for.
"""

from __future__ import annotations

import contextlib
import datetime
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
    from tests.support.sessions import Training

distributed: Any = dist  # torch's list of public names lacks some
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
    """A run of both ranks, one of which fails; the methods are what differs."""

    on_oom = ("all", "all")
    debug = distributed.DebugLevel.OFF
    fails = 1  # the rank that runs out of memory

    def __init__(self, store: Any) -> None:
        self._store = store
        self.training: Training = make_training()
        self.caught = ""

    def announce(self) -> None:
        """Say, on the rank that waits, that the step saves no more: only a collective can fail."""
        self._store.set("waits", "")

    def await_announced(self) -> None:
        self._store.wait(["waits"])

    def await_found(self) -> None:
        """Wait until the other rank has failed."""
        self._store.wait([f"found/{1 - RANK}"])

    def fail(self) -> None:
        """Run out of memory, and go on when the other rank has failed."""
        self.await_announced()
        try:
            ask_for_too_much()
        except torch.OutOfMemoryError as error:
            self.caught = str(error)
            self.await_found()

    def communicate(self) -> None:
        compare_parameters(self.training.model)

    def step(self, number: int) -> None:
        if self.fails == RANK and number == FAILS_AT:
            self.fail()
        self.training.step()
        if self.fails != RANK and number == FAILS_AT:
            self.announce()
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


class Checked(Scenario):
    """As under TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks meet in a helper group before a collective."""

    debug = distributed.DebugLevel.DETAIL


class CheckedFirst(Checked):
    """The first rank fails there, for which the other one waits in another way."""

    fails = 0


class Computing(Scenario):
    """Rank 0 trains on without a collective."""

    def communicate(self) -> None:
        while RANK == 0 and self.training.steps_done > FAILS_AT:
            self.training.step()


class Distributed(Scenario):
    """Rank 0 waits inside the backward pass of DDP, in C++."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        first, *_ = self.training.model.parameters()  # the last one to have a gradient
        self.training.model = nn.parallel.DistributedDataParallel(self.training.model)
        if RANK == 0:
            first.register_hook(self._see_gradient)

    def _see_gradient(self, _gradient: torch.Tensor) -> None:
        """Nothing that was saved is left to unpack, so only DDP's wait can fail."""
        if self.training.steps_done == FAILS_AT:
            self.announce()

    def communicate(self) -> None:
        """DDP does."""


class Uncaught(Scenario):
    """Rank 1 does not go on."""

    def fail(self) -> None:
        self.await_announced()
        ask_for_too_much()


class Usual(Scenario):
    """Without the option, rank 0 waits until rank 1 comes."""

    on_oom = ("rank", "rank")

    def await_found(self) -> None:
        """Go on at once."""


class Unheard(Scenario):
    """Rank 0 has a session that does not listen."""

    on_oom = ("rank", "all")


class Dead(Scenario):
    """Rank 1 goes without a word."""

    def fail(self) -> None:
        os._exit(0)


SCENARIOS: dict[str, type[Scenario]] = {
    "caught": Caught,
    "checked": Checked,
    "checked first": CheckedFirst,
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
    server = distributed.TCPStore(host, port, is_master=False)
    found: dict[str, list[Any]] = {}
    for name, make in SCENARIOS.items():
        distributed.set_debug_level(make.debug)
        dist.init_process_group(
            "gloo",
            store=distributed.PrefixStore(name, server),
            rank=RANK,
            world_size=2,
            timeout=datetime.timedelta(minutes=30),
        )
        own_store = distributed.PrefixStore(f"scenario/{name}", server)
        mine = make(own_store).run()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        own_store.set(f"found/{RANK}", json.dumps(mine))
        found[name] = [mine]
        if name != "dead" and RANK == 0:
            found[name].append(json.loads(own_store.get("found/1")))
    if RANK == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
