"""A configured model may be wrapped, compiled or copied, configured before or after."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from tests.integration.configured import (
    assert_same_training,
    count_recomputed,
    find_forwards,
    get_loss,
    make_llama,
    train,
    train_llama_plainly,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("transformers", reason="transformers is not installed")

MIXED = {"recompute_config": {"recompute": [1], "select_recompute": True}}


@pytest.fixture
def group() -> Iterator[None]:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_first", [True, False])
def test_ddp_when_configured_before_or_after_then_the_same_bits(is_first: bool) -> None:
    model = make_llama()
    if is_first:
        swapkit.configure(model, MIXED)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if not is_first:
        swapkit.configure(wrapped, MIXED)
    with count_recomputed() as recomputed:
        assert_same_training(train(wrapped), train_llama_plainly())
    assert recomputed == [2 * (1 + 2 * 3)]


@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_compiled_model_when_configured_then_learns_the_same(when: str) -> None:
    model: Any = make_llama()
    if when == "before":
        swapkit.configure(model, MIXED)
    if when == "in place":
        model.compile(backend="eager")
    compiled: Any = model if when == "in place" else torch.compile(model, backend="eager")
    if when != "before":
        swapkit.configure(compiled, MIXED)
    with warnings.catch_warnings(), count_recomputed() as recomputed:
        warnings.simplefilter("ignore")
        assert_same_training(train(compiled), train_llama_plainly())
    assert recomputed[0] > 0


def test_copy_when_made_of_a_configured_model_then_configured_for_itself() -> None:
    model = make_llama()
    document = {**MIXED, "swap_config": {"swap": False}}
    configuration = swapkit.configure(model, document)
    buffer = io.BytesIO(pickle.dumps(model))
    for copied in (copy.deepcopy(model), pickle.load(buffer)):
        assert str(swapkit.choices(copied)) == str(swapkit.choices(model))
        with count_recomputed() as recomputed:
            assert_same_training(train(copied), train_llama_plainly())
        assert recomputed == [2 * (1 + 2 * 3)]
    configuration.remove()
    assert find_forwards(model) == []
    assert swapkit.choices(copied).remove() == 7
    assert find_forwards(copied) == []


class CountOperators(TorchDispatchMode):
    """Counts operators by name, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def test_exclusion_when_a_copy_is_trained_inside_of_something_then_still_excluded() -> None:
    exclude = {
        "recompute": True,
        "select_recompute_exclude": [r"feed_forward\.w1\.activation\.silu"],
    }
    model = make_llama(1)
    swapkit.configure(model, {"recompute_config": exclude})

    def count(trained: Any) -> int:
        with CountOperators() as mode:
            get_loss(trained).backward()
        silus: int = mode.counts["silu"]
        return silus

    assert count(model) == 1
    assert count(Wrapper(copy.deepcopy(model))) == 1


class Reduced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group: Any = torch.distributed.group.WORLD
        summed: torch.Tensor = all_reduce(x.exp(), "sum", group)
        return summed * x


@pytest.mark.usefixtures("group")
def test_collective_when_a_copy_is_trained_inside_of_something_then_still_kept() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(Reduced())])
    outer = nn.Module()

    def count(trained: Any) -> int:
        with CountOperators() as mode:
            trained.layers[0](torch.ones(64, requires_grad=True)).sum().backward()
        reductions: int = mode.counts["all_reduce"]
        return reductions

    plain = count(model)
    exclude = {"recompute": True, "select_comm_recompute_exclude": [r"0\.mul"]}
    swapkit.configure(model, {"recompute_config": exclude})
    outer.inner = copy.deepcopy(model)
    get_runtime().tracker.add_model(outer)
    assert (count(model), count(outer.inner)) == (plain, plain)


def test_cache_when_it_is_on_and_attention_recomputed_then_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for chosen, warned in ((["feed_forward"], 0), (["attention"], 1)):
        caplog.clear()
        model = make_llama(use_cache=True)
        swapkit.configure(model, {"recompute_config": {"select_recompute": chosen}})
        assert sum("use_cache is on" in text for text in caplog.messages) == warned
