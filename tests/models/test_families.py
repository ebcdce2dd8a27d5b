"""Models of every common family train to the same bits while all that they save is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tests.conformance.modes import count_copies, find_mode, frozen_objects, plain
from tests.models.configurations import FAMILIES, Family
from tests.programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.programs import Evict

pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 3
NAMES = ("swap_everything", "rescue_everything")
PRECISIONS = {"float32": False, "autocast": True}


class Training(NamedTuple):
    """What three steps leave."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: list[torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Make sessions quick."""
    for family in FAMILIES:
        family.build()
    with frozen_objects():
        yield


def train(
    family: Family, *, low_precision: bool, scope: Callable[[], AbstractContextManager[Evict]]
) -> Training:
    """Train a fresh model; each step has a scope of its own."""
    torch.manual_seed(0)
    model = family.build().train()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01
    )
    losses, gradients = [], []
    for _ in range(STEPS):
        batch = family.batch()
        with scope() as evict:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low_precision):
                out: Any = model(**batch)
            loss = out.loss
            del out
            evict()
            loss.backward()
        gradients += [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]
        losses.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return Training(losses, gradients, [each.detach() for each in model.state_dict().values()])


@pytest.mark.promise("A3")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_when_all_that_it_saves_is_moved_then_trains_to_the_same_bits(
    family: Family, precision: str, name: str
) -> None:
    mode, low_precision = find_mode(name), PRECISIONS[precision]
    expected = train(family, low_precision=low_precision, scope=plain)
    with count_copies() as copied:
        results = train(family, low_precision=low_precision, scope=mode.open)
    assert copied.in_bytes > 0, "nothing was moved"
    assert len(results.gradients) == len(expected.gradients) > 0
    for found, wanted in zip(results, expected, strict=True):
        assert_same_bits(found, wanted)


def test_family_when_unpack_returns_zeros_then_noticed() -> None:
    """The comparison can fail."""
    zeros = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.zeros_like)
    expected = train(FAMILIES[0], low_precision=False, scope=plain)
    with zeros:
        results = train(FAMILIES[0], low_precision=False, scope=plain)
    with pytest.raises(AssertionError, match="other bits"):
        assert_same_bits(results.gradients, expected.gradients)
