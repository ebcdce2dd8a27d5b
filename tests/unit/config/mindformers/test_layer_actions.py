"""Settings: what is done with each layer, and in which lines it is logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.config.mindformers.documents import Document, check_rules, read_document
from swapkit.config.mindformers.layer_actions import LayerActions, NormalSettings, settle
from swapkit.config.mindformers.selections import Layout
from swapkit.errors import InvalidConfiguration, WrongType

if TYPE_CHECKING:
    from swapkit.config.mindformers.patterns import LayerModule


@dataclass(eq=False)
class Node:
    operators: tuple[str, ...] = ()
    children: list[tuple[str, LayerModule]] = field(default_factory=list)


LAYER = Node(
    operators=("add",),
    children=[
        ("norm", Node(operators=("norm",))),
        ("feed_forward", Node(operators=("mul",), children=[("w1", Node(operators=("matmul",)))])),
    ],
)
BY_NAME: dict[str, Any] = {"select_recompute": {r"feed_forward\.mul": [0]}}


def read(swap: dict[str, Any] | None = None, **recompute: object) -> Document:
    return read_document({"recompute_config": recompute, "swap_config": swap})


def settled(swap: dict[str, Any] | None = None, **recompute: object) -> NormalSettings:
    return settle(read(swap, **recompute), Layout(num_layers=2))


def act(settings: NormalSettings, layer: int = 0) -> LayerActions:
    return settings.actions(layer, LAYER)


def texts(actions: LayerActions) -> list[str]:
    return [line.text for line in actions.log_lines]


@pytest.mark.promise("B4")
def test_layer_when_fully_recomputed_then_no_selection_but_exclusions() -> None:
    settings = settled(
        recompute=[1],
        select_recompute=True,
        select_recompute_exclude=[r"feed_forward\.w1\.matmul"],
    )
    first, second = act(settings), act(settings, 1)
    assert (first.full, first.select, second.full) == (True, (), False)
    assert [str(match) for match in second.select] == ["feed_forward.mul"]
    assert [str(match) for match in second.select_exclude] == ["feed_forward.w1.matmul"]
    assert texts(first) == [
        "Set full recompute at layer 0",
        "Set select recompute exclude at layer 0: feed_forward.w1.matmul",
    ]


@pytest.mark.promise("B6")
def test_slices_when_recompute_is_no_bool_then_not_said() -> None:
    said = act(settled(recompute=True, recompute_slice_activation=True))
    assert said.slice_activation is True
    assert act(settled(recompute=[2], recompute_slice_activation=True)).slice_activation is None
    assert act(settled(recompute_slice_activation=True)).slice_activation is None


def test_module_when_named_for_communication_or_exclusion_then_said_and_left_alone() -> None:
    actions = act(
        settled(
            select_comm_recompute=["norm"],
            select_recompute_exclude=[r"feed_forward\.w1"],
        )
    )
    assert (actions.comm, actions.select_exclude) == ((), ())
    tail = "is expected to be operation but got cell, this configuration will not be effective."
    assert texts(actions) == [
        f"For communication recompute, .norm {tail}",
        f"For select recompute/comm_recompute exclude, feed_forward.w1 {tail}",
    ]


def test_operator_when_named_twice_then_once() -> None:
    names = [r"feed_forward\.mul", r"feed_forward\.m.l"]
    actions = act(settled(select_recompute=names))
    assert [str(match) for match in actions.select] == ["feed_forward.mul"]


@pytest.mark.promise("B14")
@pytest.mark.parametrize(("layers", "counts"), [(True, 1), (False, 0), ([0], 1), ([1], 0)])
def test_pattern_when_swap_is_on_then_its_layers_are_a_bool_or_a_list(
    layers: object, counts: int
) -> None:
    document = read({"swap": True}, select_recompute={r"feed_forward\.mul": layers})
    check_rules(document, Layout(num_layers=2))
    actions = act(settle(document, Layout(num_layers=2)))
    assert len(actions.select) == counts


@pytest.mark.promise("B9")
@pytest.mark.promise("B10")
def test_swaps_when_both_are_given_then_operators_after_the_layer_in_order() -> None:
    actions = act(
        settled(
            {
                "swap": True,
                "layer_swap": [{"backward_prefetch": 2, "layers": [0]}],
                "op_swap": [
                    {"op_name": r"feed_forward\.w1", "backward_prefetch": 7, "layers": True},
                    {"op_name": "feed_forward", "backward_prefetch": 3, "layers": [0]},
                    {"op_name": "feed_forward", "backward_prefetch": 4, "layers": [0, 1]},
                ],
            }
        )
    )
    assert actions.layer_swap == 2
    assert [(str(match), n) for match, n in actions.op_swaps] == [
        ("feed_forward.w1", 7),
        ("feed_forward", 3),
    ]
    assert actions.pipeline_stage is None
    assert texts(actions) == [
        f"Set layer swap at layer 0{' ' * 29}and value is: 2",
        "Set op_swap at layer 0:  feed_forward.w1, value=7, .feed_forward, value=3",
    ]


@pytest.mark.promise("B7")
def test_swaps_when_swap_is_off_then_inert() -> None:
    actions = act(settled({"layer_swap": [{"backward_prefetch": 1, "layers": True}]}))
    assert (actions.layer_swap, actions.op_swaps, actions.pipeline_stage) == (None, (), 0)
    assert settled({}).swapping is None


@pytest.mark.parametrize(
    ("prefetch", "error", "message"),
    [
        (-1, InvalidConfiguration, "must >= 0, but got '-1' with type 'int'. layer_swap.backward_"),
        ("many", InvalidConfiguration, "got 'many'. layer_swap.backward_prefetch takes a whole"),
        (1.5, WrongType, "must be int, but got 'float': 1.5"),
        (None, WrongType, "must be int, but got 'NoneType': None"),
        (True, WrongType, "must be int and must >= 0, but got 'True' with type 'bool'."),
    ],
)
def test_prefetch_when_bad_then_error_where_it_is_used(
    prefetch: object, error: type[Exception], message: str
) -> None:
    swap = {"swap": True, "layer_swap": [{"backward_prefetch": prefetch, "layers": [1]}]}
    settings = settled(swap)
    assert act(settings).layer_swap is None
    with pytest.raises(error, match=message):
        act(settings, 1)


@pytest.mark.parametrize("prefetch", [0, 3, "Auto"])
def test_prefetch_when_good_then_as_given(prefetch: object) -> None:
    swap = {"swap": True, "layer_swap": [{"backward_prefetch": prefetch, "layers": [0]}]}
    assert act(settled(swap)).layer_swap == prefetch


@pytest.mark.promise("B13")
def test_conflicts_when_recomputed_parts_are_swapped_then_warned() -> None:
    everywhere = {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}
    nothing_works = "All layers and ops that are enabled swap do not work!"
    because = "is enabled swap do not work! Because it is enabled recompute."
    for swap, recompute, warnings in (
        (everywhere, {"recompute": [1]}, [f"All operator in layer 1 that{' ' * 31}{because}"]),
        (
            everywhere,
            {"recompute": True},
            [f"{nothing_works}{' ' * 27}Because recompute = True."],
        ),
        (everywhere, BY_NAME, [rf"feed_forward\.mul operator in layer 0 that{' ' * 31}{because}"]),
        (everywhere, {}, []),
    ):
        lines = settled(swap, **recompute).log_lines
        assert [line.text for line in lines if line.level == logging.WARNING] == warnings


@pytest.mark.promise("B2")
def test_patterns_when_an_empty_list_then_none_and_not_the_default_ones() -> None:
    patterns = settled(select_recompute=[], select_comm_recompute=()).recomputation.patterns
    assert patterns["select_recompute"] == patterns["select_comm_recompute"] == {}
    assert list(settled().recomputation.patterns["select_recompute"]) == [
        r"feed_forward\.mul",
        r"feed_forward\.w1\.activation\.silu",
    ]


def test_exclusion_when_like_a_pattern_then_that_is_removed_for_all_layers() -> None:
    settings = settled(
        select_recompute=[r"feed_forward\.w1", r"feed_forward\.mul"],
        select_recompute_exclude={r".*\.mul": [0]},
    )
    assert list(settings.recomputation.patterns["select_recompute"]) == [r"feed_forward\.w1"]
    assert settings.log_lines[6].text == (
        r"The pattern feed_forward\.mul in select_recompute conflicts with "
        "select_recompute_exclude and will be removed."
    )


def test_exclusion_when_swap_is_on_then_counted_but_not_applied() -> None:
    settings = settled({"swap": True}, recompute=True, select_recompute_exclude={"add": [1]})
    assert settings.recomputation.patterns["select_recompute_exclude"]["add"].printed == [[1]]
    assert act(settings).select_exclude == ()


def test_pattern_when_no_text_then_error() -> None:
    with pytest.raises(WrongType, match="select_recompute: the pattern 3 is not a string"):
        settled(select_recompute={3: True})


def test_flavour_when_unknown_then_error() -> None:
    with pytest.raises(InvalidConfiguration, match="flavour='old': expected one of"):
        settle(Document(), Layout(num_layers=1), "old")  # type: ignore[arg-type]


def test_flavour_when_mcore_then_neither_swap_nor_exclusions() -> None:
    document = read({"swap": True}, recompute=[1], select_recompute_exclude=[r"feed_forward\.mul"])
    actions = act(settle(document, Layout(num_layers=2), "mcore"))
    assert (actions.full, actions.select_exclude, actions.op_swaps) == (True, (), ())
