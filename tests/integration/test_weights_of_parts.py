"""Parts under `checkpoint` read weights anew in backward, and keep no memory that these left."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import swapkit
from swapkit.errors import SavedTensorModified
from tests.support.place import install

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE, LAYERS, ROWS = 128, 6, 64
WEIGHT_BYTES = SIDE * SIDE * 4


@pytest.fixture(autouse=True)
def pool() -> None:
    install()


def in_use_bytes() -> int:
    return int(swapkit.memory_stats("cpu")["allocated_bytes.all.current"])


def as_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: torchs_checkpoint(function, *args, use_reentrant=False)


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Streamed:
    """Layers whose weights have memory only while they run; gradients of all of the rest."""

    def __init__(self, wrap: Any, *, trains: bool, ring: bool) -> None:
        torch.manual_seed(7)
        self.home = [torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(LAYERS)]
        self.weights = [torch.nn.Parameter(torch.empty(0), requires_grad=trains) for _ in self.home]
        self.ring = [torch.empty(2 * SIDE, SIDE) for _ in range(2)] if ring else []
        self.turn = 0
        self.part = wrap(self.layer)
        self.most_bytes = 0

    def layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = linear(x, weight).tanh()
        return (hidden @ weight).sin()

    def bring(self, number: int) -> None:
        staging = self.home[number].clone()
        if self.ring:  # a slice of a buffer, at another offset each time
            self.turn += 1
            rows = SIDE * (self.turn // 2 % 2)
            staging = self.ring[self.turn % 2][rows : rows + SIDE]
            staging.data.copy_(self.home[number])
        self.weights[number].data = staging

    def drop(self, number: int) -> None:
        self.most_bytes = max(self.most_bytes, in_use_bytes())
        if not self.ring and number < LAYERS:
            self.weights[number].data = torch.empty(0)

    def turn_back(self, number: int, _grad: torch.Tensor) -> None:
        self.bring(number)
        self.drop(number + 1)

    def step(self) -> list[torch.Tensor]:
        base = in_use_bytes()
        self.most_bytes = 0
        x = leaf = torch.ones(ROWS, SIDE, requires_grad=True)
        for number, weight in enumerate(self.weights):
            self.bring(number)
            if weight.requires_grad:
                weight.grad = None
            x = self.part(x, weight)
            self.drop(number)
            x.register_hook(functools.partial(self.turn_back, number))
        loss = x.square().sum()
        del x
        loss.backward()
        self.most_bytes -= base
        gradients = [each.grad for each in (leaf, *self.weights) if each.grad is not None]
        for weight in self.weights:
            weight.data = torch.empty(0)
        return [loss.detach(), *gradients]


@pytest.mark.parametrize("ring", [False, True], ids=["emptied", "ring"])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_part_when_its_weights_are_streamed_then_same_bits_and_no_more_memory(
    trains: bool, ring: bool
) -> None:
    torchs = Streamed(as_torch, trains=trains, ring=ring)
    ours = Streamed(swapkit.checkpoint, trains=trains, ring=ring)
    for _ in range(3):  # the first run of a part is checked, and keeps everything
        expected, found = torchs.step(), ours.step()
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected) == 2 + (LAYERS if trains else 0)
    # A ring is written to while weights show it: results that need the former bytes are kept.
    assert ring or ours.most_bytes <= torchs.most_bytes + WEIGHT_BYTES // 2


def test_part_when_a_weight_is_lent_in_between_then_the_weight_of_forward_is_used() -> None:
    def gradients(wrap: Any) -> torch.Tensor:
        torch.manual_seed(8)
        weight = torch.nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        part = wrap(lambda x: linear(linear(x, weight).sin(), weight))
        for _ in range(2):
            x = torch.randn(ROWS, SIDE, requires_grad=True)
            loss = part(x).square().sum()
            own, weight.data = weight.data, torch.zeros(SIDE, SIDE)
            (found,) = torch.autograd.grad(loss, x)
            weight.data = own
        return found

    assert torch.equal(gradients(plainly), gradients(swapkit.checkpoint))


def test_part_when_a_weight_is_changed_unseen_then_the_results_are_kept_before() -> None:
    def gradients(wrap: Any) -> torch.Tensor:
        torch.manual_seed(9)
        weight = torch.nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        part = wrap(lambda x: (x @ weight).sin().exp())
        for _ in range(2):
            x = torch.randn(ROWS, SIDE, requires_grad=True)
            hidden = part(x)
            weight.data.mul_(1.0)  # written, but to the same numbers: `x @ weight` saves a view
            (found,) = torch.autograd.grad(hidden.sum(), x)
        return found

    assert torch.equal(gradients(plainly), gradients(swapkit.checkpoint))


def test_part_when_a_weight_has_no_memory_in_backward_then_the_error_has_the_remedy() -> None:
    weight = torch.nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
    part = swapkit.checkpoint(lambda x: (x @ weight).sin().exp())
    for _ in range(2):
        x = torch.randn(ROWS, SIDE, requires_grad=True)
        weight.data = torch.ones(SIDE, SIDE)
        loss = part(x).sum()
        weight.data = torch.empty(0)
        with pytest.raises(SavedTensorModified, match=r"has no memory.*Restore"):
            loss.backward()


class Seen(torch.autograd.Function):
    """Passes its first argument on, and shows in backward what it saved."""

    saved: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Seen.saved = ctx.saved_tensors
        return gradients[0], None


@pytest.mark.parametrize("wrap", [plainly, as_torch, swapkit.checkpoint])
@pytest.mark.parametrize(
    "around", [swapkit.keep, lambda: swapkit.offload(min_bytes=0), lambda: swapkit.budget(1 << 30)]
)
def test_saved_leaves_when_a_checkpoint_is_inside_are_the_same_objects(
    wrap: Callable[..., Any], around: Callable[[], Any]
) -> None:
    weight, other = torch.ones(4096, requires_grad=True), torch.ones(4096)
    with around():
        wrap(Seen.apply)(weight, other).sum().backward()
    first, second = Seen.saved
    assert first is weight
    assert second is other
    Seen.saved = ()
