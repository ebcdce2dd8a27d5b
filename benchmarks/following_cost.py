"""Cost of following a plan for the training thread, compared with a session without a plan.

The module is a chain of `sin` on small tensors with one saved tensor per operator; forward and
backward, one compute thread, interleaved rounds. Microseconds for each saved tensor (two events)
over the plain run:

- session: inside `swapkit.budget(..., policy="rescue")`, memory far from full;
- keep: following a plan that keeps everything: the cost of each event;
- offload: `swapkit.offload()`: copied out, released, copied back (4 KiB, copies included);
- swap: following a plan that swaps everything, copies included;
- watch: following a plan that recomputes only the first operator: the cost of watching the others;
- mode: a session, and a torch dispatch mode that does nothing: the minimum cost of watching;
- recompute: following a plan that recomputes every second operator, recomputation included.

`--json FILE` writes one flat object: `session_us`, `keep_us`, ...
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import swapkit
from benchmarks._per_saved_tensor import PLAIN, Passing, measure_ways, run_command
from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit.ir.plans import Action, Decision, Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from swapkit._runtime.session.session import Session
    from swapkit.ir.traces import Trace

SAVES = 400
ELEMENTS = 1024  # 4 KiB per tensor


class Chain(torch.nn.Module):
    """A chain of operators that save one tensor each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(SAVES):
            x = x.sin()
        return x


class Bench:
    """The chain, with and without a session."""

    def __init__(self) -> None:
        self.model = Chain()
        self.x = torch.randn(ELEMENTS, requires_grad=True)
        self.gradient = torch.ones(ELEMENTS)
        self.trace: Trace | None = None

    def step(self, scope: AbstractContextManager[None] | None = None) -> float:
        begin = time.perf_counter()
        with scope or contextlib.nullcontext():
            y: torch.Tensor = self.model(self.x)
        y.backward(self.gradient)  # type: ignore[no-untyped-call]
        return time.perf_counter() - begin

    def in_session(
        self,
        decisions: Callable[[list[int]], list[Decision]] | None,
        scope: AbstractContextManager[None] | None = None,
    ) -> float:
        """Return the seconds of a session's second step; `decisions` None: without a plan."""
        with swapkit.budget("1GiB", self.model, policy="rescue") as session:
            self.step()
            if decisions is None:
                return self.step(scope)
            if self.trace is None:
                self.trace = record(session, self)
            saved = [n for n, each in enumerate(self.trace.storages) if each.is_saved]
            plan = Plan(decisions=tuple(decisions(saved)), budget_bytes=1 << 30)
            swapper = session._active.swapper  # type: ignore[union-attr] # noqa: SLF001
            following = PlanExecutor(swapper, self.model, self.trace, plan)
            following.start()
            self.step()
            following.end_step()
            seconds = self.step()
            report = following.end_step()
            following.stop()
            assert report.deviation is None, report.deviation
            return seconds


def record(session: Session, bench: Bench) -> Trace:
    active = session._active  # noqa: SLF001
    assert active is not None
    installation = active.installation
    recorder = Recorder(
        Setting(
            device=torch.device("cpu"),
            tracker=installation.tracker,
            pool=installation.device.pool,
            root=bench.model,
        )
    )
    recorder.start()
    active.hooks.packer.observer = recorder.savings
    bench.step()
    active.hooks.packer.observer = None
    recorder.stop()
    return recorder.trace()


def all_to(action: Action, part: slice) -> Callable[[list[int]], list[Decision]]:
    return lambda saved: [Decision(storage=each, action=action) for each in saved[part]]


def measure(rounds: int) -> dict[str, float]:
    bench = Bench()
    ways: dict[str, Callable[[], float]] = {
        PLAIN: bench.step,
        "session": lambda: bench.in_session(None),
        "keep": lambda: bench.in_session(lambda _: []),
        "offload": lambda: bench.step(swapkit.offload()),
        "swap": lambda: bench.in_session(all_to(Action.SWAP, slice(None))),
        "mode": lambda: bench.in_session(None, Passing()),  # type: ignore[no-untyped-call]
        "watch": lambda: bench.in_session(all_to(Action.RECOMPUTE, slice(1, 2))),
        "recompute": lambda: bench.in_session(all_to(Action.RECOMPUTE, slice(1, None, 2))),
    }
    return measure_ways(ways, rounds=rounds, saves=SAVES)


if __name__ == "__main__":
    run_command(__doc__.splitlines()[0], measure, rounds=40)
