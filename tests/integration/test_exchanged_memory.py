"""Programs that exchange the memory inside a storage while a plan copies it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit.testing import slow_link
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS, STEPS = 512, 6, 9
EXCHANGING = 6  # the first step that does
BYTES_PER_SECOND = 1e8
LIMIT_BYTES = 14 * MIB

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


def share(tensor: torch.Tensor) -> None:
    """Move it to shared memory, as `torch.multiprocessing` does with what is sent."""
    tensor.detach().share_memory_()


def refill(tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> None:
    """Give its memory up and take other memory, which gets the same numbers."""
    values = tensor.detach().clone()
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    other = torch.full_like(values, 9.0)  # where the numbers were
    if meanwhile is not None:
        meanwhile()
    storage.resize_(nbytes)
    torch.empty(0).set_(storage, 0, values.shape, values.stride()).copy_(values)
    del other


def refill_under_pressure(tensor: torch.Tensor) -> None:
    """Refill it, and while it has no memory let all that leaves be released."""

    def press() -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # raised within a budget only
            torch.empty(LIMIT_BYTES, dtype=torch.uint8)

    refill(tensor, press)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.1 + 1)
        self.exchange: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (x * self.scale).tanh()
        result = kept.sin() * kept  # saves it: a copy of it is under way
        if self.exchange is not None:
            self.exchange(kept)
        for _ in range(3):
            torch.full((WIDTH, WIDTH), 5.0)  # writes to what was given up
        return result


def train(exchange: Callable[[torch.Tensor], None], limit: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(WIDTH, WIDTH)
    found: list[torch.Tensor] = []

    def run() -> None:
        for step in range(STEPS):
            for layer in model:
                assert isinstance(layer, Layer)
                layer.exchange = exchange if step >= EXCHANGING else None
            model(x).square().mean().backward()
            found.extend(each.grad for each in model.parameters() if each.grad is not None)
            optimizer.step()
            optimizer.zero_grad()

    if limit is None:
        run()
        return found
    options = {"profile_steps": 1, "search_steps": 2}
    with (
        slow_link(bytes_per_s=BYTES_PER_SECOND),
        swapkit.budget(limit, model, optimizer, policy="swap", **options) as session,  # type: ignore[arg-type]
    ):
        run()
        assert session.stats.swapped_out_bytes > 0
    return found


@pytest.mark.parametrize("exchange", [share, refill, refill_under_pressure])
def test_copy_when_the_memory_in_the_storage_is_exchanged_meanwhile_then_same_gradients(
    exchange: Callable[[torch.Tensor], None],
) -> None:
    plain, planned = train(exchange, None), train(exchange, LIMIT_BYTES)
    assert len(plain) == len(planned)
    assert all(map(torch.equal, plain, planned))
