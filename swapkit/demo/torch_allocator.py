"""Below torch in a run without swapkit: torch's own allocator, which nothing limits or counts."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer

from swapkit.demo.messages import Finished, GarbledError, Series


class TorchAllocator:
    """Leaves torch alone."""

    def session(
        self,
        model: nn.Module,  # noqa: ARG002 - nothing manages this run's memory
        optimizer: Optimizer,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Train without a session.

        Args:
            model: to train.
            optimizer: of the model's parameters.
        """
        return nullcontext()

    def watched(self) -> AbstractContextManager[None]:
        """Watch nothing."""
        return nullcontext()

    def series(self) -> Series:
        """None: nothing was watched."""
        return ()

    def stage(self) -> str:
        """None: there is no session."""
        return ""

    def peaks(self) -> tuple[int, int]:
        """None: nothing counts."""
        return 0, 0

    def limit(self, limit_bytes: int) -> None:
        """Refuse.

        Args:
            limit_bytes: that cannot be had.

        Raises:
            GarbledError: always.
        """
        msg = f"torch's own allocator cannot be limited to {limit_bytes} bytes"
        raise GarbledError(msg)

    def finished(self, *, digest: str) -> Finished:
        """Sum the run up.

        Args:
            digest: of the training's state.
        """
        return Finished(digest=digest)
