"""Recomputed regions give the bits of plain calls, whatever they keep and whatever moves.

Each program is run twice: with plain calls, and with regions in the place of some of them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy

import swapkit
from swapkit._runtime.recompute.regions import run_region
from swapkit.registry import Recompute
from tests.conformance.modes import frozen_objects, rescue_everything, swap_everything
from tests.programs import SIDE, assert_same_bits, gradients, leaf, run
from tests.support import MIB, installed, limit_above_reserved
from tests.support.counters import COUNTERS, VARIABLE
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.programs import Evict

# Calls a function with arguments, as a region or plainly.
Call: TypeAlias = "Callable[..., Any]"
RegionProgram: TypeAlias = "Callable[[Call, Evict], list[torch.Tensor]]"


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    with frozen_objects():
        yield


def plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def in_region(terms: Recompute) -> Call:
    return lambda function, *args, **kwargs: run_region(terms, function, args, kwargs)


def keep_everything(*_args: object, **_kwargs: object) -> bool:
    return True


def offload_some(_context: object, operator: object, *_args: object, **_kwargs: object) -> Any:
    if operator in {torch.ops.aten.exp.default, torch.ops.aten.mm.default}:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


TERMS = {
    "full": Recompute(),
    "saves products": Recompute(save=("matmul",)),
    "offloads products and dropout": Recompute(offload=("matmul", "dropout")),
    "keeps everything": Recompute(policy=keep_everything),
    "offloads by policy": Recompute(policy=offload_some),
    "checks": Recompute(check_values=True),
    "checks and offloads": Recompute(check_values=True, offload=("tanh",)),
}


# ---- programs ------------------------------------------------------------------------------------


def block(value: torch.Tensor) -> torch.Tensor:
    hidden = (value @ value.t()).mul(0.01).tanh().exp()
    return drop(hidden, 0.3)


def drop(value: torch.Tensor, chance: float) -> torch.Tensor:
    result: torch.Tensor = torch.native_dropout(value, chance, True)[0]
    return result


def chain(call: Call, evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = x * 0.1
    for _ in range(3):
        hidden = call(block, hidden)
        evict()
    loss = hidden.sum()
    del hidden
    evict()
    return [*gradients(loss, x), torch.rand(4)]


def other_arguments(call: Call, evict: Evict) -> list[torch.Tensor]:
    def mixed(
        value: torch.Tensor, parts: dict[str, Any], *, scale: torch.Tensor, bound: torch.Tensor
    ) -> torch.Tensor:
        assert parts["pair"][0] is scale
        first: torch.Tensor = parts["pair"][0]
        second: torch.Tensor = parts["pair"][1]
        result: torch.Tensor = (value * first * scale).tanh() @ second + bound.exp()
        return result

    x = leaf()
    pair = (x.sin(), x.cos())
    bound = functools.partial(mixed, bound=x * 0.5)
    loss = call(bound, x * 0.1, {"pair": pair, "name": "x"}, scale=pair[0]).exp().mul(1e-3).sum()
    del pair, bound
    evict()
    return gradients(loss, x)


def dropouts(call: Call, evict: Evict) -> list[torch.Tensor]:
    def drop_often(value: torch.Tensor) -> torch.Tensor:
        once = torch.nn.functional.dropout(value.exp(), 0.4)
        twice = drop(once.sin(), 0.5)
        return torch.nn.functional.dropout(twice.exp(), 0.2) * torch.rand_like(twice)

    x = leaf()
    before = torch.rand(3)
    loss = call(drop_often, call(drop_often, x * 1)).sum()
    evict()
    between = torch.rand(3)
    return [before, between, *gradients(loss, x), torch.rand(3)]


def autocast(call: Call, evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.GELU(), torch.nn.Dropout(0.1))
    x = leaf()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = call(model, x * 1)
        loss = call(model, hidden).float().square().sum()
    del hidden
    evict()
    return gradients(loss, x, *model.parameters())


NORM_GRADS = 3  # of the input, the weight and the bias


def batch_norm(call: Call, evict: Evict) -> list[torch.Tensor]:
    norm = torch.nn.BatchNorm1d(SIDE)
    x = leaf()
    loss = call(lambda value: norm(value).tanh().exp(), x * 2).sum()
    evict()
    return gradients(loss, x, *norm.parameters())


def double_backward(call: Call, evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = call(lambda value: (value @ value).mul(0.1).tanh().exp(), x * 1).sum()
    evict()
    (grad,) = gradients(loss, x, create_graph=True)
    evict()
    return [grad, *gradients(grad.square().sum(), x)]


def retained_graph(call: Call, evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = call(block, x * 0.1).exp().sum()
    evict()
    results = []
    for retain in (True, True, False):
        results += gradients(loss, x, retain_graph=retain)
        evict()
    return results


def two_partial_backwards(call: Call, evict: Evict) -> list[torch.Tensor]:
    def fork(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (value @ value).tanh().exp(), (value.t() @ value).sin().exp()

    x = leaf()
    one, other = call(fork, x * 0.1)
    evict()
    return [*gradients(one.sum(), x, retain_graph=True), *gradients(other.sum(), x)]


def nested(call: Call, evict: Evict) -> list[torch.Tensor]:
    def outer(value: torch.Tensor) -> torch.Tensor:
        hidden = drop(value.tanh(), 0.2)
        hidden = call(block, hidden @ value)
        assert isinstance(hidden, torch.Tensor)
        return drop(hidden.exp(), 0.2) @ hidden

    x = leaf()
    loss = call(outer, call(outer, x * 0.1) * 1e-3).sum()
    evict()
    return gradients(loss, x)


def backward_inside(call: Call, evict: Evict) -> list[torch.Tensor]:
    def inner(value: torch.Tensor) -> torch.Tensor:
        hidden = (value @ value).tanh().exp()
        (grad,) = torch.autograd.grad(hidden.sum(), value, create_graph=True)
        return (hidden * grad).sin() @ value

    x = leaf()
    loss = call(inner, x * 0.1).sum()
    evict()
    return gradients(loss, x)


def several_in_flight(call: Call, evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first = call(block, x * 0.1).sum()
    second = call(block, x * 0.2).sum()
    evict()
    results = gradients(first, x)
    third = call(block, x * 0.3).sum()
    evict()
    return [*results, *gradients(second, x), *gradients(third, x)]


def on_another_thread(call: Call, evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = call(block, call(block, x * 0.1)).sum()
    evict()
    return on_thread(lambda: gradients(loss, x))


def fails_at_first(call: Call, evict: Evict) -> list[torch.Tensor]:
    calls: list[int] = []

    def failing(value: torch.Tensor, number: int) -> torch.Tensor:
        hidden = (value @ value).mul(0.1).tanh()
        calls.append(number)
        if calls.count(number) == number:
            raise ZeroDivisionError
        return hidden.exp()

    x = leaf()
    with pytest.raises(ZeroDivisionError):
        call(failing, x * 0.1, 1)
    loss = call(failing, x * 0.2, 1).sum()
    evict()
    return gradients(loss, x)


def module_with_state(call: Call, evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(SIDE, 4, SIDE, dropout=0.2, batch_first=True)
    x = leaf(2, 16, SIDE)
    mask = torch.ones(16, 16).tril() == 0
    hidden = call(layer, x * 1, src_mask=mask)
    loss = call(layer, hidden, src_mask=mask).square().sum()
    del hidden, mask
    evict()
    return gradients(loss, x, *layer.parameters())


PROGRAMS: list[RegionProgram] = [
    chain,
    other_arguments,
    dropouts,
    autocast,
    batch_norm,
    double_backward,
    retained_graph,
    two_partial_backwards,
    nested,
    backward_inside,
    several_in_flight,
    on_another_thread,
    fails_at_first,
    module_with_state,
]


@contextlib.contextmanager
def nothing_moves() -> Iterator[Evict]:
    yield lambda: None


MODES = (nothing_moves, swap_everything, rescue_everything)


@functools.cache
def expected_of(program: RegionProgram) -> list[torch.Tensor]:
    return run(functools.partial(program, plainly), lambda: None)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_results_when_parts_are_regions_then_same_bits(
    program: RegionProgram, terms: Recompute, mode: Any
) -> None:
    with mode() as evict:
        results = run(functools.partial(program, in_region(terms)), evict)
    expected = expected_of(program)
    if program is batch_norm:  # as in torch's checkpoint, it counts its batch in both runs
        results, expected = results[:NORM_GRADS], expected[:NORM_GRADS]
    assert_same_bits(results, expected)


TIGHT = ("full", "saves products", "checks and offloads")


@pytest.mark.parametrize("name", TIGHT)
def test_training_when_regions_run_under_a_tight_budget_then_same_bits_and_counted(
    name: str,
) -> None:
    def train(call: Call) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Dropout(0.1))
            for _ in range(6)
        ]
        params = [param for layer in layers for param in layer.parameters()]
        for _ in range(2):
            hidden = torch.rand(1024, 256)
            for layer in layers:
                hidden = call(layer, hidden * 1)
            grads = torch.autograd.grad(hidden.square().mean(), params)
            with torch.no_grad():
                for param, grad in zip(params, grads, strict=True):
                    param.sub_(grad, alpha=0.1)
        return [param.detach() for param in params]

    expected = train(plainly)
    with installed() as installation:
        limit_bytes = limit_above_reserved(installation, 14 * MIB)
        with swapkit.budget(limit_bytes) as session:
            results = train(in_region(TERMS[name]))
        stats = session.stats
    assert_same_bits(results, expected)
    assert stats.recomputed_regions == 12
    assert stats.peak_bytes <= limit_bytes


@pytest.mark.parametrize("of", ["module", "function", "everything"])
def test_hooks_when_a_part_runs_twice_then_each_call_has_both(of: str) -> None:
    depth, calls = 0, 0

    def enter(*_: object) -> None:
        nonlocal depth, calls
        depth, calls = depth + 1, calls + 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    part = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    if of == "everything":
        module = torch.nn.modules.module
        handles = [module.register_module_forward_pre_hook(enter)]
        handles.append(module.register_module_forward_hook(leave))
    else:
        handles = [each.register_forward_pre_hook(enter) for each in part]
        handles += [each.register_forward_hook(leave) for each in part]
    region = swapkit.checkpoint(part if of != "function" else part.forward, check_values=True)
    region(torch.randn(32, 64, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    assert depth == 0
    assert calls >= 2 * len(part), "the last module ran again, too"


def test_forward_mode_derivatives_when_a_part_runs_twice_then_their_gradients_are_right() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight) * x

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(4, 8, requires_grad=True), torch.ones(4, 8))
            value, tangent = forward_ad.unpack_dual(call(x))
        return torch.autograd.grad(value.sum() + tangent.sum(), weight)[0]

    for part in (swapkit.checkpoint(layer), swapkit.checkpoint(layer, check_values=True)):
        assert torch.equal(gradient(part), gradient(layer))


class Counting(torch.nn.Module):
    """Uses a count, and a kernel that torch does not see, so that it would run twice."""

    def __init__(self, take: Callable[[], int]) -> None:
        super().__init__()
        self.layer, self.take = torch.nn.Linear(SIDE, SIDE), take

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        number, hidden = self.take(), self.layer(value)
        hidden.detach().numpy()[:] += 1
        for _ in range(3):
            hidden = (hidden * 2).sin()
        result: torch.Tensor = hidden * number
        return result


@pytest.mark.parametrize("kind", COUNTERS)
def test_training_when_a_part_counts_its_calls_in_any_object_then_it_counts_each_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        monkeypatch.setenv(VARIABLE, "0")
        torch.manual_seed(0)
        part = wrap(Counting(COUNTERS[kind]()))
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for _ in range(3):
            part(torch.randn(8, SIDE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert part.take() == 4
        return list(part.parameters())

    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it keeps what it saves
        assert_same_bits(train(swapkit.checkpoint), train(lambda part: part))
