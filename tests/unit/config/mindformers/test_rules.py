"""The rules that the original's trainer checks first."""

from __future__ import annotations

from typing import Any

import pytest

from swapkit.config.mindformers.documents import check_rules, read_document
from swapkit.config.mindformers.selections import Layout
from swapkit.errors import InvalidConfiguration

LAYOUT = Layout(num_layers=4, pipeline_stage=2)


def check(recompute: dict[str, Any], swap: dict[str, Any]) -> None:
    check_rules(read_document({"recompute_config": recompute, "swap_config": swap}), LAYOUT)


@pytest.mark.parametrize(
    ("recompute", "swap"),
    [
        ({"recompute": [1, 1]}, {}),
        ({"recompute": [[1, 1, 1]]}, {}),
        ({"recompute": (1, 1), "select_recompute": {"a": (1, 1, 1)}}, {}),
        ({"select_recompute": {"a": (1,)}}, {"swap": True}),
        ({"recompute": [0, 1, 2, 3]}, {"swap": True}),
        ({"select_recompute": {"a": True, "b": [1]}}, {"swap": True}),
        ({"recompute": None}, {"swap": False, "default_prefetch": 0}),
    ],
)
def test_rules_when_kept_then_silent(recompute: dict[str, Any], swap: dict[str, Any]) -> None:
    check(recompute, swap)


@pytest.mark.parametrize(
    ("recompute", "swap", "message"),
    [
        ({"recompute": [1, 1, 1]}, {}, r"length of recompute .*\(\[1, 1, 1\]\) > pp\(2\)"),
        ({"select_comm_recompute": [1] * 3}, {}, "length of select_comm_recompute should"),
        ({"recompute": None}, {"swap": True}, "Type of recompute must be .* It is None"),
        ({"recompute": [[1]]}, {"swap": True}, r"element of it must be int, .* It is \[\[1\]\]"),
        ({"select_recompute": {"a": 1}}, {"swap": True}, r"Layer info of select_rec.*It is 1;"),
        ({"recompute": (1, 1, 1)}, {}, r"length of recompute .*\(1, 1, 1\)\) > pp\(2\)"),
        ({}, {"swap": True, "default_prefetch": 0}, "default_prefetch must be int .* and 0"),
        ({}, {"swap": True, "default_prefetch": "1"}, "default_prefetch must be int .* and 1"),
        (
            {},
            {"swap": True, "layer_swap": {"backward_prefetch": "Auto", "layers": [0]}},
            "Type of layer_swap.backward_prefetch must be int .* but get Auto",
        ),
        (
            {},
            {"swap": True, "op_swap": {"op_name": "a", "backward_prefetch": 1, "layers": [[0]]}},
            r"type of op_swap\(a\).layers is list or tuple",
        ),
    ],
)
def test_rules_when_broken_then_error_names_key_and_value(
    recompute: dict[str, Any], swap: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        check(recompute, swap)
