"""Alike layers: the optimum against all assignments, on fixtures like those of other systems.

Other systems measure one layer: what each module leaves for backward, what it keeps when it is
recomputed, and its seconds, in MB and ms, two levels deep. The figures here are made up in that
form, at the sizes that are known of theirs: 10 and 32 layers of a dense transformer with one or two
microbatches in flight, and a mixture of experts with 27 modules that can be treated.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from swapkit.ir.plans import Action
from tests.oracles.alike_layers import (
    Assignment,
    LayerGroup,
    LayerOption,
    Module,
    assign_layers,
    find_choices,
)

GIB = 1024.0


def module(name: str, nbytes: float, kept: float, seconds: float, *parts: Module) -> Module:
    return Module(name=name, nbytes=nbytes, kept_bytes=kept, seconds=seconds, parts=parts)


def make_dense_layer() -> Module:
    """A transformer layer, in MB and ms."""
    attention = (
        module("attention.qkv", 200, 64, 9.5),
        module("attention.core", 1600, 200, 23.0),
        module("attention.dense", 64, 64, 8.5),
    )
    mlp = (
        module("mlp.gate", 170, 64, 9.4),
        module("mlp.up", 170, 64, 8.9),
        module("mlp.down", 64, 170, 13.8),
    )
    return module(
        "layer",
        3300,
        64,
        100.0,
        module("input_norm", 380, 64, 2.0),
        module("attention", 1800, 80, 51.0, *attention),
        module("post_norm", 380, 64, 1.9),
        module("mlp", 740, 64, 38.5, *mlp),
    )


def make_expert_layer(seed: int) -> Module:
    """27 modules below the layer; some can be swapped, and hidden."""
    rng = np.random.default_rng(seed)

    def draw(name: str, *parts: Module) -> Module:
        nbytes = sum(part.nbytes for part in parts) + float(rng.uniform(5, 200))
        return Module(
            name=name,
            nbytes=nbytes,
            kept_bytes=float(rng.uniform(5, 60)),
            seconds=sum(part.seconds for part in parts) + float(rng.uniform(0.1, 4)),
            swapped_bytes=0.9 * nbytes,
            swap_seconds=float(rng.choice([0.0, nbytes / 25])) if rng.random() < 0.7 else None,
            parts=parts,
        )

    experts = [
        draw(f"moe.{i}", *(draw(f"moe.{i}.{part}") for part in ("in", "act", "out")))
        for i in range(4)
    ]
    attention = draw("attention", *(draw(f"attention.{part}") for part in ("q", "kv", "core", "o")))
    router = draw("router", draw("router.gate"), draw("router.dispatch"))
    parts = (draw("norm"), attention, draw("post_norm"), draw("moe", *experts), router)
    return draw("layer", *parts)


def count_modules(each: Module) -> int:
    return 1 + sum(map(count_modules, each.parts))


def list_all(each: Module) -> list[tuple[float, float]]:
    """Every way to treat a module, bytes and seconds more."""
    ways = [
        (sum(way[0] for way in ways), sum(way[1] for way in ways))
        for ways in itertools.product(*map(list_all, each.parts))
    ]
    ways.append((each.kept_bytes - each.nbytes, each.seconds))
    if each.swap_seconds is not None:
        ways.append((-each.swapped_bytes, each.swap_seconds))
    return ways


def assign_by_force(
    choices: tuple[LayerOption, ...], layer: float, groups: list[LayerGroup], budget: float
) -> float:
    """All multisets of choices for each group, bytes and seconds by addition."""
    sums = [(0.0, 0.0)]
    for group in groups:
        one = [
            (
                sum(layer + choices[i].nbytes for i in picked) * group.in_flight,
                sum(choices[i].seconds for i in picked),
            )
            for picked in itertools.combinations_with_replacement(range(len(choices)), group.layers)
        ]
        sums = [(a + c, b + d) for a, b in sums for c, d in one]
    return min((seconds for nbytes, seconds in sums if nbytes <= budget), default=np.inf)


def check(assignment: Assignment, layer: float, groups: list[LayerGroup], budget: float) -> None:
    """The counts are what the sums say, of as many layers as there are, within the budget."""
    nbytes = seconds = 0.0
    for group, counts in zip(groups, assignment.counts, strict=True):
        assert sum(count for _, count in counts) == group.layers
        nbytes += sum(count * (layer + each.nbytes) for each, count in counts) * group.in_flight
        seconds += sum(count * each.seconds for each, count in counts)
    assert assignment.nbytes == pytest.approx(nbytes)
    assert assignment.seconds == pytest.approx(seconds)
    assert nbytes <= budget * (1 + 1e-12)


@pytest.mark.promise("A2")
@pytest.mark.parametrize("seed", range(5))
def test_find_choices_when_modules_are_nested_then_the_best_of_all_ways(seed: int) -> None:
    layer = make_expert_layer(seed)
    small = module("small", 900, 20, 30, layer.parts[1], layer.parts[3].parts[0])
    ways = np.array(list_all(small))
    no_more = (ways[:, None, :] <= ways[None, :, :]).all(axis=2)
    is_worse = (no_more & ~no_more.T).any(axis=0)
    best = np.unique(ways[~is_worse], axis=0)
    found = np.array([choice[:2] for choice in find_choices([small])])
    assert found[::-1] == pytest.approx(best)


def test_find_choices_when_a_module_is_treated_then_its_parts_are_not() -> None:
    for choice in find_choices([make_dense_layer()]):
        names = [name for name, _ in choice.actions]
        assert len(set(names)) == len(names)
        for name in names:
            assert name != "layer" or len(names) == 1
            assert not any(other.startswith(f"{name}.") for other in names)


def test_find_choices_when_swapping_is_hidden_then_it_costs_nothing() -> None:
    free = Module(name="a", nbytes=8.0, seconds=1.0, swapped_bytes=6.0, swap_seconds=0.0)
    choices = find_choices([free])
    assert choices[0] == LayerOption(-6.0, 0.0, (("a", Action.SWAP),))
    assert choices[1] == LayerOption(-8.0, 1.0, (("a", Action.RECOMPUTE),))


def test_find_choices_when_there_are_very_many_ways_then_few_are_left() -> None:
    layer = make_expert_layer(0)
    assert count_modules(layer) == 1 + 27
    assert 2 < len(find_choices([layer])) < 200


@pytest.mark.parametrize("in_flight", [1.0, 2.0])
@pytest.mark.parametrize("budget", [20 * GIB, 17.5 * GIB, 15 * GIB, 10 * GIB, 6 * GIB])
def test_assign_layers_when_few_layers_then_as_good_as_all_assignments(
    budget: float, in_flight: float
) -> None:
    layer = make_dense_layer()
    choices = find_choices([layer])
    groups = [LayerGroup(4, in_flight)]
    assignment = assign_layers(choices, layer.nbytes, groups, budget / 2)
    expected = assign_by_force(choices, layer.nbytes, groups, budget / 2)
    if assignment is None:
        assert expected == np.inf
    else:
        assert assignment.seconds == pytest.approx(expected)
        check(assignment, layer.nbytes, groups, budget / 2)


@pytest.mark.promise("A2")
@pytest.mark.parametrize("seed", range(20))
def test_assign_layers_when_chunks_differ_then_as_good_as_all_assignments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    choices = find_choices(
        module(name, *rng.uniform((50, 1, 1), (500, 40, 40)).tolist()) for name in "abc"
    )
    groups = [LayerGroup(2, 3.0), LayerGroup(2, 2.0), LayerGroup(1, 1.0)]
    everything = 1500.0 * 11
    for share in (0.15, 0.4, 0.7, 0.95):
        budget = share * everything
        assignment = assign_layers(choices, 1500.0, groups, budget)
        expected = assign_by_force(choices, 1500.0, groups, budget)
        assert (np.inf if assignment is None else assignment.seconds) == pytest.approx(expected)
        if assignment is not None:
            check(assignment, 1500.0, groups, budget)


@pytest.mark.parametrize(
    ("layers", "in_flight", "budget"),
    [(10, 2.0, 34.8), (10, 2.0, 36.8), (32, 1.0, 34.8), (32, 2.0, 34.8), (32, 2.0, 36.8)],
)
def test_assign_layers_when_there_are_many_then_within_the_budget_and_near_the_relaxation(
    layers: int, in_flight: float, budget: float
) -> None:
    layer = make_dense_layer()
    choices = find_choices([layer])
    groups = [LayerGroup(layers, in_flight)]
    assignment = assign_layers(choices, layer.nbytes, groups, budget * GIB)
    assert assignment is not None
    check(assignment, layer.nbytes, groups, budget * GIB)
    # Mixing two choices in any proportion is a bound; whole layers take at most one layer's more.
    room = budget * GIB / layers / in_flight - layer.nbytes
    hull = min(
        a.seconds + (b.seconds - a.seconds) * (a.nbytes - room) / (a.nbytes - b.nbytes)
        for a in choices
        for b in choices
        if a.nbytes > room >= b.nbytes
    )
    steps = [b.seconds - a.seconds for a, b in itertools.pairwise(choices)]
    assert layers * hull - 1e-9 <= assignment.seconds <= layers * hull + max(steps)


def test_assign_layers_when_experts_are_swapped_and_recomputed_then_as_all_assignments() -> None:
    layer = make_expert_layer(1)
    choices = find_choices([layer])
    groups = [LayerGroup(2)]
    least = 2 * (layer.nbytes + min(choice.nbytes for choice in choices))
    for share in (0.05, 0.2, 0.5, 0.8):
        budget = least + share * (2 * layer.nbytes - least)
        assignment = assign_layers(choices, layer.nbytes, groups, budget)
        assert assignment is not None
        expected = assign_by_force(choices, layer.nbytes, groups, budget)
        assert assignment.seconds == pytest.approx(expected)


def test_assign_layers_when_nothing_fits_then_none() -> None:
    layer = make_dense_layer()
    assert assign_layers(find_choices([layer]), layer.nbytes, [LayerGroup(4)], 255.0) is None


def test_assign_layers_when_everything_fits_then_nothing_is_done() -> None:
    layer = make_dense_layer()
    assignment = assign_layers(find_choices([layer]), layer.nbytes, [LayerGroup(4)], 4 * 3300.0)
    assert assignment is not None
    assert assignment.seconds == 0.0
    assert assignment.counts == (((LayerOption(0.0, 0.0, ()), 4),),)
