"""Stages and chunks: how layers are spread, and which numbers do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from swapkit.config.mindformers.selections import Layout, ModelInputs, lay_out
from swapkit.errors import InvalidArgument, InvalidConfiguration, WrongType


@pytest.mark.promise("B1")
def test_layout_when_two_chunks_then_layers_go_through_all_stages_of_the_first_one() -> None:
    layout = Layout(num_layers=10, offset=[[0, 1], [0, 1]], pp_interleave_num=2, pipeline_stage=2)
    assert layout.table == ((2, 3), (2, 3))
    assert layout.cumulative == ((2, 5), (7, 10))
    assert [layout.stage(layer) for layer in range(10)] == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert [layout.chunk(layer) for layer in range(10)] == [0] * 5 + [1] * 5
    assert [layout.find_place(layer).index for layer in range(10)] == [0, 1, 0, 1, 2] * 2


def test_layout_when_a_slot_is_empty_then_skipped() -> None:
    layout = Layout(num_layers=4, offset=[-1, 1, 1], pipeline_stage=3)
    assert layout.table == ((0, 2, 2),)
    assert [layout.stage(layer) for layer in range(4)] == [1, 1, 2, 2]


def test_layout_when_interleaving_is_off_then_one_chunk() -> None:
    assert Layout(num_layers=4, pp_interleave_num=2, pipeline_interleave=False).table == ((4,),)
    assert Layout(num_layers=4, pp_interleave_num=2).table == ((2,), (2,))


def test_layout_when_stage_num_then_start_stage_counts_and_else_not() -> None:
    shifted = Layout(num_layers=4, pipeline_stage=8, start_stage=3, stage_num=2)
    assert [shifted.stage(layer) for layer in range(4)] == [3, 3, 4, 4]
    assert shifted.find_place(3).stage == 1
    assert Layout(num_layers=4, start_stage=3).stage(0) == 0


@pytest.mark.parametrize("layer", [4, 5])
def test_layout_when_asked_for_a_layer_that_is_not_there_then_error(layer: int) -> None:
    with pytest.raises(InvalidArgument, match=f"layer {layer}: this layout has 4 layers"):
        Layout(num_layers=4).find_place(layer)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"num_layers": -1}, InvalidConfiguration, "num_layers=-1: expected at least 0"),
        ({"num_layers": 2.0}, WrongType, "num_layers=2.0: expected a whole number of at least 0"),
        ({"pipeline_stage": 0}, InvalidConfiguration, "pipeline_stage=0: expected at least 1"),
        ({"pipeline_stage": True}, WrongType, "pipeline_stage=True: expected a whole number"),
        (
            {"pp_interleave_num": 0},
            InvalidConfiguration,
            "pp_interleave_num=0: expected at least 1",
        ),
        ({"offset": [0]}, InvalidConfiguration, r"`pp` \(2\), but got \(1\). `offset`: \[0\]"),
        ({"offset": []}, InvalidConfiguration, r"`pp` \(2\), but got \(0\)"),
        ({"offset": [[0, 0], [0]]}, InvalidConfiguration, r"`pp` \(2\), but got \(1\)"),
        ({"offset": [[0, 0], [0, 0]]}, InvalidConfiguration, r"`pp_interleave_num` \(1\), but got"),
        ({"offset": [1, 0]}, InvalidConfiguration, r"sum of `offset` \(1\) .* = 0; .* \[1, 0\]"),
        ({"offset": [-1, 0]}, InvalidConfiguration, r"sum of `offset` \(-1\) should equal"),
        (
            {"offset": "0"},
            WrongType,
            "offset='0': expected a whole number, a list with one for each",
        ),
        ({"offset": [0.5, 0]}, WrongType, r"offset=\[0.5, 0\]: expected a whole number"),
        ({"offset": True}, WrongType, "offset=True: expected a whole number"),
    ],
)
def test_layout_when_a_number_does_not_fit_then_error_names_it(
    numbers: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Layout(**{"num_layers": 4, "pipeline_stage": 2, **numbers})


def test_lay_out_when_given_and_in_the_document_then_the_given_one_counts() -> None:
    inputs = ModelInputs(num_layers=8, offset=[0, 0], pipeline_stage=2, pp_interleave_num=2)
    assert lay_out(inputs).table == ((2, 2), (2, 2))
    given = lay_out(inputs, num_layers=3, offset=0, pp_interleave_num=1, pipeline_stage=3)
    assert given.table == ((1, 1, 1),)
    off = ModelInputs(num_layers=4, pp_interleave_num=2, pipeline_interleave=False)
    assert lay_out(off).table == ((4,),)


def test_lay_out_when_nobody_says_how_many_layers_then_error() -> None:
    with pytest.raises(InvalidConfiguration, match="num_layers is unknown"):
        lay_out(ModelInputs())
