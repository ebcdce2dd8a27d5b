"""What recomputed regions keep: nothing that they need not, and on the host what was asked for."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute.regions import run_region
from swapkit.registry import Recompute
from tests.support import MIB, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

SIDE = 512
NBYTES = SIDE * SIDE * 4  # 1 MiB


@pytest.fixture(autouse=True)
def installation() -> Iterator[Installation]:
    with installed() as installation:
        yield installation


def in_use_bytes() -> int:
    """Return the bytes in use, with all copies done and nothing left to the collector."""
    swapper = get_runtime().current_swapper()
    swapper.scheduler.drain()
    swapper.end_scope()
    return swapkit.memory_stats()["allocated_bytes.all.current"]


def activation(factor: float = 0.01) -> torch.Tensor:
    return torch.rand(SIDE, SIDE, requires_grad=True) * factor


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    name: str
    value: Any


def total(value: torch.Tensor, *_others: Any, **_named: Any) -> torch.Tensor:
    return value.tanh().sum()


WAYS = {
    "by keyword": lambda t: ((), {"value": t}, total),
    "in a list": lambda t: (([t, 1],), {}, lambda items: total(items[0])),
    "in a dict of tuples": lambda t: ((), {"x": {"a": (t,)}}, lambda x: total(x["a"][0])),
    "in a named tuple": lambda t: ((Pair(1, t),), {}, lambda pair: total(pair.second)),
    "in a dataclass": lambda t: ((Record("x", [t]),), {}, lambda record: total(record.value[0])),
    "bound by name": lambda t: ((), {}, functools.partial(total, value=t)),
    "bound by position, twice": lambda t: (
        (),
        {},
        functools.partial(functools.partial(total, t), None),
    ),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_input_when_handed_in_any_way_inside_offload_then_swapped_and_its_memory_freed(
    make: Any,
) -> None:
    leaf = torch.rand(SIDE, SIDE, requires_grad=True)
    before_bytes = in_use_bytes()
    tensor = leaf * 0.5
    args, kwargs, function = make(tensor)
    with swapkit.offload():
        loss = run_region(Recompute(), function, args, kwargs)
    held = weakref.ref(tensor)
    del tensor, args, kwargs, function
    assert held() is None
    assert in_use_bytes() - before_bytes < NBYTES // 2
    (grad,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(grad, torch.autograd.grad(total(leaf * 0.5), leaf)[0])


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "terms",
    [
        Recompute(),
        Recompute(save=("tanh",), check_values=True),
        Recompute(offload=("tanh",)),
    ],
    ids=str,
)
def test_graph_when_dropped_or_run_then_everything_of_its_regions_is_freed(
    terms: Recompute,
) -> None:
    leaf = torch.rand(SIDE, SIDE, requires_grad=True)
    run_region(terms, total, (activation(),), {}).backward()  # what the first one sets up
    before_bytes = in_use_bytes()
    host_bytes = get_runtime().current_swapper().scheduler.stats().host_bytes
    for runs in (False, True):
        loss = run_region(terms, total, (), {"value": leaf * 1})
        if runs:
            torch.autograd.grad(loss, leaf)
        del loss
        assert in_use_bytes() == before_bytes
    assert get_runtime().current_swapper().scheduler.stats().host_bytes == host_bytes


def test_kept_result_when_its_graph_is_retained_then_there_until_one_that_is_not() -> None:
    def region(value: torch.Tensor) -> torch.Tensor:
        return (value @ value).tanh().exp().sum()

    leaf = torch.rand(SIDE, SIDE, requires_grad=True)
    loss = run_region(Recompute(save=("mm",)), region, (leaf * 0.01,), {})
    counts = []
    for retain in (True, True, False):
        with Counted() as operators:
            torch.autograd.grad(loss, leaf, retain_graph=retain)
        counts.append(operators["aten.mm.default"])
    assert counts == [2, 2, 2]  # those of mm's own backward; it never ran again
    grads = {}
    one, other = run_region(
        Recompute(save=("mm",)), lambda v: ((v @ v).exp().sum(), v.exp().sum()), (leaf * 0.01,), {}
    )
    for name, part in {"other": other, "one": one}.items():
        with Counted() as operators:
            grads[name] = torch.autograd.grad(part, leaf, retain_graph=name == "other")
        assert operators["aten.mm.default"] == (2 if name == "one" else 0)


def test_kept_result_when_used_and_not_needed_again_then_let_go_of_in_backward() -> None:
    measured: list[int] = []

    def region(value: torch.Tensor) -> torch.Tensor:
        hidden = value @ value
        if hidden.requires_grad:
            hidden.register_hook(lambda _: measured.append(in_use_bytes()))
        return hidden.tanh().sum()

    leaf = torch.rand(SIDE, SIDE, requires_grad=True)
    loss = run_region(Recompute(save=("mm",)), region, (leaf * 0.01,), {})
    for retain in (True, False):
        torch.autograd.grad(loss, leaf, retain_graph=retain)
    assert measured[0] - measured[1] >= NBYTES


# ---- selective, with offload ---------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        super().__enter__()
        return self.counts

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


def offload_products(_context: object, operator: Any, *_args: Any, **_kwargs: Any) -> Any:
    if operator is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


def layers(value: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        value = (value @ weight).tanh()
    return value.exp().sum()


@pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="torch has no such policy yet"
)
def test_products_when_they_must_be_offloaded_then_ours_go_to_the_host_and_torchs_run_again() -> (
    None
):
    count = 3
    weights = [torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(count)]

    def measure(call: Any) -> tuple[int, int, int, tuple[torch.Tensor, ...]]:
        scheduler = get_runtime().current_swapper().scheduler
        moved_bytes = scheduler.stats().copied_out_bytes
        before_bytes = in_use_bytes()
        loss = call()
        held_bytes = in_use_bytes() - before_bytes
        with Counted() as operators:
            grads = torch.autograd.grad(loss, weights)
        again = operators["aten.mm.default"] - (2 * count - 1)  # those of backward itself
        return again, scheduler.stats().copied_out_bytes - moved_bytes, held_bytes, grads

    value = torch.rand(SIDE, SIDE)
    plain = measure(lambda: layers(value, weights))
    torchs = measure(
        lambda: checkpoint(
            layers,
            value,
            weights,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, offload_products),
        )
    )
    by_policy = measure(
        lambda: run_region(Recompute(policy=offload_products), layers, (value, weights), {})
    )
    by_name = measure(lambda: run_region(Recompute(offload=("mm",)), layers, (value, weights), {}))
    assert plain[:2] == (0, 0)
    assert torchs[:2] == (count, 0)  # silently recomputed, nothing on the host
    for ours in (by_policy, by_name):
        assert ours[:2] == (0, count * NBYTES)
        assert ours[2] < MIB // 2  # and nothing on the device
    for other in (torchs, by_policy, by_name):
        assert all(map(torch.equal, plain[3], other[3]))


def test_saved_results_when_a_budget_needs_their_memory_then_they_move() -> None:
    value = torch.rand(SIDE, SIDE)
    weights = [torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(layers(value, weights), weights)
    with swapkit.budget("512MiB") as session:
        loss = run_region(Recompute(save=("mm",)), layers, (value, weights), {})
        assert session.rescue(1 << 40) >= 3 * NBYTES
        assert all(map(torch.equal, expected, torch.autograd.grad(loss, weights)))
    assert session.stats.recomputed_regions == 1


def test_saved_results_when_kept_by_a_scope_then_no_rescue_takes_them() -> None:
    value = torch.rand(SIDE, SIDE)
    weights = [torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(3)]
    with swapkit.budget("512MiB") as session, swapkit.keep():
        loss = run_region(Recompute(save=("mm",)), layers, (value, weights), {})
        assert session.rescue(1 << 40) < NBYTES
    loss.backward()
