"""Counts and indices: normal forms, and the values that have none."""

from __future__ import annotations

import pytest

from swapkit.config.mindformers.selections import Layout, read_counts, read_indices
from swapkit.errors import InvalidConfiguration, WrongStage

TWO_BY_TWO = Layout(num_layers=8, pp_interleave_num=2, pipeline_stage=2)


def counts(value: object, layout: Layout = TWO_BY_TWO) -> object:
    return read_counts(value, layout, key="recompute").printed


@pytest.mark.promise("B1")
@pytest.mark.promise("B4")
@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (True, [[2, 2], [2, 2]]),
        (False, [[0, 0], [0, 0]]),
        ([3, 1], [[2, 1], [1, 0]]),
        ([3], [[2, 0], [1, 0]]),
        ([9, True], [[2, 2], [2, 2]]),
        ([False, 0], [[0, 0], [0, 0]]),
        ([], [[0, 0], [0, 0]]),
        ((True, 1), [[2, 1], [2, 0]]),
        ([[9, 1], [False, True]], [[2, 1], [0, 2]]),
        (((1, 0), (0, -1)), [[1, 0], [0, -1]]),
        ([True, [1, 0]], [[2, 2], [1, 0]]),
        ([False, (1, True)], [[0, 0], [1, 2]]),
        ([[1]], [[1]]),
        ([[1, 0, False], [0, 0], [False]], [[1, 0, 0], [0, 0], [0]]),
        (["any", "names"], [[2, 2], [2, 2]]),
    ],
)
def test_counts_when_normalised_then_one_number_for_each_slot(value: object, rows: object) -> None:
    assert counts(value) == rows


def test_counts_when_a_chunk_is_full_then_the_rest_goes_to_the_others() -> None:
    uneven = Layout(num_layers=5, offset=[[0], [1], [1]], pp_interleave_num=3, pipeline_stage=1)
    assert uneven.table == ((1,), (2,), (2,))
    assert counts([4], uneven) == [[1], [2], [1]]
    assert counts([2], uneven) == [[1], [1], [0]]


def test_counts_when_read_then_the_value_is_unchanged() -> None:
    value = [[9, True], False]
    counts(value)
    assert value == [[9, True], False]
    assert value[0][1] is True  # type: ignore[index]


@pytest.mark.parametrize(
    "value", [None, 1, 1.0, "all", {"a": True}, [1.0, 0], ["a", 1], [1, [1, 0]], [[[1]]], [["a"]]]
)
def test_counts_when_of_another_form_then_error_names_key_and_value(value: object) -> None:
    with pytest.raises(InvalidConfiguration, match="Illegal input list for recompute: ") as caught:
        counts(value)
    assert repr(value) in str(caught.value)
    assert "Give True or False for all layers, or how many" in str(caught.value)


@pytest.mark.parametrize("value", [[1, 0, 0], [[1, 0, 1]], [[0], [0], [1]], [[0], [0], True]])
def test_counts_when_more_than_slots_then_error(value: object) -> None:
    with pytest.raises(WrongStage, match="stages") as caught:
        counts(value)
    assert isinstance(caught.value, IndexError)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [[-1], [0, -3]])
def test_counts_when_negative_for_a_stage_then_error_instead_of_a_hang(value: object) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot select") as caught:
        counts(value)
    assert repr(value) in str(caught.value)


def test_counts_when_a_slot_has_none_then_error_for_its_layers_only() -> None:
    selection = read_counts([[2, 1]], TWO_BY_TWO, key="recompute")
    covered = [selection.covers(TWO_BY_TWO.find_place(layer)) for layer in range(4)]
    assert covered == [True, True, True, False]
    with pytest.raises(WrongStage, match=r"recompute=\[\[2, 1\]\] has no count for layer 4"):
        selection.covers(TWO_BY_TWO.find_place(4))


@pytest.mark.promise("B14")
def test_indices_when_read_then_layers_by_index_whatever_their_stage() -> None:
    places = [TWO_BY_TWO.find_place(layer) for layer in range(8)]
    for value, layers in (
        ([0, 3, 99, -1], [0, 3]),
        ([True, 3], [1, 3]),
        ([], []),
        ((0, 2), [0, 2]),
        (False, []),
        (True, list(range(8))),
    ):
        selection = read_indices(value, key="recompute")
        assert [place.layer for place in places if selection.covers(place)] == layers
    assert read_indices([True, 3], key="recompute").printed == [True, 3]
    assert read_indices(True, key="recompute").printed is True


@pytest.mark.parametrize("value", [None, 1, ([0],), [[0]], ["a"], [1.0], {"a": [0]}])
def test_indices_when_of_another_form_then_error_names_key_and_value(value: object) -> None:
    with pytest.raises(InvalidConfiguration, match="Illegal input list for layers: ") as caught:
        read_indices(value, key="layers")
    assert repr(value) in str(caught.value)
