"""`op`: telling swapkit of a kernel that it cannot see, because no operator of torch runs it."""

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
    """A custom kernel while it runs. Made by `op`, entered once."""

    def __init__(self, name: str, operands: tuple[torch.Tensor, ...]) -> None:
        self.name = name
        self._operands: tuple[torch.Tensor, ...] = operands
        self._outer_tag: int | None = None
        self._is_over = False

    def outputs(self, *tensors: torch.Tensor) -> None:
        """Name the kernel as the maker of tensors: their memory counts as its in reports.

        Also what it has overwritten, such as an operator's result: that is kept as it is now, where
        it was to be computed again. Give such a tensor to `op` as well: what was to be computed
        again from its former bytes is kept then, while they are there. Where that is too late,
        backward raises `SavedTensorModified`.

        Raises:
            InvalidArgument: one of them is no tensor.
            SessionError: the kernel does not run.
        """
        if self._outer_tag is None:
            raise SessionError(f"op {self.name!r} does not run: use `with swapkit.op(...) as op:`")
        _check_operands(self.name, tensors)
        self._operands += tensors
        get_runtime().shim.settle(tensors, True, False)  # noqa: FBT003 - positional only

    def __enter__(self) -> Self:
        if self._outer_tag is not None or self._is_over:
            raise SessionError(f"op {self.name!r} is entered once: call swapkit.op(...) again")
        _settle_announced(self._operands)  # while their bytes are the old ones
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
        """Put an event into the ring of the device that the kernel runs on."""
        runtime = get_runtime()
        devices = {operand.device for operand in self._operands}
        served = [name for name in devices if name.type in TYPES]
        device = runtime.device(served[0]) if len(served) == 1 else runtime.current_device()
        if device.pool is not None:
            device.pool.note(kind, sum(map(_bytes_of, self._operands)))


def op(name: str, *operands: torch.Tensor) -> CustomKernel:
    """Announce a kernel that torch does not run: a Triton kernel, a call through ctypes or cffi.

    While it runs its operands stay where they are, its memory and what it saves are named after it
    in reports and traces, and its beginning and end are marked in the trace. What operators chosen
    by hand, or captured by `checkpoint`, made of its operands, or made them, is kept from its
    beginning on instead of computed again: the kernel may overwrite them.

    Args:
        name: of the kernel.
        operands: the tensors that it reads or writes; all of their bytes must be there.

    Returns:
        A context manager whose `outputs(...)` adds the tensors that the kernel made or overwrote.

    Raises:
        InvalidArgument: an operand is no tensor, or its storage was taken away.

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
    """Keep what would be computed again from operands: the kernel may write to any.

    Not what a session captures: its plan knows by their bytes what kernels change.
    """
    runtime = get_runtime()
    runtime.shim.settle(operands, False, bool(runtime.active))  # noqa: FBT003 - positional only


def _check_operands(name: str, operands: tuple[torch.Tensor, ...]) -> None:
    for position, operand in enumerate(operands):
        if not isinstance(operand, torch.Tensor):
            raise InvalidArgument(f"op {name!r}, operand {position}: {operand!r} is no tensor")
        if operand.numel() > 0 and _bytes_of(operand) == 0:
            raise InvalidArgument(
                f"op {name!r}, operand {position}: a tensor of shape {list(operand.shape)} without "
                "memory; whoever took its storage away (FSDP, `resize_(0)`) must bring it back"
            )


def _bytes_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, ValueError):  # a kind of tensor without one storage
        return tensor.numel() * tensor.element_size()
