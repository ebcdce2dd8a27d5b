"""How callbacks open their sessions: checked options, and a word on memory outside the budget."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import TYPE_CHECKING, Any

from swapkit._runtime.allocators.installation import installed_pool
from swapkit._runtime.torch_compat.wrappers import tensors_inside
from swapkit.api.budgets import budget
from swapkit.errors import InvalidArgument, SessionError
from swapkit.texts import get_logger
from swapkit.units import format_bytes, parse_bytes, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from swapkit._runtime.session.session import Session

_log = get_logger(__name__)
# What a callback passes itself.
_OWN = ("limit", "model", "optimizer")


def check_options(owner: str, limit: int | float | str, options: dict[str, Any]) -> None:
    """Check what a callback will pass to `swapkit.budget`, long before training begins.

    Raises:
        InvalidArgument: `budget` has no such option, or the limit cannot be read.
    """
    known = [name for name in inspect.signature(budget).parameters if name not in _OWN]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InvalidArgument(
            f"{owner}({unknown[0]}={show(options[unknown[0]])}): swapkit.budget has no such "
            f"option. Its options: {', '.join(known)}"
        )
    parse_bytes(limit, whole_bytes=1 << 62, name="limit")


def open_session(
    limit: int | float | str,
    model: torch.nn.Module | None,
    optimizers: Sequence[object],
    options: dict[str, Any],
) -> Session:
    """Enter a session on this thread; the caller closes it.

    Raises:
        InvalidArgument, OverBudget, DiskError, PlanMismatch: as `swapkit.budget` and its entry.
    """
    session = budget(limit, model, list(optimizers) or None, **options)  # type: ignore[arg-type]
    session.__enter__()
    if model is not None:
        _warn_of_outside(model)
    return session


def _warn_of_outside(model: torch.nn.Module) -> None:
    """Warn if parameters or buffers were made before the pool was installed."""
    outside: dict[int, int] = {}  # bytes by address
    whole = chain(model.parameters(), model.buffers())
    for tensor in chain.from_iterable(map(tensors_inside, whole)):
        storage = tensor.untyped_storage()
        try:
            is_ours = installed_pool(tensor.device).owns(storage.data_ptr())
        except SessionError:  # a device without a pool
            continue
        if not is_ours:
            outside[storage.data_ptr()] = storage.nbytes()
    if outside:
        _log.warning(
            "%s of the %s lie outside the budget: they were made before swapkit was installed. "
            "Call swapkit.install() at the top of the program, before the model is built",
            format_bytes(sum(outside.values())),
            type(model).__name__,
        )
