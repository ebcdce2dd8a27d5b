"""The same bits, in the same form."""

from __future__ import annotations

from typing import Any

import torch

_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    form: tuple[Any, ...] = (type(tensor), tensor.dtype, tensor.layout, tensor.device, tensor.shape)
    if tensor.layout is torch.strided and not tensor.is_nested:
        form += (tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return form


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return [getattr(tensor, name) for name in names]
    return [getattr(tensor, name)() for name in _COMPONENTS[tensor.layout]]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Not `contiguous`: a single element may have any stride.
    dense = (
        tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    )
    return dense.view(torch.uint8)


def is_same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have the same kind, strides and bits; NaNs have bits, too."""
    if _form(result) != _form(expected):
        return False
    if result.device.type == "meta":
        return True
    if hasattr(result, "__tensor_flatten__") or result.layout in _COMPONENTS:
        pairs = zip(_components(result), _components(expected), strict=True)
        return all(is_same(one, other) for one, other in pairs)
    return torch.equal(_bytes(result), _bytes(expected))


def assert_same_bits(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Fail unless both lists hold the same tensors."""
    assert len(results) == len(expected)
    for number, (result, other) in enumerate(zip(results, expected, strict=True)):
        assert _form(result) == _form(other), f"result {number} has another form"
        assert is_same(result, other), f"result {number} has other bits"
