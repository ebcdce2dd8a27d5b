"""Parts that write to a buffer which all parts share, and read it, recompute what they wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import swapkit
from swapkit.testing import planning_at_once
from tests.support.place import install
from tests.support.sessions import in_use_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE, LAYERS, ROWS = 64, 3, 256


@pytest.fixture(autouse=True)
def pool() -> None:
    install()


class Layers:
    """Layers that copy their weights into one buffer; without `buffer`, into new memory."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        torch.manual_seed(7)
        self.home = [torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(LAYERS)]
        self.small = [(each * 100).to(torch.int8) for each in self.home]
        self.scales = [torch.rand(SIDE, 1) / 50 for _ in range(LAYERS)]
        self.adapters = [torch.nn.Parameter(each / 30) for each in self.home]
        self.given = buffer
        self.inner: Callable[..., Any] = lambda function: function

    @property
    def buffer(self) -> torch.Tensor:
        """Room for two layers' weights."""
        return torch.empty(2 * SIDE, SIDE) if self.given is None else self.given

    def adapted(self, x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
        return torch.tanh(x @ weight + x @ self.adapters[number])

    def copied(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.buffer[:SIDE]
        weight.copy_(self.home[number])
        return self.adapted(x, weight, number)

    def copied_twice(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = self.copied(x, number)
        weight = self.buffer[:SIDE]
        weight.copy_(self.home[number - 1])
        return self.adapted(x, weight.t(), number)

    def scaled_in_place(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.buffer[SIDE:]
        weight.copy_(self.small[number])
        weight.mul_(self.scales[number])
        return self.adapted(x, weight, number)

    def scaled_out(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.buffer[SIDE:]
        torch.mul(self.small[number], self.scales[number], out=weight)
        return self.adapted(x, weight, number)

    def in_two_halves(self, x: torch.Tensor, number: int) -> torch.Tensor:
        buffer = self.buffer
        first, second = buffer[:SIDE], buffer[SIDE:]
        first.copy_(self.home[number])
        second.copy_(self.home[number - 1])
        return self.adapted(self.adapted(x, first, number), second, number)

    def as_a_whole(self, x: torch.Tensor, number: int) -> torch.Tensor:
        buffer = self.buffer
        buffer.copy_(torch.cat([self.home[number], self.home[number - 1]]))
        return self.adapted(self.adapted(x, buffer[:SIDE], number), buffer[SIDE:], number)

    def with_noise(self, x: torch.Tensor, number: int) -> torch.Tensor:
        noise = self.buffer[:SIDE]
        noise.normal_()
        return self.adapted(x * noise.flatten()[: x.numel()].view(-1, SIDE)[:1], noise, number)

    def read_inside(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.buffer[:SIDE]
        weight.copy_(self.home[number])
        hidden: torch.Tensor = self.inner(lambda y: self.adapted(y, weight, number))(x)
        return hidden @ weight

    def refilled_inside(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = self.inner(self.copied)(x, number)
        return x @ self.buffer[:SIDE] if self.given is not None else x @ self.home[number]

    def step(self, part: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(8)
        x = leaf = torch.ones(ROWS, SIDE, requires_grad=True)
        for number in range(LAYERS):
            self.adapters[number].grad = None
            x = part(x, number)
        loss = x.square().mean()
        loss.backward()
        gradients = [each.grad for each in (leaf, *self.adapters) if each.grad is not None]
        assert len(gradients) == LAYERS + 1
        return [loss.detach(), *(each.clone() for each in gradients)]


NAMES = (
    *("copied", "copied_twice", "scaled_in_place", "scaled_out", "in_two_halves", "as_a_whole"),
    *("with_noise", "read_inside", "refilled_inside"),
)


def is_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NAMES)
def test_part_when_it_refills_a_buffer_has_the_gradients_of_new_memory(name: str) -> None:
    expected = (plain := Layers(None)).step(getattr(plain, name))
    layers = Layers(torch.empty(2 * SIDE, SIDE))
    layers.inner = swapkit.checkpoint
    part = swapkit.checkpoint(getattr(layers, name))
    assert all(is_equal(layers.step(part), expected) for _ in range(3))


@pytest.mark.parametrize("policy", ["recompute", "auto"])
def test_session_when_parts_refill_a_buffer_has_the_gradients_of_new_memory(policy: str) -> None:
    expected = (plain := Layers(None)).step(plain.scaled_in_place)
    layers = Layers(torch.empty(2 * SIDE, SIDE))
    part = swapkit.checkpoint(layers.scaled_in_place)
    optimizer = torch.optim.SGD(layers.adapters, lr=0.0)
    limit = in_use_bytes() + (1 << 20)
    with (
        planning_at_once(),
        swapkit.budget(limit, None, optimizer, policy=policy, min_swap_bytes=0, search_steps=2),
    ):
        for _ in range(8):
            assert is_equal(layers.step(part), expected)
            optimizer.step()


def kept_bytes(part: Callable[..., torch.Tensor]) -> int:
    """Return the bytes that wait for backward after the second step's forward."""
    for _ in range(2):
        x = torch.ones(ROWS, SIDE, requires_grad=True)
        before = in_use_bytes()
        for number in range(LAYERS):
            x = part(x, number)
        kept = in_use_bytes() - before
        x.sum().backward()
    return kept


def test_part_when_it_refills_a_buffer_keeps_no_copy_of_it() -> None:
    layers = Layers(torch.empty(2 * SIDE, SIDE))
    twice = kept_bytes(
        lambda *args: torchs_checkpoint(layers.copied_twice, *args, use_reentrant=False)
    )
    assert kept_bytes(swapkit.checkpoint(layers.copied_twice)) <= twice


def test_part_when_it_resizes_or_partly_refills_a_buffer_keeps_autograds_check() -> None:
    buffer, small = torch.empty(2 * SIDE, SIDE), torch.randn(SIDE, SIDE)

    def part(x: torch.Tensor) -> torch.Tensor:
        buffer[:SIDE].copy_(small)  # the rest is as it was
        return torch.tanh(x @ buffer.t())

    part = swapkit.checkpoint(part)
    loss = part(part(torch.ones(2, SIDE, requires_grad=True))[:, :SIDE]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def staged_by_numpy(layers: Layers, staging: torch.Tensor, *, refills: bool) -> Any:
    window = staging.numpy()

    def staged(x: torch.Tensor, number: int) -> torch.Tensor:
        window[...] = layers.home[number].numpy()
        weight = layers.buffer[:SIDE].copy_(staging) if refills else staging.double().float()
        return layers.adapted(x, weight, number)

    return swapkit.checkpoint(staged)


@pytest.mark.filterwarnings("ignore:swapkit.checkpoint")
@pytest.mark.parametrize("refills", [False, True])
@pytest.mark.parametrize("looks_unchanged", [False, True])  # to the first run, which is checked
def test_part_when_numpy_writes_what_it_reads_is_right_or_refused(
    looks_unchanged: bool, refills: bool
) -> None:
    layers = Layers(torch.empty(2 * SIDE, SIDE))
    staging = layers.home[0].clone() if looks_unchanged else torch.zeros(SIDE, SIDE)
    expected = (plain := Layers(None)).step(plain.copied)
    part = staged_by_numpy(layers, staging, refills=refills)
    refused = []
    for _ in range(3):
        try:
            assert is_equal(layers.step(part), expected)
        except RuntimeError as error:
            refused.append(str(error))
    assert all("modified by an inplace" in each or "overwritten by" in each for each in refused)
    assert refused or not refills


def with_statistics(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    mean, var = torch.empty(SIDE), torch.ones(SIDE)
    mean.copy_(weight[0].detach())
    y = torch.nn.functional.batch_norm(x + weight[:1], mean, var, training=True)
    return torch.tanh(y * mean)


def through_an_alias(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(SIDE, SIDE)
    buffer.copy_(weight.detach())
    alias = buffer.data  # has a counter of its own
    torch.add(alias, 1, out=alias)
    return torch.tanh(x @ buffer + x @ weight)


def inside_of_a_part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(SIDE, SIDE)
    buffer.copy_(weight.detach())

    def inner(y: torch.Tensor) -> torch.Tensor:
        source = weight.detach() * 3
        buffer.data.copy_(source)
        source.add_(1)
        return torch.tanh(y @ weight)

    return torch.tanh(swapkit.checkpoint(inner)(x) @ buffer)


def by_numpy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(SIDE, SIDE)
    buffer.copy_(weight.detach())
    buffer.numpy()[buffer.numpy() > by_numpy_above] += 1
    return torch.tanh(x @ buffer + x @ weight)


by_numpy_above = float("inf")


@pytest.mark.filterwarnings("ignore:swapkit.checkpoint")
@pytest.mark.parametrize(
    "function", [with_statistics, through_an_alias, inside_of_a_part, by_numpy]
)
def test_part_when_another_write_follows_a_refill_has_plain_gradients(
    function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(SIDE, SIDE) / SIDE**0.5)

    def step(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, ROWS * SIDE).view(ROWS, SIDE).requires_grad_()
        return list(torch.autograd.grad(call(x, weight).square().sum(), [x, weight]))

    part = swapkit.checkpoint(function)
    for above in (float("inf"), 0.0, -0.1):  # the first run, which is checked, changes nothing
        monkeypatch.setattr(f"{__name__}.by_numpy_above", above)
        assert is_equal(step(part), step(function))


def test_part_when_numpy_writes_beside_what_it_reads_is_not_refused() -> None:
    ring = torch.randn(SIDE, 4)
    column = ring[:, 1]
    part = swapkit.checkpoint(lambda x: (x * column.exp()).tanh())
    x = torch.ones(SIDE, requires_grad=True)
    for _ in range(2):
        result = part(x)
        ring.numpy()[:, 2] += 1
        gradient = torch.autograd.grad(result.sum(), x)[0]
        assert torch.equal(gradient, torch.autograd.grad((x * column.exp()).tanh().sum(), x)[0])
