"""A thread that evicts all that it can, while others run kernels."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import torch

from tests.support.threads import PATIENCE_SECONDS, Worker
from tests.unit._runtime.rig import EVERYTHING

if TYPE_CHECKING:
    from typing_extensions import Self

    from swapkit._runtime.session.session import Session

SHARDS = 8


class Storm:
    """While it is open, evicts everything again and again, and fills what is freed with sevens."""

    def __init__(self, session: Session, numbers: int) -> None:
        """Prepare a storm over tensors of so many numbers."""
        self._session = session
        self._numbers = numbers
        self._turn = threading.Condition()
        self._rounds = 0
        self._is_over = False

    def __enter__(self) -> Self:
        self._worker = Worker(self._rage, "storm")
        return self

    def __exit__(self, *args: object) -> None:
        self._is_over = True
        self._worker.finish()

    def pass_over(self) -> None:
        """Wait for the end of a round that begins after this call. Holds no lock but the GIL."""
        with self._turn:
            last = self._rounds + 2
            assert self._turn.wait_for(lambda: self._rounds >= last, PATIENCE_SECONDS)

    def _rage(self) -> None:
        delays = random.Random(0)
        while not self._is_over:
            self._session.rescue(EVERYTHING)
            junk = [torch.full((self._numbers,), 7.0) for _ in range(SHARDS)]
            with self._turn:
                self._rounds += 1
                self._turn.notify_all()
            time.sleep(delays.random() * 1e-3)
            del junk
