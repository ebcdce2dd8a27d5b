"""Lifetimes of recorded steps, with and without plans, for the layout benchmark."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._planner_instances import Instance, Part, Workload, compose
from swapkit.ir.plans import Plan
from swapkit.planning.layout.lifetimes import Lifetimes, find_lifetimes
from swapkit.planning.planner import make_plan
from swapkit.simulation.timeline import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace

CACHE = Path("build/layout_traces")
LINK = 50  # GB/s
NO_PLAN, PLENTY = 0.0, 1.5  # shares of the activations' peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, and the plan for it: `share` as in `Instance`, NO_PLAN: no plan."""

    workload: Workload
    share: float = NO_PLAN
    policy: str = "auto"

    @property
    def name(self) -> str:
        if self.share == NO_PLAN:
            return self.workload.name
        return f"{self.workload.name} {self.policy} {self.share:.0%}"

    def lifetimes(self) -> Lifetimes:
        """Return the lifetimes, from an earlier run if there are any."""
        key = hashlib.sha256(repr(self).encode()).hexdigest()[:16]
        path = CACHE / f"{key}.npz"
        if not path.exists():
            made = self._record()
            CACHE.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, starts=made.starts, ends=made.ends, nbytes=made.nbytes)
        with np.load(path) as arrays:
            return Lifetimes(arrays["starts"], arrays["ends"], arrays["nbytes"])

    def _record(self) -> Lifetimes:
        trace = compose(self.workload)
        machine = self._machine(trace)
        plan = Plan(decisions=(), budget_bytes=machine.budget_bytes)
        if self.share != NO_PLAN:
            plan = make_plan(trace, machine, self.policy)
        return find_lifetimes(trace, plan, simulate(trace, plan, machine)).lifetimes

    def _machine(self, trace: Trace) -> Machine:
        share = PLENTY if self.share == NO_PLAN else self.share
        return Instance(workload=self.workload, link_gb_per_s=LINK, share=share).machine(trace)


def list_cases() -> Iterator[Case]:
    """Yield the cases, of 0.8k to 82k items."""
    yield from _dense()
    yield from _pipelines()
    yield from _irregular()
    yield from _large()


def list_quick_cases() -> Iterator[Case]:
    """Yield a few small cases."""
    tiny = Part(shape="tiny", layers=4, tokens=1024)
    inner = Part(shape="tiny", layers=2, tokens=1024, is_first=False, is_last=False)
    yield from _of(Workload(name="tiny", part=tiny), (NO_PLAN, 0.6))
    yield from _of(
        Workload(name="tiny 1F1B P4 s1", part=inner, schedule="1f1b", stages=4, stage=1,
                 microbatches=8), (NO_PLAN, 0.6),
    )  # fmt: skip


def _of(
    workload: Workload, shares: tuple[float, ...], *, recompute: tuple[float, ...] = ()
) -> Iterator[Case]:
    for share in shares:
        yield Case(workload=workload, share=share)
    for share in recompute:
        yield Case(workload=workload, share=share, policy="recompute")


def _dense() -> Iterator[Case]:
    yield from _of(
        Workload(name="7B 12 layers 4k", part=Part(shape="7b", layers=12, tokens=4096)), (0.6,)
    )
    yield from _of(
        Workload(name="7B 4k b2", part=Part(shape="7b", layers=32, tokens=4096, batch=2)),
        (NO_PLAN, 0.6, 0.4), recompute=(0.5,),
    )  # fmt: skip
    yield from _of(
        Workload(name="7B GQA 32k", part=Part(shape="7b-gqa", layers=32, tokens=32768)),
        (0.5,), recompute=(0.5,),
    )  # fmt: skip
    yield from _of(
        Workload(name="13B 8k A100", part=Part(shape="13b", layers=40, tokens=8192,
                                               hardware="A100")), (NO_PLAN, 0.6, 0.4),
    )  # fmt: skip
    yield from _of(
        Workload(name="70B 80 layers 4k", part=Part(shape="70b", layers=80, tokens=4096)),
        (NO_PLAN, 0.5),
    )


def _pipelines() -> Iterator[Case]:
    first = Part(shape="70b", layers=4, tokens=8192, is_last=False)
    wide = Part(shape="70b", layers=10, tokens=8192, is_last=False)
    half = Part(shape="70b", layers=2, tokens=8192, is_first=False, is_last=False)
    yield from _of(
        Workload(name="70B 1F1B P4 s0", part=first, schedule="1f1b", stages=4, microbatches=8),
        (NO_PLAN, 0.5, 0.25), recompute=(0.5,),
    )  # fmt: skip
    yield from _of(
        Workload(name="70B 1F1B P8 s0", part=wide, schedule="1f1b", stages=8, microbatches=16),
        (NO_PLAN, 0.6),
    )
    yield from _of(
        Workload(name="70B interleaved P4 V2", part=half, schedule="interleaved", stages=4,
                 microbatches=8, chunks=2), (0.5,),
    )  # fmt: skip


def _irregular() -> Iterator[Case]:
    experts = Part(shape="moe", layers=4, tokens=8192, is_first=False, is_last=False)
    stage = Part(shape="7b-gqa", layers=4, tokens=16384, is_first=False, is_last=False)
    whole = Part(shape="7b-gqa", layers=16, tokens=8192)
    yield from _of(
        Workload(name="MoE 8k", part=Part(shape="moe", layers=8, tokens=8192)), (NO_PLAN, 0.5)
    )
    yield from _of(
        Workload(name="MoE 1F1B P4 s0", part=experts, schedule="1f1b", stages=4, microbatches=8),
        (NO_PLAN, 0.5),
    )
    lengths = (16384, 3072, 9216, 6144, 12288, 16384, 4096, 8192)
    yield from _of(
        Workload(name="7B lengths 1F1B P4 s0", part=stage, schedule="1f1b", stages=4,
                 microbatches=8, lengths=lengths), (NO_PLAN, 0.5),
    )  # fmt: skip
    yield from _of(
        Workload(name="7B lengths x8", part=whole, microbatches=8,
                 lengths=tuple(each // 2 for each in lengths)), (NO_PLAN, 0.5),
    )  # fmt: skip


def _large() -> Iterator[Case]:
    stage = Part(shape="13b", layers=10, tokens=4096, is_first=False, is_last=False)
    experts = Part(shape="moe", layers=5, tokens=8192, is_first=False, is_last=False)
    lengths = tuple(1024 + 256 * (each * 7 % 13) for each in range(64))
    yield from _of(Workload(name="13B x32", part=stage, microbatches=32), (NO_PLAN, 0.6))
    yield from _of(
        Workload(name="13B lengths 1F1B M64", part=stage, schedule="1f1b", stages=8,
                 microbatches=64, lengths=lengths), (NO_PLAN,),
    )  # fmt: skip
    yield from _of(
        Workload(name="MoE 1F1B P8 M48", part=experts, schedule="1f1b", stages=8,
                 microbatches=48), (NO_PLAN,),
    )  # fmt: skip
    yield from _of(
        Workload(name="70B 1F1B P8 M64", part=Part(shape="70b", layers=18, tokens=8192,
                 is_first=False, is_last=False), schedule="1f1b", stages=8, microbatches=64),
        (NO_PLAN,),
    )  # fmt: skip
