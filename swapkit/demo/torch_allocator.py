"""The allocator of a run without swapkit: torch's own, without limit or statistics."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer

from swapkit.demo.messages import Finished, GarbledError, Series


class TorchAllocator:
    """`Allocator` that uses torch unchanged."""

    def session(
        self,
        model: nn.Module,  # noqa: ARG002 - no session manages this run's memory
        optimizer: Optimizer,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Train without a session.

        Args:
            model: model to train.
            optimizer: optimizer of the model's parameters.
        """
        return nullcontext()

    def watched(self) -> AbstractContextManager[None]:
        """Watch nothing."""
        return nullcontext()

    def series(self) -> Series:
        """Return an empty series: nothing was watched."""
        return ()

    def stage(self) -> str:
        """Return an empty text: there is no session."""
        return ""

    def peaks(self) -> tuple[int, int]:
        """Return zeros: there are no statistics."""
        return 0, 0

    def limit(self, limit_bytes: int) -> None:
        """Raise: torch's own allocator has no limit.

        Args:
            limit_bytes: the requested limit.

        Raises:
            GarbledError: always.
        """
        msg = f"torch's own allocator cannot be limited to {limit_bytes} bytes"
        raise GarbledError(msg)

    def finished(self, *, digest: str) -> Finished:
        """Return the summary of the run.

        Args:
            digest: digest of the training's state.
        """
        return Finished(digest=digest)
