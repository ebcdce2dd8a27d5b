"""A link of a given speed between the device and the host.

On the CPU, copies run at memory speed. Inside `slow_link` they take as long as over a slower link,
so that overlap, stalls and plans can be observed without a GPU.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from swapkit._native.backend import Backend
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

_NS_PER_S = 1_000_000_000


@contextlib.contextmanager
def slow_link(*, bytes_per_s: float = 0, latency_s: float = 0) -> Iterator[None]:
    """Limit transfers of sessions and scopes that begin inside the block to a link of this speed.

    Tensors copied out over the link are copied back over it, also after the block. Not thread-safe.

    Args:
        bytes_per_s: speed of each direction; 0: as fast as memory.
        latency_s: added to every copy.

    Raises:
        InvalidArgument: a number is negative.

    Example:
        >>> import swapkit, torch
        >>> from swapkit.testing import slow_link
        >>> with slow_link(bytes_per_s=1e9), swapkit.offload():
        ...     loss = torch.ones(1024, requires_grad=True).exp().sum()
        >>> loss.backward()
    """
    if bytes_per_s < 0 or latency_s < 0:
        raise InvalidArgument(
            f"bytes_per_s={bytes_per_s}, latency_s={latency_s}: expected at least 0"
        )
    backend = Backend.cpu(
        copy_bytes_per_s=int(bytes_per_s), copy_latency_ns=int(latency_s * _NS_PER_S)
    )
    runtime = get_runtime()
    with runtime.linked(runtime.cpu, backend):
        yield
