"""Training under a budget: the numbers of plain training, within the bytes that were named."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from tests.support.sessions import in_use_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 128
TOKENS = 1024
LAYERS = 6
STEPS = 3


class Block(nn.Module):
    """Attention and a gated feed-forward layer, as large models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(0, 1)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).flatten(1)
        mixed = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return torch.add(x, mixed)


class Run(NamedTuple):
    losses: list[str]
    parameters: str
    peak_bytes: int


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, each: Callable[[], object] = lambda: None
) -> list[str]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(TOKENS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
        each()
    return losses


def digest(model: nn.Module) -> str:
    content = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def plain() -> Run:
    """The run without a budget; its peak is what shares of a budget refer to."""
    swapkit.install()
    model, optimizer = build()
    swapkit.reset_peak_memory_stats()
    losses = train(model, optimizer)
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    return Run(losses, digest(model), peak_bytes)


@pytest.fixture(autouse=True)
def no_limit() -> Iterator[None]:
    yield
    swapkit.install(limit=None)


def resident_bytes() -> int:
    """The kernel's word on how much of the pool's own mapping is in memory."""
    ranges = [(s.address, s.address + s.nbytes) for s in require_installation().pool.segments()]
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping:
            start = int(mapping[1], 16)
            inside = any(low <= start < high for low, high in ranges)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.promise("A3")
@pytest.mark.promise("C6")
@pytest.mark.parametrize("share", [0.6, 0.45])
def test_training_when_budget_is_a_share_of_the_peak_then_same_bits_within_it(
    share: float, plain: Run
) -> None:
    limit = int(plain.peak_bytes * share)
    model, optimizer = build()
    witnessed = []
    with swapkit.budget(limit, model, optimizer, policy="rescue") as session:
        losses = train(model, optimizer, lambda: witnessed.append(resident_bytes()))
    assert losses == plain.losses
    assert digest(model) == plain.parameters
    assert session.stats.peak_bytes <= session.stats.budget_bytes == limit
    assert 0 < max(witnessed) <= limit
    assert session.stats.steps == STEPS
    assert session.stats.oom_rescues > 0
    assert session.stats.swapped_in_bytes > 0
    require_installation().pool.check()


@pytest.mark.promise("C2")
def test_first_step_when_it_needs_twice_the_budget_then_completes_with_the_same_loss(
    plain: Run,
) -> None:
    model, optimizer = build()
    with swapkit.budget(plain.peak_bytes // 2, model, optimizer) as session:
        torch.manual_seed(0)
        loss = model(torch.randn(TOKENS, WIDTH)).square().mean()
        loss.backward()
    assert float(loss.detach()).hex() == plain.losses[0]
    assert session.stats.peak_bytes <= plain.peak_bytes // 2


@pytest.mark.promise("A6")
def test_plain_training_when_over_the_limit_then_torch_error_says_what_happened(plain: Run) -> None:
    model, optimizer = build()
    limit = int(plain.peak_bytes * 0.6)
    swapkit.install(limit=limit)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(model, optimizer)
    text = str(raised.value)
    for part in (
        "requested in",
        "the budget is",
        "allocated",
        "reserved",
        "Largest holders",
        "What to try",
    ):
        assert part in text
    assert re.search(r"made in \d+\.\w+ \(\d+\)", text), "holders are named by module"
    assert re.search(r"parameters \(\d+\)", text)
    assert "test_training.py:" in text
    assert swapkit.memory_stats()["reserved_bytes.all.peak"] >= 0


@pytest.mark.promise("A6")
def test_operator_when_it_alone_is_too_large_then_error_and_training_goes_on(plain: Run) -> None:
    model, optimizer = build()
    limit = int(plain.peak_bytes * 0.6)
    with swapkit.budget(limit, model, optimizer) as session:
        hidden = model(torch.randn(TOKENS, WIDTH))
        before = session.stats
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(limit + 1, dtype=torch.uint8)
        kept = session.stats
        hidden.square().mean().backward()
        optimizer.zero_grad()
        del hidden
        losses = train(model, optimizer)
    assert kept.oom_rescues == before.oom_rescues, "nothing is given up for what can never fit"
    assert losses == plain.losses
    assert digest(model) == plain.parameters


class Greedy(torch.autograd.Function):
    """Its backward needs more than any budget of these tests."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 30)


@pytest.mark.promise("A6")
def test_backward_when_it_runs_out_of_memory_then_waiting_gradients_are_freed() -> None:
    swapkit.install()
    x = torch.ones(1 << 16, requires_grad=True)
    in_use_before = in_use_bytes()
    with swapkit.budget("64MiB"):
        hidden = x.exp()
        greedy = Greedy.apply(x)  # its backward runs when the gradient of `mul` waits for `exp`
        loss = hidden.mul(2).sum() + greedy.sum()
        del hidden, greedy
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        assert in_use_bytes() == in_use_before


def test_operator_when_it_needs_all_that_parameters_leave_then_everything_is_evicted_for_it(
    plain: Run,
) -> None:
    model, _ = build()
    limit = int(plain.peak_bytes * 0.6)
    with swapkit.budget(limit, model) as session:
        hidden = model(torch.randn(TOKENS, WIDTH))
        room = limit - session.stats.budget_bytes // 4
        torch.empty(room, dtype=torch.uint8)
        hidden.square().mean().backward()
    assert session.stats.peak_bytes <= limit
    assert session.stats.swapped_in_bytes > 0


def test_rescue_when_host_limit_is_reached_then_error_names_it(plain: Run) -> None:
    model, optimizer = build()
    limit = int(plain.peak_bytes * 0.5)
    with (
        swapkit.budget(limit, model, optimizer, host_limit="1MiB") as session,
        pytest.raises(torch.OutOfMemoryError, match="raise host_limit"),
    ):
        train(model, optimizer)
    assert session.stats.host_peak_bytes <= 1 << 20


@pytest.mark.promise("A4")
def test_allocation_when_it_fails_then_callback_once_a_failure_and_user_code_sees_nothing(
    plain: Run,
) -> None:
    model, optimizer = build()
    stats = swapkit.memory_stats()
    with swapkit.budget(int(plain.peak_bytes * 0.6), model, optimizer) as session:
        losses = train(model, optimizer)
    after = swapkit.memory_stats()
    assert losses == plain.losses
    rescues = after["num_rescues"] - stats["num_rescues"]
    assert session.stats.oom_rescues == rescues > 0
    assert after["num_ooms"] == stats["num_ooms"]
    assert rescues <= 2 * (after["num_alloc_retries"] - stats["num_alloc_retries"])


def test_copies_when_memory_fills_up_then_made_before_they_are_needed(plain: Run) -> None:
    model, optimizer = build()
    # Room for all: nothing must be evicted, yet the last third is beyond the watermark.
    with swapkit.budget(int(plain.peak_bytes * 1.2), model, optimizer) as session:
        loss = model(torch.randn(TOKENS, WIDTH)).square().mean()
        copied_bytes = session.stats.swapped_out_bytes
        loss.backward()
    assert copied_bytes > 0
    assert session.stats.oom_rescues == 0
    assert session.stats.swapped_in_bytes == 0


def test_copies_when_the_step_before_evicted_nothing_then_none_are_made(plain: Run) -> None:
    model, optimizer = build()
    with swapkit.budget(int(plain.peak_bytes * 1.2), model, optimizer) as session:
        seen: list[int] = []
        train(model, optimizer, lambda: seen.append(session.stats.swapped_out_bytes))
    assert seen[0] > 0
    assert seen[1:] == seen[:1] * (STEPS - 1)


def test_session_when_it_ends_then_the_pool_has_no_budget_and_graphs_still_work(plain: Run) -> None:
    model, _ = build()
    with swapkit.budget(int(plain.peak_bytes * 0.5), model) as session:
        torch.manual_seed(0)
        loss = model(torch.randn(TOKENS, WIDTH)).square().mean()
    assert session.stats.swapped_out_bytes > 0
    assert swapkit.memory_stats()["budget_bytes"] == 0
    loss.backward()
    assert float(loss.detach()).hex() == plain.losses[0]
    expected, _ = build()
    torch.manual_seed(0)
    expected(torch.randn(TOKENS, WIDTH)).square().mean().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
