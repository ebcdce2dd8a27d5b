"""The allocator of a run on swapkit's pool, with the reports of pool and session."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

import swapkit
from swapkit._native.pool import Ring
from swapkit._runtime.allocators.installation import require_installation
from swapkit.demo.curve import thin_out
from swapkit.demo.messages import STABLE, Finished, SegmentRanges, Series
from swapkit.testing import planning_at_once, slow_link

if TYPE_CHECKING:
    from swapkit._runtime.session.session import Session

_RING_EVENTS = 1 << 17
_NS_PER_S = 1e9
_TELL_SECONDS = 0.02


class PoolAllocator:
    """`Allocator` with swapkit's pool, with or without a session."""

    def __init__(
        self,
        tell: Callable[[SegmentRanges], None],
        *,
        budget_bytes: int | None,
        policy: str,
        bytes_per_s: float,
    ) -> None:
        """Install the pool; tensors created from now on use it.

        Args:
            tell: called with the segments' ranges, also on another thread.
            budget_bytes: limit of the session; None: no session.
            policy: policy of the session.
            bytes_per_s: speed of the link to the host; 0: as fast as memory.
        """
        swapkit.install(device="cpu")
        self._pool = require_installation().pool
        self._tell = tell
        self._budget_bytes = budget_bytes
        self._policy = policy
        self._bytes_per_s = bytes_per_s
        self._session: Session | None = None
        self._stage = ""
        self._early_rescues = 0
        self._series: Series = ()

    def session(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[object]:
        """Train within the budget, if there is one.

        Args:
            model: model to train.
            optimizer: optimizer of the model's parameters.
        """
        return nullcontext() if self._budget_bytes is None else self._begin(model, optimizer)

    @contextmanager
    def _begin(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        assert self._budget_bytes is not None
        made = swapkit.budget(self._budget_bytes, model, optimizer, policy=self._policy)
        with slow_link(bytes_per_s=self._bytes_per_s), planning_at_once(), made as self._session:
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the bytes in use inside the block, and report the pool's segments.

        Threads:
            A separate thread reports the segments whenever they change.
        """
        ring = Ring(_RING_EVENTS)
        ended = threading.Event()
        teller = threading.Thread(target=self._keep_telling, args=(ended,), daemon=True)
        teller.start()
        self._pool.attach(ring)
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._pool.detach()
            ended.set()
            teller.join()
        events, _ = ring.read()
        self._series = thin_out(
            ((event.time_ns - start_ns) / _NS_PER_S, event.in_use_bytes)
            for event in events
            if event.time_ns >= start_ns
        )

    def series(self) -> Series:
        """Return the bytes in use over the last watched step."""
        return self._series

    def stage(self) -> str:
        """Return the session's stage, empty without one; called after every step."""
        if self._session is not None:
            if self._stage != STABLE:  # the last step tried a plan, or had none
                self._early_rescues = self._session.stats.oom_rescues
            self._stage = self._session.stage
        return self._stage

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes reserved and the most bytes in use so far."""
        stats = swapkit.memory_stats()
        return stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]

    def limit(self, limit_bytes: int) -> None:
        """Limit the memory that the pool reserves.

        Args:
            limit_bytes: the limit, including memory already reserved.
        """
        swapkit.install(limit=limit_bytes, device="cpu")

    def finished(self, *, digest: str) -> Finished:
        """Return the summary of the run.

        Args:
            digest: digest of the training's state.
        """
        reserved_bytes, allocated_bytes = self.peaks()
        finished = Finished(
            digest=digest,
            reserved_peak_bytes=reserved_bytes,
            allocated_peak_bytes=allocated_bytes,
        )
        if self._session is None:
            return finished
        stats = self._session.stats
        plain_seconds = stats.unlimited_step_seconds
        return replace(
            finished,
            rescues=stats.oom_rescues,
            late_rescues=stats.oom_rescues - self._early_rescues,
            swapped_out_bytes=stats.swapped_out_bytes,
            swapped_in_bytes=stats.swapped_in_bytes,
            recomputed_regions=stats.recomputed_regions,
            host_peak_bytes=stats.host_peak_bytes,
            stall_seconds=stats.stall_seconds,
            stage=self._session.stage,
            predicted_share=_share(stats.predicted_step_seconds, plain_seconds),
            bound_share=_share(stats.bound_step_seconds, plain_seconds),
        )

    def _keep_telling(self, ended: threading.Event) -> None:
        told: tuple[tuple[int, int], ...] = ()
        while True:
            ranges = tuple((each.address, each.nbytes) for each in self._pool.segments())
            if ranges != told:
                told = ranges
                self._tell(SegmentRanges(ranges=ranges))
            if ended.wait(_TELL_SECONDS):
                return


def _share(seconds: float | None, whole_seconds: float | None) -> float | None:
    return seconds / whole_seconds if seconds is not None and whole_seconds else None
