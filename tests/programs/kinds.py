"""Tensors that are not plain strided ones: they pass through, or their parts are moved."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_map_only

from tests.programs.layouts import bring_back
from tests.programs.registry import SIDE, Evict, gradients, leaf, program


class Loud(torch.Tensor):
    """A subclass that keeps its type through operators."""


class Pair(torch.Tensor):
    """A wrapper without memory of its own, around two tensors that add up to its value."""

    one: torch.Tensor
    two: torch.Tensor

    @staticmethod
    def __new__(cls: Any, one: torch.Tensor, two: torch.Tensor) -> Pair:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, one.shape, dtype=one.dtype, device=one.device, strides=one.stride()
        )
        made.one, made.two = one, two
        return made  # type: ignore[no-any-return]

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "two"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _meta: object, _size: object, _stride: object) -> Pair:
        return Pair(inner["one"], inner["two"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in {torch.ops.aten.detach.default, torch.ops.aten.clone.default}:
            return Pair(func(args[0].one), func(args[0].two))
        if func is torch.ops.aten.mul.Tensor and not isinstance(args[1], torch.Tensor):
            return Pair(func(args[0].one, args[1]), func(args[0].two, args[1]))
        plain = tree_map_only(Pair, lambda pair: pair.one + pair.two, (args, kwargs))
        return func(*plain[0], **plain[1])


def as_jagged(values: torch.Tensor) -> torch.Tensor:
    third = values.shape[0] // 3
    offsets = torch.tensor([0, third, 2 * third + 5, values.shape[0]])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@program()
def tensor_subclass(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x.as_subclass(Loud) @ x).tanh().exp().sum()
    evict()
    return gradients(loss.as_subclass(torch.Tensor), x)


@program()
def subclass_comes_back_as_itself(evict: Evict) -> list[torch.Tensor]:
    shape = (SIDE, SIDE)
    return bring_back(evict, lambda: [torch.randn(shape).as_subclass(Loud), torch.randn(shape)])


@program("G4")
def buffer_and_parameter_types(evict: Evict) -> list[torch.Tensor]:
    buffer = torch.nn.Buffer(torch.randn(SIDE, SIDE))
    frozen = torch.nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
    x = leaf()
    loss = (x * buffer * frozen).exp().mul(1e-3).sum()
    evict()
    return gradients(loss, x)


@program("G9")
def wrapper_subclass_comes_back_whole(evict: Evict) -> list[torch.Tensor]:
    return bring_back(evict, lambda: [Pair(torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE))])


@program("G9")
def wrapper_subclass_saved_by_operators(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    pair = Pair(torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)) * 2
    loss = (x * pair).sum() + (x.sin() @ pair).sum()
    del pair
    evict()
    return gradients(loss, x)


@program("G9")
def wrapper_subclass_around_a_subclass(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        inner = Pair(torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE))
        return [Pair(inner, torch.randn(SIDE, SIDE))]

    return bring_back(evict, make)


@program("G9", moves=False)
def fake_tensors(evict: Evict) -> list[torch.Tensor]:
    with FakeTensorMode():
        x = leaf()
        loss = (x @ x).exp().sum()
        evict()
        (grad,) = gradients(loss, x)
    return [torch.tensor([*grad.shape, *grad.stride()])]


@program("G9", moves=False)
def functional_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with FunctionalTensorMode():
        functional: Any = FunctionalTensor.to_functional(x)
        loss = (functional * 2).exp().sum()
        evict()
        (grad,) = gradients(loss, functional)
        return [grad.from_functional()]  # type: ignore[attr-defined]


@program("G27", moves=False)
def meta_tensors(evict: Evict) -> list[torch.Tensor]:
    x = torch.randn(SIDE, SIDE, device="meta", requires_grad=True)
    loss = (x @ x).exp().sum()
    evict()
    return gradients(loss, x)


@program("G27", device_code=True)
def sparse_coo(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    sparse = torch.eye(SIDE).to_sparse().requires_grad_()
    loss = torch.sparse.mm(sparse, x * 2).exp().sum()
    evict()
    return gradients(loss, x, sparse)


@program("G27", device_code=True)
def sparse_csr(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    sparse = torch.eye(SIDE).to_sparse_csr().requires_grad_()
    loss = torch.sparse.mm(sparse, x * 2).exp().sum()
    evict()
    return gradients(loss, x, sparse)


@program("G27", device_code=True)
def sparse_tensors_come_back(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        dense = torch.randn(SIDE, SIDE).relu()
        return [dense.to_sparse().coalesce(), dense.to_sparse_csr(), dense]

    return bring_back(evict, make)


@program("G27", moves=False, device_code=True)
def quantised_tensors(evict: Evict) -> list[torch.Tensor]:
    def make() -> list[torch.Tensor]:
        source = torch.randn(SIDE, SIDE)
        scales, zeros = torch.rand(SIDE) + 0.1, torch.zeros(SIDE, dtype=torch.int64)
        whole = torch.quantize_per_tensor(source, 0.1, 3, torch.qint8)
        return [whole, torch.quantize_per_channel(source, scales, zeros, 0, torch.qint8)]

    grad, *back = bring_back(evict, make)
    return [grad, *[each.int_repr() for each in back], *[each.dequantize() for each in back]]


@program("G27", cpu_only=True)
def mkldnn_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x * 1).to_mkldnn().relu().to_dense()
    loss = hidden.exp().sum()
    del hidden
    evict()
    return gradients(loss, x)


@program("G27", moves=False)
def jagged_nested_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf(3 * SIDE, SIDE)
    nested = as_jagged(x * 1)
    loss = ((nested * 2).sin() * nested).values().sum()
    del nested
    evict()
    return gradients(loss, x)


@program("G27", moves=False, device_code=True)
def jagged_nested_attention(evict: Evict) -> list[torch.Tensor]:
    x = leaf(3 * SIDE, SIDE)
    heads = as_jagged(x * 1).unflatten(-1, [4, SIDE // 4]).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    loss = out.values().square().sum()
    del heads, out
    evict()
    return gradients(loss, x)


@program("G27", device_code=True)
def strided_nested_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    nested = torch.nested.as_nested_tensor([x * 1, x[: SIDE // 2] * 1])
    loss = torch.nested.to_padded_tensor(nested * 2, 0.0).exp().sum()
    evict()
    return gradients(loss, x)


@program(moves=False)
def zero_tensors_without_memory(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    nothing = torch._efficientzerotensor(SIDE, SIDE)
    loss = (x * nothing).sum()
    evict()
    return gradients(loss, x)


@program()
def lazily_copied_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    original = x * 2
    lazy = torch._lazy_clone(original)
    loss = (lazy * lazy * original).sum()
    del original, lazy
    evict()
    return gradients(loss, x)


@program("G1")
def inference_tensors_beside_saved_ones(evict: Evict) -> list[torch.Tensor]:
    with torch.inference_mode():
        constant = torch.randn(SIDE, SIDE)
    x = leaf()
    with contextlib.suppress(RuntimeError):
        (x * constant).sum()  # autograd refuses to save it
    loss = (x * constant.clone()).exp().mul(1e-3).sum()
    evict()
    return gradients(loss, x)


@program(moves=False, cpu_only=True)
def memory_of_numpy_and_shared_memory(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    foreign = torch.from_numpy(torch.randn(SIDE, SIDE).numpy().copy())
    shared = torch.randn(SIDE, SIDE).share_memory_()
    loss = (x * foreign + x * shared).sum()
    evict()
    return gradients(loss, x)
