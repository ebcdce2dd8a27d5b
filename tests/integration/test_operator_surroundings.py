"""Choices for operators beside whatever else is around the module, or inside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit.registry import Recompute
from tests.conformance.modes import settle
from tests.programs import assert_same_bits, leaf
from tests.support.operators import HOW, Calls, choose, hidden_layer, train

if TYPE_CHECKING:
    from torch import nn

    from tests.support.operators import Body

compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
needs_all = pytest.mark.parametrize("how", HOW)


@pytest.fixture(autouse=True)
def _installed() -> None:
    swapkit.install()


class Doubled(TorchDispatchMode):
    """A user's mode that changes what operators make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.exp.default else result


def in_users_mode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with Doubled():
        return hidden_layer(x, w)


def in_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = checkpoint(hidden_layer, x, w, use_reentrant=False)
    return swapkit.checkpoint(hidden_layer)(hidden * w, w)


def in_selective_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return swapkit.checkpoint(hidden_layer, save=["mul"], offload=["exp"])(x * w, w) * w


def in_other_hooks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return hidden_layer(x, w)


def in_transforms(x: torch.Tensor, w: torch.Tensor) -> Any:
    grad = torch.func.grad(lambda value: hidden_layer(value, w.detach()).sum())(x.detach())
    rows: torch.Tensor = torch.func.vmap(lambda row: (row * 2).exp())(x * 0.1)
    return (x * grad).exp() * rows * w


def without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (w * 0.1).exp()
    with torch.inference_mode():
        (w * 0.1).exp()
    return (x * scale).exp() * w


def backward_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = hidden_layer(x, w)
    (grad,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return made * grad


AROUND: dict[str, Body] = {
    "mode of the user's": in_users_mode,
    "recomputed regions": in_region,
    "selective region": in_selective_region,
    "other hooks": in_other_hooks,
    "transforms": in_transforms,
    "no gradients": without_gradients,
    "backward": backward_inside,
}


@needs_all
@pytest.mark.parametrize("name", AROUND)
def test_operators_when_others_are_inside_the_module_then_same_bits(name: str, how: str) -> None:
    expected = train(Calls(AROUND[name]))
    assert_same_bits(train(choose(Calls(AROUND[name]), HOW[how])), expected)


@needs_all
@pytest.mark.parametrize(
    "around",
    [
        Doubled,
        swapkit.keep,
        swapkit.offload,
        torch.no_grad,
        torch.autograd.graph.save_on_cpu,
        lambda: swapkit.budget("512MiB"),
    ],
    ids=["mode", "keep", "offload", "no_grad", "save_on_cpu", "budget"],
)
def test_operators_when_others_are_around_the_model_then_same_bits(around: Any, how: str) -> None:
    def run_inside(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(6)
        x, w = leaf(), leaf()
        with around():
            out = model(x, w)
        settle()
        return [out, *torch.autograd.grad(out.sum(), (x, w))] if out.requires_grad else [out]

    expected = run_inside(Calls(hidden_layer))
    assert_same_bits(run_inside(choose(Calls(hidden_layer), HOW[how])), expected)


@compiles
def test_function_when_compiled_inside_the_module_then_it_stays_compiled() -> None:
    graphs: list[Any] = []

    def note(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(hidden_layer, backend=note, fullgraph=True)
    expected = train(Calls(hidden_layer))
    model = choose(Calls(lambda x, w: compiled(x * 1, w)), {".*": Recompute()})
    assert_same_bits(train(model)[1:3], expected[1:3])
    assert len(graphs) == 1
    torch._dynamo.reset()


@compiles
def test_module_when_compiled_from_outside_then_same_bits() -> None:
    expected = train(Calls(hidden_layer))
    model = choose(Calls(hidden_layer), {".*": Recompute()})
    assert_same_bits(train(torch.compile(model, backend="eager")), expected)  # type: ignore[arg-type]
    torch._dynamo.reset()
