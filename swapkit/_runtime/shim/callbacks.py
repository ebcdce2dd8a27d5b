"""The shim's calls into Python for operators that run again (`cpp/recompute/recipes.cpp`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from swapkit._runtime.operators.checksums import Digest
from swapkit._runtime.operators.names import Operator
from swapkit._runtime.operators.settings import RandomState, ThreadSettings
from swapkit._runtime.shim.types import Mover, SavedTensor, refuse_modified
from swapkit._runtime.torch_compat.dispatch_modes import seeing_here
from swapkit._runtime.torch_compat.internals import engine
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit.errors import RecomputeMismatch, SavedTensorModified


@untraced
def _note_settings() -> ThreadSettings:
    with hidden():
        return ThreadSettings.note()


@untraced
def _random_state(function: Operator, device: str) -> RandomState:
    with hidden():
        return RandomState(function, [torch.device(device)])


@untraced
def _has_moved(state: RandomState) -> bool:
    with hidden():
        return state.has_moved()


@contextlib.contextmanager
@untraced
def _again(then: ThreadSettings | RandomState) -> Iterator[None]:
    with hidden(), then.again():
        yield


@untraced
def _refuse_operand(handle: SavedTensor, function: Operator) -> NoReturn:
    try:
        refuse_modified(handle)
    except SavedTensorModified as error:
        raise SavedTensorModified(
            f"{error} It is an operand of {function}, which was chosen for recomputation: choose "
            "another operator, or do not change the operand in place."
        ) from None


@untraced
def _refuse_emptied(handle: SavedTensor, function: Operator | None) -> NoReturn:
    operand = handle.alias
    what = "a weight that a recomputed part has saved"
    if function is not None:
        what = f"an operand of {function}, whose result is recomputed,"
    raise SavedTensorModified(
        f"{what} has no memory: {operand.dtype} {list(operand.size())}. Restore its storage or "
        "`.data` (FSDP, `resize_(0)` and code that streams weights free it) before backward needs "
        "it, or keep the module's saved tensors: `swapkit.keep(module)`."
    )


@untraced
def _refuse_overwritten(function: Operator) -> NoReturn:
    raise SavedTensorModified(
        f"an operand of {function}, whose result is recomputed, was overwritten by a kernel that "
        "torch does not see, such as numpy's, or that named it only afterwards: pass the operand "
        "to `swapkit.op(...)` itself, which keeps the result before the kernel begins, or keep "
        "what the part saves: `swapkit.keep(module)`."
    )


@untraced
def _refuse_mismatch(function: Operator, found: torch.Tensor) -> NoReturn:
    raise RecomputeMismatch(
        f"recomputation of {function} returned {found.dtype} {list(found.size())}, strides "
        f"{list(found.stride())}; forward returned a different form"
    )


@untraced
def _compare_digest(digest: Digest, function: Operator, found: torch.Tensor) -> None:
    if not digest.is_of(found.untyped_storage()):
        raise RecomputeMismatch(
            f"recomputation of {function} returned other values than forward. It was recomputed "
            "because its result fit neither on the device nor on the host. A kernel outside torch "
            "has written to an operand, or the operator is nondeterministic. Announce such a "
            "kernel with `swapkit.op(...)`, or raise host_limit."
        )


@untraced
def _repeat(
    function: Operator, operands: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
) -> None:
    """Run an operator of a region again, under the recording mode if there is one here."""
    mode = seeing_here()
    if mode is None:
        run()
    else:
        mode.repeat(function, operands, run)


@untraced
def _pass_retains(mover: Mover) -> None:
    """Release the region results that this backward pass has recomputed, at the pass's end."""
    engine.queue_callback(mover.forget_retained)


FUNCTIONS: dict[str, Any] = {
    "note_settings": _note_settings,
    "random_state": _random_state,
    "has_moved": _has_moved,
    "again": _again,
    "repeat": _repeat,
    "pass_retains": _pass_retains,
    "refuse_operand": _refuse_operand,
    "refuse_emptied": _refuse_emptied,
    "refuse_overwritten": _refuse_overwritten,
    "refuse_mismatch": _refuse_mismatch,
    "compare_digest": _compare_digest,
}
