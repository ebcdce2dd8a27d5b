"""`layer_swap` and `op_swap`: normal forms, and entries that are wrong or contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from swapkit.config.mindformers.documents import SwapConfig, SwapEntries, SwapEntry
from swapkit.errors import InvalidConfiguration, WrongKey, WrongType


def layers(prefetch: object, where: object) -> dict[str, Any]:
    return {"backward_prefetch": prefetch, "layers": where}


def entry(prefetch: object, where: object) -> SwapEntry:
    return SwapEntry(backward_prefetch=prefetch, layers=where)


@pytest.mark.promise("B7")
@pytest.mark.promise("B8")
def test_entries_when_neither_is_given_then_the_default_strategy() -> None:
    entries = SwapConfig(swap=True, default_prefetch=7).read_entries()
    assert entries == SwapEntries(op_swap={r".*\.flash_attention": (entry(7, True),)})


@pytest.mark.promise("B11")
@pytest.mark.parametrize("given", [{"layer_swap": []}, {"op_swap": []}])
def test_entries_when_an_empty_list_then_no_default_strategy(given: dict[str, Any]) -> None:
    assert SwapConfig(swap=True, **given).read_entries() == SwapEntries(op_swap={})


@pytest.mark.promise("B9")
@pytest.mark.promise("B10")
def test_entries_when_given_then_grouped_by_name_and_all_layers_stand_for_some() -> None:
    entries = SwapConfig(
        layer_swap=[layers(2, [2]), layers(2, True)],
        op_swap=[
            {"op_name": ["a", "b"], **layers(1, [0])},
            {"op_name": "a", **layers(3, (1, 2))},
            {"op_name": "b", **layers(1, True)},
        ],
    ).read_entries()
    assert entries.layer_swap == (entry(2, True),)
    assert entries.op_swap == {"a": (entry(1, [0]), entry(3, (1, 2))), "b": (entry(1, True),)}
    assert list(entries.op_swap) == ["a", "b"]
    assert SwapConfig(layer_swap=layers(3, [[0], [2]])).read_entries().layer_swap


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"layer_swap": "all"}, InvalidConfiguration, "layer_swap must be a list or dict.*'all'"),
        ({"op_swap": {1}}, InvalidConfiguration, "op_swap must be a list or dict"),
        (
            {"layer_swap": [1]},
            WrongType,
            r"layer_swap\[0\]=1: expected a mapping with the keys 'back",
        ),
        (
            {"op_swap": ["a"]},
            WrongType,
            r"op_swap\[0\]='a': expected .* 'op_name', 'backward_prefetch",
        ),
        ({"layer_swap": [layers(1, 3)]}, InvalidConfiguration, "layer_swap configuration: 3. Expe"),
        ({"layer_swap": [{}]}, InvalidConfiguration, "layer_swap configuration: None. Expected"),
        ({"layer_swap": [layers(1, [True])]}, InvalidConfiguration, r"\[True\]. .* list of ints"),
        (
            {"layer_swap": [{"layers": [0]}]},
            WrongKey,
            r"layer_swap\[0\]=.* 'backward_prefetch' is missing",
        ),
        ({"op_swap": [layers(1, [0])]}, WrongKey, r"op_swap\[0\]=.* 'op_name' is missing; give"),
        ({"op_swap": [{"op_name": 3}]}, InvalidConfiguration, "index 0: .* must be a string, list"),
        ({"op_swap": [{"op_name": [3]}]}, InvalidConfiguration, "must contain only strings"),
        (
            {"op_swap": [{"op_name": "a", **layers(1, 3)}]},
            InvalidConfiguration,
            "Invalid op_swap: a configuration: 3",
        ),
        (
            {"layer_swap": [layers(1, True), layers(2, [0])]},
            InvalidConfiguration,
            "at index 1: .*Inconsistent 'backward_prefetch' values",
        ),
    ],
)
@pytest.mark.parametrize("swap", [True, False])
def test_entries_when_bad_then_error_names_them_even_with_swap_off(
    given: dict[str, Any], error: type[Exception], message: str, *, swap: bool
) -> None:
    with pytest.raises(error, match=message):
        SwapConfig(swap=swap, **given)


def test_entries_when_prefetch_differs_without_all_layers_then_kept() -> None:
    config = SwapConfig(layer_swap=[layers(1, [0]), layers(2, [0, 1]), layers(3, False)])
    assert len(config.read_entries().layer_swap) == 3
