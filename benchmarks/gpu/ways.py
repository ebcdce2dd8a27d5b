"""The ways to train one shape, and the limits that follow from one another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.comparison import COMPILE_SECONDS, Results, Way, with_steps
from benchmarks.gpu.configurations import LIBRARIES, Setup
from benchmarks.gpu.measure import is_cuda

if TYPE_CHECKING:
    from benchmarks.gpu.context import Context

SHARES = (20, 40, 60, 80)
COMPILED = (0.5, 0.3)
RIVALS = ("selective", "save_on_cpu", "recompute_in_save_on_cpu")
ROOMY = 2.0  # times what plain training has in use: no pressure
AS_PREDICTED = 0.02
OVERHEAD_SECONDS = 20.0  # it has many more steps than the others
NO_OVERHEAD = ("8b_32k",)  # whose steps are too long for so many
PREFETCH = 8
FIRST = ("plain", "recompute", "swapkit_at_recompute", "swapkit_40", "torchtune")
# Of a tiny model on CUDA: its limits would be ten granules of 2 MiB, which pieces of tensors share.
DRY_SPARE_BYTES = 16 << 20
STEPS = {"8b_8k": (2, 6), "8b_32k": (1, 4)}  # warm-up and timed; else as a Setup has it


class Ways:
    """Makes ways to train that differ from a base in what they name."""

    def __init__(self, base: Setup, *, spare_bytes: int = 0) -> None:
        self._base = base
        self._spare_bytes = spare_bytes  # of limits, beside what they follow from

    def setup(self, method: str, **options: Any) -> Setup:
        return dataclasses.replace(self._base, method=method, **options)

    def fixed(self, name: str, method: str = "", *, key: bool = False, **options: Any) -> Way:
        """Return a way that depends on nothing."""
        setup = self.setup(method or name, **options)
        return Way(name=name, setup=lambda _results: setup, key=key)

    def at(self, name: str, rival: str, *, key: bool = False, **options: Any) -> Way:
        """Return swapkit with the limit that a rival had in use at most."""

        def make(results: Results) -> Setup | None:
            limit = peak_of(results, rival)
            if limit is None:
                return None
            return self.setup("swapkit", limit_bytes=limit + self._spare_bytes, **options)

        return Way(name=name, setup=make, key=key)

    def share(self, name: str, percent: int, *, key: bool = False, **options: Any) -> Way:
        """Return swapkit with what is resident and a share of what is needed beyond."""

        def make(results: Results) -> Setup | None:
            limit = limit_between(results, percent / 100)
            if limit is None:
                return None
            return self.setup("swapkit", limit_bytes=limit + self._spare_bytes, **options)

        return Way(name=name, setup=make, key=key)

    def everything(self) -> Way:
        """Return the swapping of everything, within what is predicted for it."""

        def make(results: Results) -> Setup | None:
            peak = peak_of(results, "prediction")
            if peak is None:
                return None
            limit = int(peak * (1 + AS_PREDICTED)) + self._spare_bytes
            return self.setup("swapkit", limit_bytes=limit, offload=True)

        return Way(name="swap_everything", setup=make, key=True)

    def overhead(self) -> Way:
        def make(results: Results) -> Setup | None:
            total = total_bytes(results)
            if total is None:
                return None
            return self.setup("overhead", limit_bytes=int(ROOMY * total))

        seconds = OVERHEAD_SECONDS
        return Way(name="overhead", setup=make, key=True, repeats=False, extra_seconds=seconds)

    def compiled(self, share: float) -> Way:
        way = self.fixed(f"compile_{share}", "compile", share=share)
        return dataclasses.replace(way, repeats=False, extra_seconds=COMPILE_SECONDS)


def base_of(context: Context, shape: str) -> Setup:
    """Return what all ways to train a shape have in common."""
    warmup_steps, timed_steps = STEPS.get(shape, (2, 8))
    base = Setup(
        shape=shape,
        method="plain",
        device=context.device,
        warmup_steps=warmup_steps,
        timed_steps=timed_steps,
    )
    return with_steps(base, context)


def list_ways(context: Context, shape: str) -> list[Way]:
    """Return every way; those that matter most come first."""
    is_coarse = context.dry and context.device == "cuda"
    ways = Ways(base_of(context, shape), spare_bytes=DRY_SPARE_BYTES if is_coarse else 0)
    listed = [*list_key(ways, overhead=shape not in NO_OVERHEAD)]
    for rival in RIVALS:
        listed += [ways.fixed(rival), ways.at(f"swapkit_at_{rival}", rival)]
    if is_cuda(context.device):
        listed.append(ways.at("native_at_recompute", "recompute", native=True))
    listed += [ways.share(f"swapkit_{share}", share) for share in SHARES if share != 40]
    listed.append(ways.fixed("offload_prefetch", "swapkit", offload=True, prefetch=PREFETCH))
    listed += [ways.fixed(name) for name in LIBRARIES]
    for share in COMPILED:
        name = f"compile_{share}"
        listed += [ways.compiled(share), ways.at(f"swapkit_at_{name}", name)]
    return listed


def list_key(ways: Ways, *, overhead: bool) -> list[Way]:
    """Return the ways that matter most."""
    two_steps = {"digest_steps": 0, "warmup_steps": 1, "timed_steps": 1}
    prediction = ways.fixed("prediction", "reference", key=True, **two_steps)
    return [
        ways.fixed("plain", key=True),
        ways.fixed("pool", "swapkit", key=True),
        ways.fixed("recompute", key=True),
        ways.at("swapkit_at_recompute", "recompute", key=True),
        ways.share("swapkit_40", 40, key=True),
        dataclasses.replace(prediction, repeats=False),
        ways.everything(),
        *([ways.overhead()] if overhead else []),
    ]


def list_first(context: Context, shape: str) -> list[Way]:
    """Return what the first minutes of a GPU are for, in the order of its worth."""
    ways = {way.name: way for way in list_ways(context, shape)}
    return [dataclasses.replace(ways[name], key=True) for name in FIRST]


def peak_of(results: Results, name: str) -> int | None:
    """Return the most bytes that a way had in use."""
    return results.most(name, "in_use_peak_bytes")


def total_bytes(results: Results) -> int | None:
    """Return what training without a limit has in use; the CPU's own allocator does not count."""
    return peak_of(results, "plain") or peak_of(results, "pool")


def limit_between(results: Results, share: float) -> int | None:
    """Return what is resident, and a share of what is needed beyond."""
    total = total_bytes(results)
    resident = results.most("plain", "resident_bytes")
    if total is None or resident is None:
        return None
    return int(resident + share * (total - resident))
