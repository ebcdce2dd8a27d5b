"""`op`, and where extensions find swapkit's headers and library of hooks."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from swapkit._native import hooks
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument, SessionError

if TYPE_CHECKING:
    from typing_extensions import Self

# ---- custom kernels ------------------------------------------------------------------------------
#
# `op`: announce a kernel that swapkit cannot see, because no torch operator runs it.


class CustomKernel:
    """Context manager for a running custom kernel. Made by `op`; enter it once."""

    def __init__(self, name: str, operands: tuple[torch.Tensor, ...]) -> None:
        self.name = name
        self._operands: tuple[torch.Tensor, ...] = operands  # held while the kernel runs
        self._shim = get_runtime().shim
        self._token: int | None = None  # None: not running; 0: nothing needs to follow it
        self._is_over = False

    def outputs(self, *tensors: torch.Tensor) -> None:
        """Register tensors as the kernel's outputs: reports count their memory as the kernel's.

        Include tensors that the kernel overwrote, such as an operator's result: a result that would
        have been recomputed is then kept with its new bytes. Pass such a tensor to `op` as well, so
        that results that would be recomputed from its old bytes are kept before the kernel runs. If
        the old bytes are already gone, backward raises `SavedTensorModified`.

        Raises:
            InvalidArgument: an argument is not a tensor.
            SessionError: the kernel is not running.
        """
        if self._token is None:
            raise SessionError(
                f"op {self.name!r} is not running: use `with swapkit.op(...) as op:`"
            )
        _check_operands(self.name, tensors)
        self._operands += tensors
        self._announce(tensors, is_output=True)

    def __enter__(self) -> Self:
        if self._token is not None or self._is_over:
            raise SessionError(
                f"op {self.name!r} can be entered only once. Call swapkit.op(...) again."
            )
        self._token = self._shim.kernel_enter(self.name)
        try:
            self._announce(self._operands, is_output=False)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def _announce(self, tensors: tuple[torch.Tensor, ...], *, is_output: bool) -> None:
        if self._token:
            self._shim.kernel_memory(self._token, tensors, is_output)

    def _leave(self) -> None:
        token, self._token, self._is_over = self._token, None, True
        self._operands = ()
        if token:
            self._shim.kernel_leave(token)


def op(name: str, *operands: torch.Tensor) -> CustomKernel:
    """Announce a kernel that torch does not run: a Triton kernel, a call through ctypes or cffi.

    While the kernel runs, its operands are not moved. Reports and traces attribute its memory and
    saved tensors to its name, and the trace marks its begin and end. The kernel may overwrite its
    operands. So results that would be recomputed from the operands, or into them, are kept from its
    begin on; this applies to operators chosen by hand or captured by `checkpoint`. Copies of them
    that were made before its end are made anew.

    Kernels in C and C++ announce themselves in the same way: see `include_path`.

    Args:
        name: name of the kernel.
        operands: the tensors that the kernel reads or writes; their storage must be present.

    Returns:
        A context manager whose `outputs(...)` adds the tensors that the kernel made or overwrote.

    Raises:
        InvalidArgument: an operand is not a tensor, or its storage was freed.

    Example:
        >>> import swapkit, torch
        >>> x = torch.ones(4)
        >>> with swapkit.op("double", x) as kernel:
        ...     y = torch.from_numpy(x.numpy() * 2)
        ...     kernel.outputs(y)
    """
    if not name:
        raise InvalidArgument("op: the name is empty")
    _check_operands(name, operands)
    return CustomKernel(name, operands)


def _check_operands(name: str, operands: tuple[torch.Tensor, ...]) -> None:
    for position, operand in enumerate(operands):
        if not isinstance(operand, torch.Tensor):
            raise InvalidArgument(
                f"op {name!r}, operand {position}: expected a tensor, got {operand!r}"
            )
        if operand.numel() > 0 and _bytes_of(operand) == 0:
            raise InvalidArgument(
                f"op {name!r}, operand {position}: the tensor of shape {list(operand.shape)} has "
                "no memory. Restore its storage first, if FSDP or `resize_(0)` freed it."
            )


def _bytes_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, ValueError):  # a tensor type without a single storage
        return tensor.numel() * tensor.element_size()


# ---- extension builds ----------------------------------------------------------------------------
#
# Where operators in C and C++ find swapkit's headers and its library of hooks.


def include_path(*, compat: bool = False) -> str:
    """Return the folder of the headers: `swapkit.hpp` for C++, `swapkit.h` for C.

    Args:
        compat: return instead the folder of `NPUSwapManager.h`. With it on the include path,
            operators with the hooks of MindSpeed's SmartSwap compile unchanged.

    Example:
        >>> import os, swapkit
        >>> os.path.exists(os.path.join(swapkit.include_path(), "swapkit.hpp"))
        True
    """
    return str(hooks.COMPAT if compat else hooks.INCLUDE)


def library_path() -> str:
    """Return the folder of `libswapkit.so`, which operators with hooks link with (`-lswapkit`).

    The library needs neither Python nor torch. Where swapkit does not run, its functions return at
    once.

    Example:
        >>> import os, swapkit
        >>> os.path.exists(os.path.join(swapkit.library_path(), "libswapkit.so"))
        True
    """
    return str(hooks.FOLDER)
