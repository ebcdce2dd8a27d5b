"""How callbacks open their sessions, and the frameworks that integrations need."""

from __future__ import annotations

import importlib.util
import inspect
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.allocators.installation import installed_pool
from swapkit._runtime.torch_compat.wrappers import tensors_inside
from swapkit.api.budgets import budget
from swapkit.errors import InvalidArgument, SessionError
from swapkit.texts import get_logger
from swapkit.units import format_bytes, parse_bytes, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swapkit._runtime.session.session import Session

# ---- packages ------------------------------------------------------------------------------------
#
# The frameworks that integrations need: none of them is a dependency of swapkit.


def require(package: str, wanted_by: str, *others: str) -> str:
    """Return the name of the first installed package of those that serve equally well.

    Args:
        package: the package to advise.
        wanted_by: the module that needs it.
        others: packages that serve as well.

    Raises:
        ImportError: none is installed.
    """
    for name in (package, *others):
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError(
        f"{wanted_by} needs {package}, which is not installed: pip install {package}", name=package
    )


# ---- opening -------------------------------------------------------------------------------------
#
# How callbacks open their sessions: checked options, and a word on memory outside the budget.

_log = get_logger("settings")
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
    try:
        if model is not None:
            _take_in(model)
    except BaseException:
        session.close()
        raise
    return session


def _take_in(model: torch.nn.Module) -> None:
    """Copy parameters and buffers that are mapped from files into the pool; warn of other ones.

    `from_pretrained` maps the files of safetensors. Training writes to the weights, so that each
    written page takes memory in any case, where no budget counts it.
    """
    outside: dict[int, list[torch.Tensor]] = {}  # by the address of their storage
    whole = chain(model.parameters(), model.buffers())
    for tensor in chain.from_iterable(map(tensors_inside, whole)):
        address = tensor.untyped_storage().data_ptr()
        try:
            is_ours = installed_pool(tensor.device).owns(address)
        except SessionError:  # a device without a pool
            continue
        if not is_ours:
            outside.setdefault(address, []).append(tensor)
    files = find_files([address for address in outside if address])
    mapped = {address: outside.pop(address) for address in files}
    for tensors in mapped.values():
        _copy_storage(tensors)
    if mapped:
        _log.info(
            "%s of the %s were mapped from files (%s): copied, so that the budget counts them",
            _format_sizes(mapped),
            type(model).__name__,
            ", ".join(sorted({Path(each).name for each in files.values()})),
        )
    if outside:
        _log.warning(
            "%s of the %s lie outside the budget: they were made before swapkit was installed, or "
            "not by torch. Call swapkit.install() at the top of the program, before the model is "
            "built",
            _format_sizes(outside),
            type(model).__name__,
        )


def _copy_storage(tensors: Sequence[torch.Tensor]) -> None:
    """Let tensors that share a storage share a copy of it."""
    storage = tensors[0].untyped_storage()
    # Not `storage.clone()`, which passes by the allocator of the pool.
    copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    copied.untyped_storage().copy_(storage)
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        tensor.data = view.set_(copied.untyped_storage(), *place)


def _format_sizes(tensors: Mapping[int, Sequence[torch.Tensor]]) -> str:
    return format_bytes(sum(each[0].untyped_storage().nbytes() for each in tensors.values()))


def find_files(addresses: Sequence[int]) -> dict[int, str]:
    """Return the files that are mapped at addresses of this process; none where it is not known."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return {}
    found = {}
    for line in lines:
        span, *_, inode, path = [*line.split(maxsplit=5), ""][:6]
        if not path.startswith("/") or inode == "0":
            continue
        begin, end = (int(each, 16) for each in span.split("-"))
        found.update({each: path for each in addresses if begin <= each < end})
    return found
