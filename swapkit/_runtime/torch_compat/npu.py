"""What swapkit assumes about torch_npu, checked before it relies on it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._runtime.torch_compat.isolation import hidden
from swapkit.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

VERSIONS = (("2", "13"),)  # of torch_npu
_SIZES = (3, 5)
_STRIDES = (5, 1)
_ND_FORMATS = {0, 2}  # of ACL: NCHW and ND


class StorageDescription(NamedTuple):
    """The description of a storage, as the shim reads it (`cpp/memory/descriptions.hpp`)."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_sizes: tuple[int, ...]
    format: int
    item_bytes: int


@functools.cache
def check_storage_layout(read: Callable[[torch.Tensor], tuple[object, ...] | None]) -> None:
    """Check that the shim reads the descriptions of torch_npu's storages correctly.

    The shim declares torch_npu's class of storages by itself. This compares what it reads of a new
    tensor with what the tensor is.

    Args:
        read: the shim's function.

    Raises:
        Unsupported: this torch_npu has another layout.
    """
    import torch_npu  # not before: it needs CANN

    version = tuple(torch_npu.__version__.split(".")[:2])
    if version not in VERSIONS:  # reading with another layout could crash
        raise Unsupported(
            f"swapkit knows how torch_npu {', '.join(map('.'.join, VERSIONS))} describes storages, "
            f"not {torch_npu.__version__}. Install one of these versions: pip install swapkit[npu]"
        )
    with hidden(), torch.no_grad():
        tensor = torch.empty(_SIZES, dtype=torch.float16, device="npu")
        found = read(tensor)
    described = None if found is None else StorageDescription(*found)  # type: ignore[arg-type]
    expected = (_SIZES, _STRIDES, _SIZES)
    if (
        described is None
        or described[:3] != expected
        or described.format not in _ND_FORMATS
        or described.item_bytes != tensor.element_size()
    ):
        raise Unsupported(
            f"swapkit does not know how this torch_npu describes storages (read: {described}). Use "
            "a torch_npu of the versions in swapkit[npu]"
        )
