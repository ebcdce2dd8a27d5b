"""What the tests of this folder share: a swapper of their own, and groups to move."""

from __future__ import annotations

import gc
import inspect
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from swapkit._native.sched import Scheduler, State
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.eviction import EvictionTerms
from swapkit._runtime.saved.hooks import Hooks
from swapkit._runtime.shim.types import Placement
from swapkit.ir.plans import Action
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from swapkit._native.backend import Backend
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import SavedTensor, StorageGroup

EVERYTHING = 1 << 50
AUTO = Placement(Action.AUTO)
SWAP = Placement(Action.SWAP)
KEEP = Placement(Action.KEEP)


def make_swapper(
    backend: Backend | None = None,
    *,
    limit_bytes: int = 128 * MIB,
    multiple: int = 1,
    **options: Any,
) -> Swapper:
    """Return a swapper over a backend; without a limit given, memory never fills up."""
    device = get_runtime().cpu
    scheduler = Scheduler(
        backend or device.backend, drop_owner=device.shared.shim.drop_address, **options
    )
    return get_runtime().new_swapper(
        device, scheduler, EvictionTerms(limit_bytes, multiple=multiple)
    )


def in_use(installation: Installation) -> int:
    """Return the pool's bytes in use, without what other tests have left to the collector."""
    gc.collect()
    return installation.pool.in_use_bytes()


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(nbytes // 4, generator=generator)


def save(
    swapper: Swapper, tensor: torch.Tensor | int, choice: Placement = AUTO, *, seed: int = 0
) -> SavedTensor:
    """Save a tensor, or one of so many bytes that nobody else holds."""
    if isinstance(tensor, int):
        tensor = numbers(tensor, seed)
    with torch.no_grad():
        return swapper.packer(choice)(tensor)


def group_of(handle: SavedTensor) -> StorageGroup:
    assert handle.group is not None
    return handle.group


def state_of(handle: SavedTensor) -> State:
    return State(group_of(handle).state)


def settle(swapper: Swapper) -> None:
    """Let all that waits be copied and all copies end, and what waits for them happen."""
    swapper.end_scope()
    swapper.scheduler.drain()
    for group in swapper.mover.resident:
        swapper.mover.poll_out(group)
    swapper.end_scope()


def unpack(swapper: Swapper, handle: SavedTensor) -> torch.Tensor:
    """Return a saved tensor, which keeps its storage on the device."""
    return swapper.unpack(handle)


def evict(swapper: Swapper, *handles: SavedTensor) -> None:
    """Send groups to the host, whoever else holds their storages."""
    for handle in handles:
        group = group_of(handle)
        if group.state == State.RESIDENT:
            assert swapper.mover.copy_out(group)
        if group.state == State.COPYING_OUT:
            assert swapper.mover.finish_out(group)
        if group.state == State.CLEAN:
            swapper.mover.release(group)


@contextmanager
def scope(swapper: Swapper, choice: Placement) -> Iterator[None]:
    """Let a swapper see what is saved."""
    hooks = Hooks(swapper, choice)
    hooks.enter()
    try:
        yield
    finally:
        hooks.leave()
        swapper.end_scope()


class Interruption(KeyboardInterrupt):
    """What the tests raise where a signal handler could."""


def interrupts(nth: int, function: Callable[[], object]) -> bool:
    """Call a function, and raise where Python looks for signals for the `nth` time.

    It does so as calls begin and as they return, but for the function itself, what a `with` calls,
    and generators that yield. Up to Python 3.10 it leaves out generators that go on, too: there the
    profiler, unlike a signal, raises outside of their `try`. Returns False if the function ended
    before.
    """
    return _run_counting(function, nth) >= nth  # and raised, though a finalizer may have had it


def count_places(function: Callable[[], object]) -> int:
    """Call a function; return at how many places `interrupts` could have raised."""
    return _run_counting(function, 0)


def _run_counting(function: Callable[[], object], nth: int) -> int:
    """Call a function; count the places where Python looks for signals, and raise at the `nth`."""
    count = 0
    own = sys._getframe()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        code = frame.f_code
        is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
        is_looked_at = code.co_name != "__enter__" and not is_generator
        is_return = event == "return" and is_looked_at and frame.f_back is not own
        is_call = event == "call" and not (is_generator and sys.version_info < (3, 11))
        if is_call or event == "c_return" or is_return:
            count += 1
            if count == nth:
                sys.setprofile(None)
                raise Interruption

    previous, unraisable = sys.getprofile(), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # what is kept of it would keep all that runs
    try:
        sys.setprofile(profile)
        function()
    except Interruption:
        pass
    finally:
        sys.setprofile(previous)
        sys.unraisablehook = unraisable
    return count
