"""The operators of a module are read from its source, as far as there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from swapkit._runtime.operators.names import operators_of


def scale(x: torch.Tensor) -> torch.Tensor:
    return x.rsqrt() * halve(x)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def eager_attention(x: torch.Tensor) -> torch.Tensor:
    return functional.softmax(x, -1)


INTERFACES = {"eager_attention": eager_attention}


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scale(x)


class ByMethod(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x) @ x

    @staticmethod
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class ByInterface(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention_interface = eager_attention
        return attention_interface(x)


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](x)


ALL_ATTENTION_FUNCTIONS = INTERFACES


class Inherits(ByMethod):
    pass


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.exp = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exp(x)  # type: ignore[no-any-return]


class Conv1D(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, x)


class SiLUActivation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[no-any-return, operator]


@pytest.mark.promise("B16")
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Scaled(), {"rsqrt", "mul", "div"}),  # a function that calls another
        (ByMethod(), {"tanh", "matmul"}),
        (Inherits(), {"tanh", "matmul"}),
        (ByInterface(), {"softmax", "flash_attention", "scaled_dot_product_attention"}),
        (Chooses(), {"flash_attention", "scaled_dot_product_attention"}),
        (Calls(), set()),  # a submodule is none of its operators
        (nn.ModuleList(), set()),
        (nn.Linear(2, 2), {"linear", "matmul", "bias_add"}),
        (Conv1D(), {"addmm", "matmul"}),
        (nn.Embedding(2, 2), {"embedding"}),
        (nn.Dropout(), {"dropout"}),
        (nn.SiLU(), {"silu"}),
        (SiLUActivation(), {"silu"}),
        (nn.LayerNorm(2), {"layer_norm"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_operators_when_read_then_those_that_the_forward_names(
    module: nn.Module, names: set[str]
) -> None:
    found = set(operators_of(module))
    assert found - {"conv1d"} == names


def test_operators_when_there_is_no_source_then_the_usual_ones() -> None:
    space: dict[str, type[nn.Module]] = {"Module": nn.Module}
    exec("class Typed(Module):\n    def forward(self, x):\n        return x * x", space)
    assert {"mul", "silu", "matmul", "flash_attention"} <= set(operators_of(space["Typed"]()))


def test_operators_when_a_class_is_wrapped_then_those_of_what_it_wraps() -> None:
    import swapkit

    @swapkit.offload
    class Wrapped(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    assert set(operators_of(Wrapped())) == {"exp"}
