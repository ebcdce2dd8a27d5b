"""The value check names the first operator that differs, and looks at bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swapkit._runtime.recompute.regions import run_region
from swapkit._runtime.recompute.watchers.digests import digest
from swapkit.errors import RecomputeMismatch
from swapkit.registry import Recompute

CHECKED = Recompute(check_values=True)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64],
    ids=str,
)
def test_digest_when_one_element_differs_or_two_are_exchanged_then_another(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, (3, 50), dtype=torch.int8).to(dtype)
    tensor[0, 0], tensor[2, 7] = 0, 1
    before = digest(tensor)
    changed, exchanged = tensor.clone(), tensor.clone()
    changed[1, 1] = not changed[1, 1]
    exchanged[0, 0], exchanged[2, 7] = 1, 0
    assert len({before, digest(changed), digest(exchanged)}) == 3
    assert digest(tensor.clone()) == before
    assert digest(tensor.t().contiguous().t()) == before


def test_digest_when_values_compare_equal_but_bits_differ_then_another() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(payload) != digest(torch.tensor([math.nan]))
    assert digest(torch.tensor([math.nan])) == digest(torch.tensor([math.nan]))


def test_digest_when_of_another_kind_then_none_or_of_its_parts() -> None:
    assert digest(torch.ones(3, device="meta")) is None
    assert digest(torch.eye(3).to_sparse()) is None
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))
    whole = torch.arange(200_000)  # more than one chunk
    assert digest(whole) != digest(whole.roll(70_000))


def backward_of(function: Any) -> None:
    value = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    run_region(CHECKED, function, (value * 1,), {}).sum().backward()


def test_check_when_torch_leaves_some_of_a_result_unwritten_then_not_looked_at() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        # Of the paths of the shorter ones torch writes a part.
        names, lengths = torch.ones(4, 12, dtype=torch.long), torch.tensor([12, 5, 3, 9])
        rows = torch.tensor([30, 20, 10, 28])
        loss = torch.nn.functional.ctc_loss(x.log_softmax(-1), names, rows, lengths)
        [torch.full((1 << power,), 7.0) for power in range(4, 16)].clear()  # lies in free memory
        return loss

    found, expected = (torch.linspace(-1, 1, 1200).view(30, 4, 10) for _ in range(2))
    loss(expected.requires_grad_()).backward()
    result = run_region(CHECKED, loss, (found.requires_grad_(),), {})
    [torch.full((1 << power,), 3.0) for power in range(4, 16)].clear()
    result.backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


def test_check_when_an_operator_gives_other_values_then_it_is_named() -> None:
    factors = iter([2.0, 3.0])

    class Scale(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value.tanh() * next(factors)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.scale(value.sin()).exp()
            return result

    pattern = r"operator 2, aten\.mul\.Tensor in scale \(float32 \[8, 8\]\): result 0"
    with pytest.raises(RecomputeMismatch, match=pattern):
        backward_of(Model())


def test_check_when_another_operator_runs_then_both_are_named() -> None:
    functions = iter([torch.sin, torch.cos])
    pattern = r"operator 0 was aten\.sin\.default .* and is aten\.cos\.default"
    with pytest.raises(RecomputeMismatch, match=pattern):
        backward_of(lambda value: next(functions)(value).exp().sin())


def test_check_when_recomputation_ends_early_then_what_is_missing_is_named() -> None:
    counts = iter([3, 1])

    def several(value: torch.Tensor) -> torch.Tensor:
        for _ in range(next(counts)):
            value = value.sin()
        return value

    with pytest.raises(RecomputeMismatch, match=r"ended after 1 operators.*operator 1 was aten"):
        backward_of(several)


def test_check_when_a_buffer_counts_or_memory_is_unwritten_then_content() -> None:
    norm = torch.nn.BatchNorm1d(8)
    backward_of(norm)
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 2  # as with torch's checkpoint
    backward_of(lambda value: value.exp() * torch.empty_like(value).fill_(2.0))


def test_check_when_random_numbers_are_not_restored_then_found() -> None:
    terms = Recompute(check_values=True, preserve_rng_state=False)
    value = torch.ones(8, 8, requires_grad=True)
    loss = run_region(
        terms, lambda v: torch.native_dropout(v * 2, 0.5, True)[0].exp(), (value,), {}
    )
    with pytest.raises(RecomputeMismatch, match="native_dropout"):
        loss.sum().backward()


def test_check_when_autocast_has_casts_in_its_cache_then_content() -> None:
    layer = torch.nn.Linear(8, 8)
    value = torch.rand(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = layer(value)
        loss = run_region(CHECKED, layer, (hidden,), {}).float().exp().sum()
    loss.backward()
