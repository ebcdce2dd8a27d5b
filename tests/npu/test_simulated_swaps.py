"""A swap on side streams is right with all its waits, and wrong without any one of them.

They run inside of `python -m tests.npu.simulated -m pytest tests/npu/test_simulated_swaps.py`;
`test_simulation.py` starts that, once for each kind of queue.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from torch_npu import npu

from tests.cuda.control import last_problem
from tests.npu.control import busy

if TYPE_CHECKING:
    from collections.abc import Iterator

ELEMENTS = 1 << 18
# Each is a wait of one stream for another, which is late just there.
COMPUTED = "copying out waits for the computation"
OUT = "memory is used again when it was copied out"
REUSED = "copying back waits for what used the memory meanwhile"
BACK = "the computation waits for the copy back"
WAITS = (COMPUTED, OUT, REUSED, BACK)


class Swap:
    """A tensor that is computed, copied out, given up, taken back, copied back and used."""

    def __init__(self, late: str, missing: frozenset[str]) -> None:
        self.main = npu.current_stream()
        self.out, self.back = npu.Stream(), npu.Stream()
        self.late = late
        self.missing = missing
        self.held = ExitStack()

    @contextmanager
    def awaited(self, name: str, stream: npu.Stream, by: npu.Stream) -> Iterator[None]:
        """Do what a wait is for: late, if it is the one; then wait, unless that is missing."""
        if name == self.late:
            self.held.enter_context(busy(stream))
        with npu.stream(stream):
            yield
        if name not in self.missing:
            by.wait_stream(stream)

    def result(self) -> torch.Tensor:
        tensor = torch.zeros(ELEMENTS, device="npu")
        host = torch.zeros(ELEMENTS, pin_memory=True)
        npu.synchronize()
        storage = tensor.untyped_storage()
        nbytes, address = storage.nbytes(), tensor.data_ptr()
        with self.held:
            with self.awaited(COMPUTED, self.main, self.out):
                tensor.add_(1)
            with self.awaited(OUT, self.out, self.main):
                host.copy_(tensor, non_blocking=True)
            storage.resize_(0)
            with self.awaited(REUSED, self.main, self.back):
                other = torch.full((ELEMENTS,), float("nan"), device="npu")
                assert other.data_ptr() == address
                del other
            storage.resize_(nbytes)
            assert tensor.data_ptr() == address
            if OUT not in self.missing:
                self.back.wait_stream(self.out)
            with self.awaited(BACK, self.back, self.main):
                tensor.copy_(host, non_blocking=True)
            used = tensor * 2
            self.let_run_ahead()
        npu.synchronize()
        return used.cpu()

    def let_run_ahead(self) -> None:
        """Let the stream that does not wait for the late one do all it can before."""
        ahead = {COMPUTED: self.out, OUT: self.main, REUSED: self.back, BACK: self.main}
        if self.late in self.missing:
            ahead[self.late].synchronize()


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    yield
    npu.synchronize()
    assert last_problem() == ""


@pytest.mark.parametrize("late", WAITS)
def test_swap_with_all_waits_is_right_whatever_is_late(late: str) -> None:
    assert (Swap(late, frozenset()).result() == 2).all()


@pytest.mark.parametrize("missing", WAITS)
def test_swap_without_one_wait_is_wrong(missing: str) -> None:
    assert (Swap(missing, frozenset({missing})).result() != 2).any()


@pytest.mark.parametrize("late", WAITS)
def test_swap_without_any_wait_is_wrong(late: str) -> None:
    assert (Swap(late, frozenset(WAITS)).result() != 2).any()
