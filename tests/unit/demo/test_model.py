"""The model sees the past only, knows positions, and gives the same numbers when it recomputes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from swapkit.demo.model import LanguageModel, next_byte_loss, rotary_table, rotate
from swapkit.demo.sizes import ModelSize

SIZE = ModelSize(dim=32, layers=2, heads=2, hidden=48, tokens=24, batch=2, steps=1)


def make_model(*, recompute: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(SIZE, recompute=recompute)


def make_windows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (SIZE.batch, SIZE.tokens + 1), generator=generator)


@pytest.mark.parametrize("changed", [1, 11, 23])
def test_logits_when_a_later_byte_changes_then_earlier_ones_stay(changed: int) -> None:
    model = make_model()
    text = make_windows()[:, :-1]
    other = text.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_rotation_when_both_positions_move_then_products_stay() -> None:
    cosines, sines = rotary_table(SIZE.tokens, 16)
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    turned_queries, turned_keys = (
        rotate(each.expand(SIZE.tokens, 16), cosines, sines) for each in (query, key)
    )
    products = turned_queries @ turned_keys.T
    torch.testing.assert_close(products[3, 1], products[20, 18])
    assert abs(products[3, 1] - products[3, 2]) > 1e-3
    torch.testing.assert_close(turned_queries.norm(dim=1), query.norm().expand(SIZE.tokens))


def test_gradients_when_recomputed_then_bit_equal() -> None:
    gradients = []
    for recompute in (False, True):
        model = make_model(recompute=recompute)
        next_byte_loss(model, make_windows()).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():
        other = recomputed[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other), name


def test_logits_when_earlier_bytes_change_places_then_differ() -> None:
    # With one block and no positions, the last byte would see the same set of bytes.
    torch.manual_seed(0)
    model = LanguageModel(dataclasses.replace(SIZE, layers=1))
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 1e-4


def test_loss_when_computed_by_hand_then_equal() -> None:
    model, windows = make_model(), make_windows()
    with torch.no_grad():
        loss = next_byte_loss(model, windows)
        chances = model(windows[:, :-1]).softmax(-1)
    surprises = [
        -chances[row, position, windows[row, position + 1]].log()
        for row in range(SIZE.batch)
        for position in range(SIZE.tokens)
    ]
    torch.testing.assert_close(loss, torch.stack(surprises).mean())


def test_loss_when_untrained_then_that_of_guessing() -> None:
    with torch.no_grad():
        loss = next_byte_loss(make_model(), make_windows())
    assert abs(float(loss) - 5.545) < 0.6
