"""What lies below torch in a run on swapkit's pool, and what the pool and the session report."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

import swapkit
from swapkit._native.pool import Ring
from swapkit._runtime.allocators import require_installation
from swapkit.demo.curve import thin_out
from swapkit.demo.messages import Finished, SegmentRanges, Series
from swapkit.testing import slow_link

if TYPE_CHECKING:
    from swapkit._runtime.session import Session

_RING_EVENTS = 1 << 17
_NS_PER_S = 1e9
_LOOK_SECONDS = 0.02


class PoolAllocator:
    """The pool below torch: with a cap or none, with a session or none.

    Threads:
        A thread of its own tells where the pool's segments are whenever that changes.
    """

    def __init__(
        self,
        tell: Callable[[SegmentRanges], None],
        *,
        cap_bytes: int | None,
        budget_bytes: int | None,
        policy: str,
        bytes_per_s: float,
    ) -> None:
        """Put the pool below every tensor made from now on.

        Args:
            tell: called with the segments' ranges, on another thread too.
            cap_bytes: limit of the pool itself, None for none.
            budget_bytes: limit of the session, None for no session.
            policy: of the session.
            bytes_per_s: of the link to the host; 0: as fast as memory.
        """
        swapkit.install(limit=cap_bytes)
        self._pool = require_installation().pool
        self._tell = tell
        self._budget_bytes = budget_bytes
        self._policy = policy
        self._bytes_per_s = bytes_per_s
        self._early_rescues = 0
        self._session: Session | None = None
        self._ring: Ring | None = None
        self._start_ns = 0
        self._told: tuple[tuple[int, int], ...] = ()
        self._closing = threading.Event()
        self._tell_ranges()
        self._teller = threading.Thread(target=self._keep_telling, daemon=True)
        self._teller.start()

    @property
    def peak_bytes(self) -> int:
        """0: the pool's statistics have it, see `finished`."""
        return 0

    @property
    def pool_peak_bytes(self) -> int:
        """Most bytes in use at once so far."""
        return swapkit.memory_stats()["allocated_bytes.all.peak"]

    def session(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[object]:
        """Train within the budget, if there is one.

        Args:
            model: to train.
            optimizer: of the model's parameters.
        """
        return nullcontext() if self._budget_bytes is None else self._begin(model, optimizer)

    @contextmanager
    def _begin(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        assert self._budget_bytes is not None
        made = swapkit.budget(self._budget_bytes, model, optimizer, policy=self._policy)
        with slow_link(bytes_per_s=self._bytes_per_s), made as self._session:
            yield

    @contextmanager
    def watched_step(self) -> Iterator[None]:
        """Record what happens inside as one step."""
        self.stop_watching()
        self._ring = Ring(_RING_EVENTS)
        self._pool.attach(self._ring)
        self._start_ns = time.monotonic_ns()
        yield

    def series(self) -> Series:
        """Bytes over the last watched step, until now."""
        if self._ring is None:
            return ()
        events, _ = self._ring.read()
        return thin_out(
            ((event.time_ns - self._start_ns) / _NS_PER_S, event.in_use_bytes)
            for event in events
            if event.time_ns >= self._start_ns
        )

    def stop_watching(self) -> None:
        """Detach the ring; may be called again."""
        if self._ring is not None:
            self._pool.detach()
        if self._session is not None:
            self._early_rescues = self._session.stats.oom_rescues

    def finished(self, *, digest: str) -> Finished:
        """Sum the run up.

        Args:
            digest: of the parameters.
        """
        pool_stats = swapkit.memory_stats()
        reserved_peak_bytes = pool_stats["reserved_bytes.all.peak"]
        allocated_peak_bytes = pool_stats["allocated_bytes.all.peak"]
        if self._session is None:
            return Finished(
                digest=digest,
                reserved_peak_bytes=reserved_peak_bytes,
                allocated_peak_bytes=allocated_peak_bytes,
            )
        stats = self._session.stats
        plain_seconds = stats.unlimited_step_seconds
        return Finished(
            digest=digest,
            reserved_peak_bytes=reserved_peak_bytes,
            allocated_peak_bytes=allocated_peak_bytes,
            rescues=stats.oom_rescues,
            swapped_out_bytes=stats.swapped_out_bytes,
            swapped_in_bytes=stats.swapped_in_bytes,
            host_peak_bytes=stats.host_peak_bytes,
            stall_seconds=stats.stall_seconds,
            stage=self._session.stage,
            late_rescues=stats.oom_rescues - self._early_rescues,
            predicted_share=_share(stats.predicted_step_seconds, plain_seconds),
            bound_share=_share(stats.bound_step_seconds, plain_seconds),
        )

    def close(self) -> None:
        """Stop what is still running; may be called again."""
        self.stop_watching()
        self._closing.set()
        self._teller.join()

    def _keep_telling(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            self._tell_ranges()

    def _tell_ranges(self) -> None:
        ranges = tuple((each.address, each.nbytes) for each in self._pool.segments())
        if ranges != self._told:
            self._told = ranges
            self._tell(SegmentRanges(ranges=ranges))


def _share(seconds: float | None, whole_seconds: float | None) -> float | None:
    return seconds / whole_seconds if seconds is not None and whole_seconds else None
