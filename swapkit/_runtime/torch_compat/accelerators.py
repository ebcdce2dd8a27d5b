"""Accelerators that swapkit serves, and what it assumes about torch_npu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from swapkit._runtime.torch_compat.internals import C, cuda_allocator, npu_functions
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit.errors import Unsupported

# ---- accelerators --------------------------------------------------------------------------------
#
# The types of accelerators that swapkit serves, and what differs between their torch modules.
#
# `torch.cuda` and `torch_npu`'s `torch.npu` have nearly the same functions. The rest is here: which
# functions install an allocator, and under which names the statistics are asked for.


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A type of device with an allocator that can be replaced."""

    type: str  # torch's name
    number: int  # torch's number of the type
    title: str  # in messages: the platform,
    unit: str  # and one device
    # Setters of its pluggable allocator, and the shim's functions `swapkit_<type>_<name>` for them.
    hooks: tuple[tuple[str, str], ...]

    @property
    def module(self) -> Any:  # noqa: ANN401 - torch.cuda, or torch_npu's module
        """The torch module of this type."""
        return getattr(torch, self.type)

    @property
    def functions(self) -> Any:  # noqa: ANN401 - a C module
        """The C module that the torch module calls."""
        return C if self.type == "cuda" else npu_functions()

    def exists(self) -> bool:
        """Return whether this torch has the type, with or without a device."""
        return hasattr(torch, self.type)

    def count(self) -> int:
        """Return the number of devices; 0 if this torch lacks the type."""
        return int(self.module.device_count()) if self.exists() else 0

    def is_initialized(self) -> bool:
        """Return whether torch uses a device of this type in this process."""
        return self.exists() and bool(self.module.is_initialized())

    def current_device(self) -> torch.device:
        """Return this thread's current device; initializes the type."""
        return torch.device(self.type, self.module.current_device())

    def name_of(self, index: int) -> str:
        """Return the name of a device's model."""
        return str(self.module.get_device_name(index))

    def new_allocator(self, alloc: int, free: int) -> Any:  # noqa: ANN401 - torch's C type
        """Return a pluggable allocator around two C functions."""
        return getattr(self.functions, f"_{self.type}_customAllocator")(alloc, free)

    def use_allocator(self, allocator: Any) -> None:  # noqa: ANN401 - torch's C type
        """Make torch use a pluggable allocator.

        Raises:
            RuntimeError: torch already allocates on a device.
        """
        if self.type == "cuda":
            allocator = cuda_allocator(allocator)
            self.module.memory.change_current_allocator(allocator)
        else:
            self.functions._npu_changeCurrentAllocator(allocator)  # noqa: SLF001 - as torch.npu does


CUDA = Accelerator(
    type="cuda",
    number=1,
    title="CUDA",
    unit="GPU",
    hooks=(
        ("set_reset_fn", "reset"),
        ("set_memory_fraction_fn", "fraction"),
        ("set_base_alloc_fn", "base"),
        ("set_record_stream_fn", "record_stream"),
        ("set_begin_allocate_to_pool", "begin_pool"),
    ),
)
NPU = Accelerator(
    type="npu",
    number=20,
    title="Ascend",
    unit="NPU",
    hooks=(
        *CUDA.hooks,
        ("set_erase_stream_fn", "erase_stream"),
        ("set_get_device_stats_fn", "stats"),
        ("set_reset_peak_status_fn", "reset_peak"),
    ),
)
ACCELERATORS = {each.type: each for each in (CUDA, NPU)}


def present_accelerator() -> Accelerator | None:
    """Return the served type of accelerator that torch reports; None: there is no device."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else ACCELERATORS.get(found.type)


def initialized_accelerator() -> Accelerator | None:
    """Return the type of accelerator that torch uses in this process; None: none."""
    return next((each for each in ACCELERATORS.values() if each.is_initialized()), None)


# ---- npu -----------------------------------------------------------------------------------------
#
# What swapkit assumes about torch_npu, checked before it relies on it.

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
