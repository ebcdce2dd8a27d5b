"""Regions: what is kept inside, what is handed in, and where they are plain calls.

Those that run once are in `test_captured.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute.regions import run_region
from swapkit.errors import InvalidArgument, RecomputeMismatch
from swapkit.registry import Recompute
from tests.programs import assert_same_bits
from tests.support.threads import on_threads

SIDE = 32
TWICE = Recompute(check_values=True)  # as torch's checkpoint runs


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()


def gradient(run: Any) -> torch.Tensor:
    torch.manual_seed(0)
    x = leaf()
    (grad,) = torch.autograd.grad(run(x).sum(), x)
    return grad


class Counted(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) == self.name
        return func(*args, **kwargs or {})


def region(terms: Recompute, function: Any) -> Any:
    return lambda *args, **kwargs: run_region(terms, function, args, kwargs)


# ---- operators that are kept ---------------------------------------------------------------------


def two_dropouts(value: torch.Tensor) -> torch.Tensor:
    once = torch.native_dropout(value.exp(), 0.5, True)[0]
    other: torch.Tensor = torch.native_dropout(once.sin(), 0.3, True)[0]
    return other.exp()


@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1)])
def test_random_numbers_when_some_operators_are_kept_then_the_others_draw_the_same(
    kept: tuple[int, ...],
) -> None:
    calls: list[bool] = []

    def policy(_context: object, operator: Any, *_args: Any, **_kwargs: Any) -> bool:
        if operator is not torch.ops.aten.native_dropout.default:
            return False
        calls.append(True)
        return len(calls) - 1 in kept

    expected = gradient(two_dropouts)
    with Counted("aten.native_dropout.default") as counted:
        result = gradient(region(Recompute(policy=policy), two_dropouts))
    assert_same_bits([result], [expected])
    assert counted.count == 4 - len(kept)


def test_random_numbers_when_not_preserved_then_a_kept_operator_leaves_the_generator() -> None:
    x = leaf()
    terms = Recompute(save=("native_dropout",), preserve_rng_state=False)
    loss = region(terms, two_dropouts)(x).sum()
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_kept_result_when_backward_runs_inside_then_still_given_to_its_own_operator(
    kept: int,
) -> None:
    calls: list[bool] = []

    def policy(_context: object, operator: Any, *_args: Any, **_kwargs: Any) -> bool:
        if operator is not torch.ops.aten.mm.default:
            return False
        calls.append(True)
        return len(calls) % 3 == kept

    def inner(value: torch.Tensor) -> torch.Tensor:
        hidden = ((value @ value).tanh() @ value).exp()
        (grad,) = torch.autograd.grad(hidden.sum(), value, create_graph=True)
        result: torch.Tensor = (hidden * grad).sin() @ value
        return result.exp()

    def run(call: Any) -> torch.Tensor:
        return gradient(lambda x: call(x * 0.1))

    assert_same_bits([run(region(Recompute(policy=policy), inner))], [run(inner)])


@pytest.mark.parametrize("changed_inside", [True, False])
def test_kept_result_when_changed_in_place_then_its_operator_runs_again(
    changed_inside: bool,
) -> None:
    def product(value: torch.Tensor) -> torch.Tensor:
        hidden = value @ value
        if changed_inside:
            hidden.mul_(0.5)
        return hidden if not changed_inside else hidden.sin()

    def run(call: Any) -> torch.Tensor:
        x = leaf()
        out = call(x * 1)
        if not changed_inside:
            out.mul_(0.5)
        (grad,) = torch.autograd.grad(out.sin().sum(), x)
        return grad

    assert_same_bits([run(region(Recompute(save=("mm",)), product))], [run(product)])


@pytest.mark.parametrize("name", ["relu_", "view", "transpose"])
def test_operator_when_it_has_no_result_of_its_own_then_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="no result of its own"):
        region(Recompute(save=(name,)), torch.sin)(leaf())


def test_policy_when_it_returns_nonsense_then_refused() -> None:
    with pytest.raises(InvalidArgument, match="CheckpointPolicy"):
        region(Recompute(policy=lambda *_, **__: 3), torch.sin)(leaf())


def test_policy_when_called_then_only_in_forward_and_with_the_result() -> None:
    seen: list[Any] = []

    def policy(context: Any, operator: Any, *args: Any, **_kwargs: Any) -> bool:
        assert not context.is_recompute
        seen.append((operator, args[0].shape, context.op_output.shape))
        return True

    gradient(region(Recompute(policy=policy), lambda value: value.exp().sin()))
    shape = (SIDE, SIDE)
    assert seen == [
        (torch.ops.aten.exp.default, shape, shape),
        (torch.ops.aten.sin.default, shape, shape),
    ]


def test_kept_results_when_recomputation_calls_otherwise_then_refused() -> None:
    sizes = iter([SIDE, SIDE // 2])

    def cut(value: torch.Tensor) -> torch.Tensor:
        part = value[: next(sizes)]
        return (part @ value).sin()

    with pytest.raises(RecomputeMismatch, match=r"aten\.mm.*\[16, 32\].*instead of.*\[32, 32\]"):
        gradient(region(Recompute(offload=("mm",)), cut))
    counts = iter([1, 2])

    def often(value: torch.Tensor) -> torch.Tensor:
        for _ in range(next(counts)):
            value = value @ value
        return value.sin().sin().sin().sin()

    with pytest.raises(RecomputeMismatch, match="ran 1 times in forward"):
        gradient(region(Recompute(offload=("mm",)), often))


def test_regions_when_selective_and_full_are_nested_then_same_bits() -> None:
    selective, full = Recompute(save=("mm",)), Recompute()

    def inner(value: torch.Tensor) -> torch.Tensor:
        return (value @ value).tanh().exp()

    for outside, inside in ((selective, full), (full, selective), (selective, selective)):

        def outer(value: torch.Tensor, inside: Recompute = inside) -> torch.Tensor:
            hidden: torch.Tensor = region(inside, inner)(value.sin() @ value)
            return hidden.cos() @ value

        def plain(value: torch.Tensor) -> torch.Tensor:
            return inner(value.sin() @ value).cos() @ value

        assert_same_bits([gradient(region(outside, outer))], [gradient(plain)])


# ---- what is handed in ---------------------------------------------------------------------------


def test_input_when_changed_in_place_before_backward_then_refused_as_torch_does() -> None:
    for call in (
        lambda f, value: checkpoint(f, value, use_reentrant=False),
        lambda f, value: run_region(TWICE, f, (), {"value": value}),
    ):
        hidden = leaf() * 1
        loss = call(lambda value: value.exp().sin(), hidden).sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_containers_when_forward_changes_them_then_the_users_own_and_recomputed_as_before() -> None:
    lengths: list[int] = []

    def collect(value: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        lengths.append(len(cache))
        cache.append(value.detach())
        return (value * cache[0]).exp().sin()

    x = leaf()
    cache = [torch.ones(SIDE, SIDE)]
    loss = run_region(TWICE, collect, (x, cache), {}).sum()
    assert len(cache) == 2
    loss.backward()
    assert lengths == [1, 1]
    assert len(cache) == 2


def test_bound_method_when_called_in_a_region_then_its_object_is_left_alone() -> None:
    class Holder:
        def __init__(self) -> None:
            self.weight = torch.ones(SIDE, SIDE)
            self.calls: list[Any] = []

        def run(self, value: torch.Tensor) -> torch.Tensor:
            self.calls.append(self)
            return (value * self.weight).exp()

    holder = Holder()
    gradient(region(TWICE, holder.run))
    assert holder.calls == [holder, holder]


# ---- where a region is called --------------------------------------------------------------------


def test_region_when_no_gradient_is_recorded_then_a_plain_call() -> None:
    swapper = get_runtime().current_swapper()
    before = swapper.counters().recomputed
    with torch.no_grad():
        out = region(Recompute(save=("mm",)), lambda value: value @ value)(leaf())
    assert not out.requires_grad
    gradient(region(Recompute(), torch.exp))
    assert swapper.counters().recomputed == before + 1


def test_region_when_inside_function_transforms_then_a_plain_call() -> None:
    def total(value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = region(Recompute(save=("mm",)), lambda v: (v @ v).exp())(value)
        return out.sum()

    x = leaf().detach()
    expected = gradient(lambda value: (value @ value).exp())
    assert_same_bits([torch.func.grad(total)(x)], [expected])
    mapped = torch.func.vmap(total)(torch.stack([x, x]))
    assert mapped.shape == (2,)


@pytest.mark.parametrize("terms", [Recompute(), Recompute(save=("mm",))], ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_region_when_compiled_inside_or_outside_then_close_to_plain(
    terms: Recompute, inside: bool
) -> None:
    def product(value: Any) -> Any:
        return (value @ value).tanh().exp()

    compiled: Any
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if inside:
            compiled = torch.compile(product, backend="aot_eager")
            grad = gradient(region(terms, compiled))
        else:
            called = region(terms, product)

            def around(value: Any) -> Any:
                return called(value.sin()).cos()

            grad = gradient(torch.compile(around, backend="aot_eager"))
    torch._dynamo.reset()

    def wrapped(value: Any) -> Any:
        return product(value.sin()).cos()

    expected = gradient(product if inside else wrapped)
    torch.testing.assert_close(grad, expected)


def test_region_when_it_raises_then_nothing_is_left_behind() -> None:
    runtime = get_runtime()
    users = runtime.tracker._users

    def fail(_value: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    for terms in (Recompute(), Recompute(save=("mm",), check_values=True)):
        with pytest.raises(ZeroDivisionError):
            region(terms, fail)(leaf())
    assert runtime.tracker._users == users
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_kept_results_when_backward_runs_on_other_threads_at_once_then_same_bits() -> None:
    def product(value: torch.Tensor) -> torch.Tensor:
        return (value @ value).tanh().exp()

    expected = gradient(product)
    x = leaf()
    loss = region(Recompute(save=("mm",), check_values=True), product)(x).sum()
    results: list[torch.Tensor] = []

    def run() -> None:
        results.extend(torch.autograd.grad(loss, x, retain_graph=True))

    on_threads(*[run] * 4)
    assert_same_bits(results, [expected] * 4)
