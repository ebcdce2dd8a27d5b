"""Patterns for paths of modules, with the meaning that they have in the original."""

from __future__ import annotations

import pytest
from torch import nn

from swapkit.compat.mindspeed.fsdp_memory import (
    compile_pattern,
    find_modules,
    recompute_modules,
    swap_activation_modules,
)
from swapkit.errors import InvalidArgument


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers.0.mlp", "layers.0.mlp", True),
        ("layers.0.mlp", "layers.0.mlp.up", False),
        ("layers.0", "layersx0", False),
        ("*.mlp", "model.layers.7.mlp", True),
        ("*", "", True),
        ("*", "a.b", True),
        ("layers.?", "layers.3", True),
        ("layers.?", "layers.31", False),
        ("layers.{*}", "layers.31", True),
        ("layers.{*}", "layers.last", False),
        ("layers.{2-4}.mlp", "layers.2.mlp", True),
        ("layers.{2-4}.mlp", "layers.4.mlp", True),
        ("layers.{2-4}.mlp", "layers.5.mlp", False),
        ("layers.{2-4}.mlp", "layers.1.mlp", False),
        ("a.{0-1}.b.{*}", "a.1.b.77", True),
        ("a.{0-1}.b.{*}", "a.2.b.77", False),
        ("a(b)+", "a(b)+", True),
    ],
)
def test_pattern_when_applied_then_matches_as_in_the_original(
    pattern: str, path: str, *, matches: bool
) -> None:
    assert compile_pattern(pattern).matches(path) is matches


@pytest.mark.parametrize(
    "pattern", ["a.{3-1}", "a.{x-y}", "a.{1}", "a.{}", "a.{1-2-3}", "{0-" + "1" * 5000 + "}"]
)
def test_pattern_when_braces_hold_something_else_then_the_error_shows_it(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is neither \{\*\} nor a range"):
        compile_pattern(pattern)


def test_modules_when_several_patterns_name_one_then_found_once() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])})
    found, unmatched = find_modules(model, ["layers.{*}", "*.1", "none"])
    assert list(found) == ["layers.0", "layers.1"]
    assert unmatched == ["none"]


@pytest.mark.parametrize("plan", ["layers.0", None, 3])
def test_plan_when_it_is_no_list_then_refused(plan: object) -> None:
    with pytest.raises(InvalidArgument, match="expected a list of patterns"):
        swap_activation_modules(nn.Linear(1, 1), plan)  # type: ignore[arg-type]


def test_plan_when_it_matches_nothing_then_swaps_are_logged_and_recomputation_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert swap_activation_modules(model, ["absent"]) is model
    assert "no module of Sequential matches 'absent'" in caplog.text
    with pytest.raises(InvalidArgument, match=r"\['absent'\] matches no module of Sequential"):
        recompute_modules(model, ["absent"])
