"""Parts that change what is outside of them never run twice."""

from __future__ import annotations

import random
import re
import types
import warnings
from typing import Any

import pytest
import torch

import swapkit
from swapkit._runtime.recompute.surroundings import Surroundings
from tests.programs import assert_same_bits
from tests.unit._runtime.recompute.test_captured import RUNS, SIDE, gradient, leaf, plainly

pytestmark = pytest.mark.usefixtures("installation")


class Counting(torch.nn.Module):
    """Changes what is outside of it, of which most could only be made again by a second run."""

    average: torch.Tensor

    def __init__(self, *, unseen: bool) -> None:
        super().__init__()
        self.calls, self.log, self.unseen = 0, [0.0], unseen
        self.register_buffer("average", torch.zeros(SIDE))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(float(value.detach().sum()))
        with torch.no_grad():
            self.average.lerp_(value.mean(0), 0.1)
        hidden = value * (2 + self.average)
        if self.unseen:
            hidden.detach().numpy()[:] += 1
        for _ in range(3):
            hidden = (hidden * 2).relu_()
        return hidden.sin()


@pytest.mark.parametrize("unseen", [False, True])
def test_region_when_it_changes_what_is_outside_then_it_runs_once_and_warns_of_what_it_keeps(
    unseen: bool,
) -> None:
    part, plain = swapkit.checkpoint(Counting(unseen=unseen)), Counting(unseen=unseen)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(RUNS + 1):
            assert_same_bits([gradient(plainly, part)], [gradient(plainly, plain)])
            assert_same_bits([part.average], [plain.average])
            assert (part.calls, part.log) == (plain.calls, plain.log)
    assert len(warned) == 1
    assert re.search("keeps more.*changes objects or tensors", str(warned[0].message))
    assert ("MiB of it" in str(warned[0].message)) is not unseen


class Cache:
    """A user's cache of keys."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


def test_region_when_a_users_cache_grows_in_it_then_it_grows_once() -> None:
    def gradients(wrap: Any) -> list[torch.Tensor]:
        def attend(value: torch.Tensor, cache: Cache) -> torch.Tensor:
            keys = cache.update(value * 3)
            return (value @ keys.t() / SIDE).softmax(-1) @ keys

        found, layer = [], wrap(attend)
        for _ in range(RUNS):
            x, cache = leaf(), Cache()
            (layer(x[:400], cache).sum() + layer(x[400:], cache).square().sum()).backward()
            assert cache.keys is not None
            assert cache.keys.shape == (SIDE, SIDE)
            assert x.grad is not None
            found.append(x.grad)
        return found

    assert_same_bits(gradients(swapkit.checkpoint), gradients(lambda function: function))


def test_outside_when_only_its_own_objects_change_then_it_may_run_twice() -> None:
    cell, module = [1], torch.nn.Linear(2, 2)
    namespace = types.SimpleNamespace(deep={"list": [module]})

    def function() -> object:
        return cell, namespace

    for change in (
        lambda: cell.append(2),
        lambda: setattr(module, "note", 3),
        namespace.deep["list"].clear,
        random.random,
    ):
        around = Surroundings((function, {"x": (torch.ones(2),)}))
        assert not around.have_changed()
        around = Surroundings((function,))
        change()
        assert around.have_changed()
