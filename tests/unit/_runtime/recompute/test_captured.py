"""Regions by capture: the function runs once; bits and memory are those of torch's checkpoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute import captured
from swapkit._runtime.recompute.captured import UNSEEN, why_twice
from swapkit._runtime.recompute.region_findings import RegionFinding, RegionWay
from swapkit._runtime.recompute.regions import run_region
from swapkit.registry import Recompute
from tests.programs import assert_same_bits
from tests.support import MIB, installed
from tests.support.threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

SIDE = 512
NBYTES = SIDE * SIDE * 4  # 1 MiB
FULL = Recompute()
RUNS = 3  # the first one is looked at, those after it are as was found


pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.fixture(autouse=True)
def installation() -> Iterator[Installation]:
    with installed() as installation:
        yield installation


def leaf() -> torch.Tensor:
    return (torch.arange(SIDE * SIDE) % 97).div(97).view(SIDE, SIDE).requires_grad_()


def by_torch(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def by_us(function: Any, *args: Any, terms: Recompute = FULL) -> Any:
    return run_region(terms, function, args, {})


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def in_use_bytes() -> int:
    return swapkit.memory_stats()["allocated_bytes.all.current"]


def gradient(call: Any, function: Any) -> torch.Tensor:
    torch.manual_seed(0)
    x = leaf()
    (grad,) = torch.autograd.grad(call(function, x * 0.5).sum(), x)
    return grad


def count_regions() -> int:
    return get_runtime().current_swapper().counters().recomputed


def chain(value: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        value = (value * 0.5).tanh().exp()
    return value


# ---- once ----------------------------------------------------------------------------------------


def test_function_when_it_is_a_region_then_it_runs_once_and_bits_are_plain() -> None:
    calls: list[int] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return chain(value)

    expected = gradient(plainly, chain)
    before = count_regions()
    for _ in range(RUNS):
        assert_same_bits([gradient(by_us, function)], [expected])
    assert len(calls) == RUNS
    assert count_regions() == before + RUNS


def test_batch_norm_when_in_a_region_then_it_counts_its_batch_once() -> None:
    def statistics(call: Any) -> list[torch.Tensor]:
        norm = torch.nn.BatchNorm1d(SIDE)
        for _ in range(RUNS):
            gradient(call, lambda value: norm(value).tanh())
        return list(norm.buffers())

    assert_same_bits(statistics(by_us), statistics(plainly))


# ---- memory --------------------------------------------------------------------------------------


def memory_of(call: Any, function: Any) -> list[tuple[int, int]]:
    """Return what each run keeps for backward, and takes at most."""
    found = []
    for _ in range(RUNS):
        x = leaf()
        before = in_use_bytes()
        swapkit.reset_peak_memory_stats()
        loss = call(function, x * 0.5).sum()
        kept = in_use_bytes() - before
        (grad,) = torch.autograd.grad(loss, x)
        peak = swapkit.memory_stats()["allocated_bytes.all.peak"] - before
        del loss, grad
        found.append((kept, peak))
    return found


def nest(call: Any) -> Any:
    def outer(value: torch.Tensor) -> Any:
        for _ in range(3):
            value = call(chain, value)
        return value

    return outer


# On the way to what an inner region is handed, what the others save is there for a moment.
@pytest.mark.parametrize(
    ("make", "more"), [(lambda _: chain, 0), (nest, NBYTES)], ids=["one", "nested"]
)
def test_memory_when_a_region_is_captured_then_no_more_than_torchs(
    make: Callable[[Any], Any], more: int
) -> None:
    plain = memory_of(plainly, make(plainly))
    torchs, ours = memory_of(by_torch, make(by_torch)), memory_of(by_us, make(by_us))
    spare = MIB // 8  # what checksums take, and random states
    for own, other in zip(ours, torchs, strict=True):
        assert own[0] <= other[0] + spare
        assert own[1] <= other[1] + more + spare
    assert plain[0][0] >= ours[0][0] + 2 * NBYTES


def test_memory_when_a_pass_retains_its_graph_then_given_up_at_its_end() -> None:
    x = leaf()
    loss = by_us(chain, x * 0.5).sum()
    before = in_use_bytes()
    grads = [torch.autograd.grad(loss, x, retain_graph=retain)[0] for retain in (True, True, False)]
    first = torch.autograd.grad(by_us(chain, x * 0.5).sum(), x)[0]
    assert_same_bits(grads, [first] * 3)
    loss = by_us(chain, x * 0.5).sum()
    held = in_use_bytes()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert in_use_bytes() == held
    assert before >= NBYTES


def test_input_when_inside_offload_then_swapped_and_the_rest_computed_again() -> None:
    x = leaf()
    expected = gradient(plainly, chain)
    for _ in range(RUNS):
        before = in_use_bytes()
        with swapkit.offload():
            loss = by_us(chain, x * 0.5).sum()
        get_runtime().current_swapper().scheduler.drain()
        get_runtime().current_swapper().end_scope()
        assert in_use_bytes() - before < NBYTES // 2
        assert_same_bits([torch.autograd.grad(loss, x)[0]], [expected])


def test_scope_when_inside_a_region_then_still_computed_again() -> None:
    def scoped(value: torch.Tensor) -> torch.Tensor:
        with swapkit.offload():
            return chain(value)

    moved = get_runtime().current_swapper().scheduler.stats().copied_out_bytes
    assert_same_bits([gradient(by_us, scoped)], [gradient(plainly, chain)])
    assert get_runtime().current_swapper().scheduler.stats().copied_out_bytes == moved


def test_gradients_when_taken_inside_and_kept_to_go_back_through_then_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        value = value[:16]
        for _ in range(4):  # what is made next lies where what is computed again lay
            inner = (value.exp() * value.tanh()).sum()
            (grad,) = torch.autograd.grad(inner, value, create_graph=True)
            value = (grad * value).sin()
        return value

    always = RegionFinding(RegionWay.CAPTURED, is_settled=True)  # whatever is kept
    monkeypatch.setattr(captured._known, "find", lambda _: always)
    expected = gradient(plainly, function)
    for _ in range(RUNS):
        assert_same_bits([gradient(by_us, function)], [expected])


# ---- changes in place ----------------------------------------------------------------------------


def changes_input_later(call: Any) -> list[torch.Tensor]:
    x = leaf()
    value = x * 0.5
    out = call(lambda value: value.exp().sin().exp(), value)
    value.add_(1)
    return list(torch.autograd.grad(out.sum(), x))


def changes_output_later(call: Any) -> list[torch.Tensor]:
    x = leaf()
    out = call(lambda value: value.exp() * 2, x * 0.5)
    out.mul_(3)
    return list(torch.autograd.grad(out.sum(), x))


def changes_inside(call: Any) -> list[torch.Tensor]:
    def function(value: torch.Tensor) -> torch.Tensor:
        hidden = value * 2
        once = hidden + value
        hidden.add_(value)
        return (once.cos() * hidden.sin()).sigmoid()

    x = leaf()
    return list(torch.autograd.grad(call(function, x * 0.5).sum(), x))


def changes_saved_result_without_counting(call: Any) -> list[torch.Tensor]:
    def function(value: torch.Tensor) -> torch.Tensor:
        hidden = value.exp()
        hidden.data.mul_(3)
        return hidden.sin()

    x = leaf()
    return list(torch.autograd.grad(call(function, x * 0.5).sum(), x))


CHANGES = [
    changes_input_later,
    changes_output_later,
    changes_inside,
    changes_saved_result_without_counting,
]


@pytest.mark.parametrize("program", CHANGES, ids=lambda program: program.__name__)
def test_change_in_place_when_plain_autograd_would_not_mind_then_same_bits(program: Any) -> None:
    for _ in range(RUNS):
        assert_same_bits(program(by_us), program(plainly))


def test_saved_result_when_changed_inside_then_refused_as_in_plain_autograd() -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        hidden = value[:16].tanh()  # few bytes: what is kept for them is no reason to run twice
        out = hidden * 2
        hidden.add_(1)
        return out

    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(by_us, function)


# ---- what cannot be captured ---------------------------------------------------------------------


class Unseen(torch.nn.Module):
    """Writes to what an operator made, where torch does not see it."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = value * 2
        hidden.detach().numpy()[:] += 1
        return hidden.exp().sin()


def test_region_when_a_kernel_writes_unseen_then_right_bits_and_it_runs_twice_from_then_on() -> (
    None
):
    model = torch.nn.Sequential(swapkit.checkpoint(Unseen()))
    expected = gradient(plainly, Unseen())
    assert swapkit.choices(model)[0].twice == ""
    with pytest.warns(match="Unseen runs a second time in backward.*swapkit.keep"):
        assert_same_bits([gradient(plainly, model)], [expected])
    for _ in range(RUNS):
        assert_same_bits([gradient(plainly, model)], [expected])
    assert swapkit.choices(model)[0].twice == UNSEEN
    assert f"yes, by running twice: {UNSEEN}" in str(swapkit.choices(model))


class Options:
    """An object whose method does what it was told to."""

    def __init__(self, *, writes: bool) -> None:
        self.writes = writes

    def run(self, value: torch.Tensor) -> torch.Tensor:
        hidden = value * 2
        if self.writes:
            hidden.detach().numpy()[:] += 1
        return hidden.exp().sin()


def test_methods_when_of_objects_with_other_options_then_each_is_looked_at() -> None:
    for writes in (False, True):
        options = Options(writes=writes)
        expected = gradient(plainly, options.run)
        for _ in range(RUNS):
            assert_same_bits([gradient(by_us, options.run)], [expected])


def test_method_when_told_to_write_in_a_later_run_then_looked_at_once_more() -> None:
    options = Options(writes=False)
    for writes in (False, True, True):
        options.writes = writes
        expected = gradient(plainly, options.run)
        assert_same_bits([gradient(by_us, options.run)], [expected])


def test_kernel_when_announced_in_a_later_run_then_what_it_writes_is_kept() -> None:
    count = 0

    def function(value: torch.Tensor) -> torch.Tensor:
        hidden = value * 2
        if count > 0:
            with swapkit.op("kernel", hidden):
                hidden.detach().numpy()[:] += 1
        return hidden.exp().sin()

    for count in range(RUNS):  # noqa: B007 - `function` reads it
        expected = gradient(plainly, function)
        assert_same_bits([gradient(by_us, function)], [expected])


@pytest.mark.parametrize(
    "terms",
    [Recompute(offload=("tanh",)), Recompute(check_values=True), Recompute(policy=lambda *_: True)],
    ids=["offload", "check_values", "policy"],
)
def test_terms_when_they_need_two_runs_then_not_captured(terms: Recompute) -> None:
    assert captured.capture(terms, chain, (leaf(),), {}) is None
    assert why_twice(terms, chain) != ""


def test_region_when_hooks_or_modes_of_others_are_around_then_not_captured() -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    mode = FlopCounterMode(display=False)
    for scope in (hooks, mode):
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope)
            assert captured.capture(FULL, chain, (leaf(),), {}) is None
    assert captured.capture(FULL, chain, (leaf(),), {}) is not None


# ---- threads -------------------------------------------------------------------------------------


def test_regions_when_on_several_threads_at_once_then_same_bits() -> None:
    expected = gradient(plainly, chain)
    results: list[torch.Tensor] = []

    def run() -> None:
        x = leaf()
        results.extend(torch.autograd.grad(by_us(chain, x * 0.5).sum(), x)[0] for _ in range(RUNS))

    on_threads(*[run] * 4)
    assert_same_bits(results, [expected] * 4 * RUNS)
