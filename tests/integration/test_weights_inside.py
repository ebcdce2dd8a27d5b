"""Weights of other classes leave, too: what is inside of wrappers, and beside packed weights."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import swapkit
from swapkit._runtime.torch_compat.wrappers import tensors_inside
from tests.programs.kinds import Pair
from tests.support.sessions import digest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("installation")

WIDTH, LAYERS, STEPS, BLOCK = 128, 64, 3, 8


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four bits of each number, and a scale of each block."""
    blocks = weight.detach().reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    codes = (blocks / scale).round().add(8).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scale


def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return codes.to(scale.dtype).sub_(8).mul_(scale).reshape(WIDTH, -1)


class Packed(torch.Tensor):
    """A wrapper whose value is computed where an operator needs it."""

    packed: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, packed: torch.Tensor, scale: torch.Tensor) -> Packed:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, (WIDTH, WIDTH), dtype=scale.dtype)
        made.packed, made.scale = packed, scale
        return made  # type: ignore[no-any-return]

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _meta: object, _size: object, _stride: object) -> Packed:
        return Packed(inner["packed"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].packed, args[0].scale)
        plain = tree_map_only(cls, lambda each: unpack(each.packed, each.scale), (args, kwargs))
        return func(*plain[0], **plain[1] or {})


class Inherited(Packed):
    """Has its operators from its base class."""


class Beside(nn.Parameter):
    """Packed bytes; their scales are an attribute of an attribute."""

    state: Any

    def __new__(cls, packed: torch.Tensor, scale: torch.Tensor) -> Beside:
        made: Any = torch.Tensor._make_subclass(cls, packed, False)
        made.state = type("State", (), {})()
        made.state.scale = scale
        return made  # type: ignore[no-any-return]


class Unpacking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        return x @ unpack(weight.data.as_subclass(torch.Tensor), weight.state.scale).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight = ctx.weight.data.as_subclass(torch.Tensor)
        return grad @ unpack(weight, ctx.weight.state.scale), None


class Layer(nn.Module):
    """A weight of some class, with adapters beside it or after it."""

    def __init__(self, make: Callable[[torch.Tensor], nn.Parameter]) -> None:
        super().__init__()
        self.weight = make(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, Beside):
            y: torch.Tensor = Unpacking.apply(x, self.weight)
        else:
            y = nn.functional.linear(x, self.weight)
        return torch.tanh(y + self.bias)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


KINDS: dict[str, Callable[[torch.Tensor], nn.Parameter]] = {
    "wrapper": lambda weight: frozen(Packed(*pack(weight))),
    "inherited": lambda weight: frozen(Inherited(*pack(weight))),
    "trained": lambda weight: nn.Parameter(Pair(weight, weight / 2)),
    "parameter": lambda weight: Beside(*pack(weight)),
}


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(KINDS[kind]) for _ in range(LAYERS)])


def list_bytes(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of all that a model consists of: the digest reads by address."""
    inside = [each for weight in model.parameters() for each in tensors_inside(weight)]
    beside = [each.state.scale for each in model.parameters() if isinstance(each, Beside)]
    return [each.detach().as_subclass(torch.Tensor).clone() for each in (*inside, *beside)]


@torch.no_grad()
def update(weight: torch.Tensor) -> None:
    """Change a weight by its gradient, which goes."""
    assert weight.grad is not None
    for each in tensors_inside(weight):
        each.sub_(weight.grad, alpha=0.5)
    weight.grad = None


def train(model: nn.Sequential) -> list[str]:
    """Return the bits of each step's loss, and of an evaluation after it."""
    for each in model.parameters():
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(update)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(4, WIDTH)
        loss = model(x).square().mean()
        loss.backward()
        found.append(digest([loss.detach()]))
        with torch.inference_mode():
            found.append(digest([model(x).clone()]))
    return found


@pytest.mark.parametrize("policy", ["auto", "swap", "rescue"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_when_weights_are_of_other_classes_then_they_leave_and_the_bits_are_the_same(
    kind: str, policy: str
) -> None:
    model = make_model(kind)
    expected = train(model), digest(list_bytes(model))
    del model
    gc.collect()
    before_bytes = swapkit.memory_stats()["allocated_bytes.all.current"]
    model = make_model(kind)
    nbytes = sum(each.nbytes for each in list_bytes(model))
    dispatch = Packed.__torch_dispatch__
    with swapkit.budget(before_bytes + nbytes // 5, model, policy=policy) as session:
        found = train(model)
        stats = session.stats
    assert (found, digest(list_bytes(model))) == expected
    assert stats.peak_bytes <= session.limit_bytes
    assert stats.swapped_in_bytes > nbytes
    assert Packed.__torch_dispatch__ == dispatch
    assert "__torch_dispatch__" not in vars(Inherited)
    for each in model.parameters():
        for inside in tensors_inside(each):
            assert inside.data_ptr()
