"""`op`: announce a kernel that swapkit cannot see, because no torch operator runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit._native.pool import RingKind, set_tag
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import TYPES
from swapkit.errors import InvalidArgument, SessionError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class CustomKernel:
    """Context manager for a running custom kernel. Made by `op`; enter it once."""

    def __init__(self, name: str, operands: tuple[torch.Tensor, ...]) -> None:
        self.name = name
        self._operands: tuple[torch.Tensor, ...] = operands
        self._outer_tag: int | None = None
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
        if self._outer_tag is None:
            raise SessionError(
                f"op {self.name!r} is not running: use `with swapkit.op(...) as op:`"
            )
        _check_operands(self.name, tensors)
        self._operands += tensors
        get_runtime().shim.settle(tensors, True, False)  # noqa: FBT003 - positional only

    def __enter__(self) -> Self:
        if self._outer_tag is not None or self._is_over:
            raise SessionError(
                f"op {self.name!r} can be entered only once. Call swapkit.op(...) again."
            )
        _settle_announced(self._operands)  # before the kernel overwrites their bytes
        tag = get_runtime().tracker.enter_operator(self.name)
        self._outer_tag = set_tag(tag)
        self._note(RingKind.OP_BEGIN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._note(RingKind.OP_END)
        get_runtime().tracker.leave_operator()
        if self._outer_tag is not None:
            set_tag(self._outer_tag)
        self._operands, self._outer_tag, self._is_over = (), None, True

    def _note(self, kind: RingKind) -> None:
        """Write an event to the ring of the device that the kernel runs on."""
        runtime = get_runtime()
        devices = {operand.device for operand in self._operands}
        served = [name for name in devices if name.type in TYPES]
        device = runtime.device(served[0]) if len(served) == 1 else runtime.current_device()
        if device.pool is not None:
            device.pool.note(kind, sum(map(_bytes_of, self._operands)))


def op(name: str, *operands: torch.Tensor) -> CustomKernel:
    """Announce a kernel that torch does not run: a Triton kernel, a call through ctypes or cffi.

    While the kernel runs, its operands are not moved. Reports and traces attribute its memory and
    saved tensors to its name, and the trace marks its begin and end. The kernel may overwrite its
    operands. So results that would be recomputed from the operands, or into them, are kept from its
    begin on; this applies to operators chosen by hand or captured by `checkpoint`.

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


def _settle_announced(operands: tuple[torch.Tensor, ...]) -> None:
    """Keep results that would be recomputed from the operands: the kernel may write to any of them.

    Exempt are results that a session captures: its plan detects by their bytes what kernels change.
    """
    runtime = get_runtime()
    runtime.shim.settle(operands, False, bool(runtime.active))  # noqa: FBT003 - positional only


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
