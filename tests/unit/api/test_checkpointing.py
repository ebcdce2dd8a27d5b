"""`checkpoint`: what it can be applied to, and its arguments."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument
from swapkit.registry import Recompute
from tests.unit.scoped import Block, copied, gradient, leaf, make_model


def recomputed() -> int:
    return get_runtime().current_swapper().counters().recomputed


def count(run: Any) -> int:
    before = recomputed()
    gradient(run)
    return recomputed() - before


@pytest.mark.promise("A2")
def test_checkpoint_when_on_a_function_then_it_runs_again_with_the_same_gradient() -> None:
    def plain(x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        """Say something."""
        return (x.sin() * scale).exp()

    scale = torch.full((), 2.0)
    again = swapkit.checkpoint(plain)
    assert again.__doc__ == "Say something."
    assert inspect.signature(again) == inspect.signature(plain)
    assert count(lambda x: again(x, scale=scale)) == 1
    assert torch.equal(
        gradient(lambda x: again(x, scale=scale)), gradient(lambda x: plain(x, scale=scale))
    )
    assert count(lambda x: plain(x, scale=scale)) == 0


def test_checkpoint_when_on_a_module_a_class_or_by_pattern_then_these_run_again() -> None:
    model = make_model()
    expected = gradient(model)
    assert swapkit.checkpoint(model.layers[0]) is model.layers[0]
    assert swapkit.checkpoint(model, r"layers\.2") is model
    assert count(model) == 2
    assert torch.equal(gradient(model), expected)

    @swapkit.checkpoint
    class Again(Block):
        pass

    assert inspect.isclass(Again)
    block = Again()
    assert count(block) == 1
    assert count(Block()) == 0


def test_checkpoint_when_modules_nest_then_each_region_runs_again() -> None:
    model = swapkit.checkpoint(make_model(), r"layers\.\d(\.up)?")
    expected = gradient(make_model())
    assert torch.equal(gradient(model), expected)
    assert count(model) == 6


def test_decorators_when_stacked_then_recompute_wins_over_swap() -> None:
    @swapkit.offload
    @swapkit.checkpoint
    def both(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    before = copied()
    assert count(lambda x: both(x * 1)) == 1
    assert copied() == before


def test_function_when_decorated_once_more_then_the_first_result_stays_as_it_was() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    once = swapkit.offload(plain)
    twice = swapkit.checkpoint(once)
    assert count(lambda x: once(x * 1)) == 0
    assert count(lambda x: twice(x * 1)) == 1


def test_scope_when_around_a_region_then_what_the_region_is_handed_is_swapped() -> None:
    @swapkit.checkpoint
    def region(x: torch.Tensor, *, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return (x * parts["scale"]).sin().exp()

    def run(x: torch.Tensor) -> torch.Tensor:
        with swapkit.offload():
            return region(x * 1, parts={"scale": x * 2})

    before = copied()
    assert torch.equal(gradient(run), gradient(lambda x: ((x * 1) * (x * 2)).sin().exp()))
    nbytes = leaf().nbytes
    assert copied() - before == 2 * nbytes


def test_keep_when_on_the_same_part_then_what_it_is_handed_does_not_move() -> None:
    @swapkit.keep
    @swapkit.checkpoint
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    def run(x: torch.Tensor) -> torch.Tensor:
        with swapkit.offload():
            return region(x * 1)

    before = copied()
    assert count(run) == 1
    assert copied() == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_module_when_copied_then_the_copy_is_recomputed_and_stands_alone(how: str) -> None:
    model = swapkit.checkpoint(make_model(), r"layers\.\d", save=["mm"])
    expected = gradient(model)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert count(twin) == 3
    assert torch.equal(gradient(twin), expected)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((3,), {}, "3: expected a Module class"),
        ((None, "x"), {}, "pattern 'x' needs a model"),
        ((len, "x"), {}, "expected a Module, whose submodules"),
        ((torch.nn.Linear(2, 2), "("), {}, r"pattern '\('"),
        ((torch.nn.Linear(2, 2), "y"), {}, "pattern 'y' matches no submodule of Linear"),
        ((len, torch.ones(1)), {}, r"checkpoint\(function\)\(\*args\)"),
        ((), {"save": "mm"}, r"save='mm': expected a list, e.g. \['mm'\]"),
        ((), {"save": ["mmm"]}, "'mmm'.*mm"),
        ((), {"save": ["mm"], "offload": ["matmul"]}, "save= and offload= both name .*mm"),
        ((), {"save": ["mm"], "policy": print}, "policy= decides for every operator"),
        ((), {"policy": 3}, "policy=3: expected a function"),
        ((), {"swap_inputs": "yes"}, "swap_inputs='yes': expected True or False"),
        ((), {"save": None}, r"save=None: expected a list, e.g. \['mm'\]"),
        ((), {"offload": [["mm"]]}, "offload=.*: expected names or objects of torch.ops"),
        ((torch.nn.ModuleList(),), {}, "a ModuleList has no forward"),
        ((make_model(), "layers"), {}, "matches only layers, which have no forward"),
    ],
)
def test_argument_when_wrong_then_named(
    arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.checkpoint(*arguments, **options)


def test_options_when_given_then_they_are_the_choice() -> None:
    decorator = swapkit.checkpoint(save=["mm"], check_values=True, preserve_rng_state=False)
    assert decorator.what == Recompute(save=("mm",), check_values=True, preserve_rng_state=False)
