"""Below torch in a run without swapkit: torch's own allocator, counted by torch's profiler."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from swapkit.demo.curve import LiveBytes, live_bytes, thin_out
from swapkit.demo.messages import Finished, Series

_STEP_NAME = "swapkit.demo.step"
_MEMORY_EVENT = "[memory]"


class PlainAllocator:
    """Counts tensor bytes by torch's own accounting, from the first tensor on."""

    def __init__(self) -> None:
        """Start to profile: every tensor made from now on is counted."""
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()
        self._watching = True
        self._live = LiveBytes(times_ns=(), totals=())
        self._step_ns = (0, 0)

    @property
    def peak_bytes(self) -> int:
        """Most tensor bytes alive at once while it was watched."""
        self.stop_watching()
        return self._live.peak_bytes

    @property
    def pool_peak_bytes(self) -> int:
        """0: there is no pool."""
        return 0

    def session(
        self,
        model: nn.Module,  # noqa: ARG002 - nothing manages this run's memory
        optimizer: Optimizer,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Train without anybody's help.

        Args:
            model: to train.
            optimizer: of the model's parameters.
        """
        return nullcontext()

    @contextmanager
    def watched_step(self) -> Iterator[None]:
        """Mark what happens inside as one step."""
        with record_function(_STEP_NAME):
            yield

    def series(self) -> Series:
        """Bytes over the last watched step."""
        self.stop_watching()
        return thin_out(self._live.between(*self._step_ns))

    def stop_watching(self) -> None:
        """Stop profiling and add everything up; may be called again."""
        if not self._watching:
            return
        self._watching = False
        self._profile.stop()
        profiler = self._profile.profiler
        # torch's stub of these events lacks their bytes.
        results: Any = None if profiler is None else profiler.kineto_results
        changes: list[tuple[int, int]] = []
        for event in results.events() if results else ():
            if event.name() == _MEMORY_EVENT:
                changes.append((event.start_ns(), event.nbytes()))
            elif event.name() == _STEP_NAME:
                start_ns = event.start_ns()
                self._step_ns = max(self._step_ns, (start_ns, start_ns + event.duration_ns()))
        self._live = live_bytes(changes)

    def finished(self, *, digest: str) -> Finished:
        """Sum the run up.

        Args:
            digest: of the parameters.
        """
        return Finished(digest=digest)

    def close(self) -> None:
        """Stop what is still running; may be called again."""
        self.stop_watching()
