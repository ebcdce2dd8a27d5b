"""What a configuration says in vain is told: what names nothing, and what has no effect."""

from __future__ import annotations

import re
from typing import Any

import pytest

import swapkit
from tests.unit.scoped import make_model

LOGGER = "swapkit.settings"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [each for each in caplog.records if each.name == LOGGER]
    texts = [each.getMessage() for each in records if each.levelname == "WARNING"]
    return [text for text in texts if "is empty" not in text]


def op_swap(name: str, layers: Any) -> dict[str, Any]:
    entry = {"op_name": name, "backward_prefetch": 2, "layers": layers}
    return {"swap_config": {"swap": True, "op_swap": [entry]}}


@pytest.mark.promise("B2")
def test_pattern_when_it_names_nothing_then_warned_with_what_there_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = {"recompute_config": {"select_recompute": ["up.mul", "up", r"bogus\.x"]}}
    configuration = swapkit.configure(make_model(), document)
    assert configuration.unmatched == ["up.mul", r"bogus\.x"]
    first, second = warnings(caplog)
    assert first.startswith("select_recompute: up.mul matches nothing in any layer")
    assert second == (
        r"select_recompute: bogus\.x matches nothing in any layer; a layer has the parts up, down "
        "and the operators mul, sin, tanh"
    )


@pytest.mark.promise("B10")
def test_pattern_of_a_swap_when_it_names_nothing_then_warned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = op_swap("attention", [0])
    document["swap_config"]["op_swap"] *= 2
    configuration = swapkit.configure(make_model(), document)
    assert configuration.unmatched == ["attention"]
    assert [text.split(";")[0] for text in warnings(caplog)] == [
        "op_swap: attention matches nothing in any layer"
    ]


@pytest.mark.promise("B2")
def test_pattern_when_it_is_for_no_layer_then_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    document = {"recompute_config": {"select_recompute": {"bogus": False}}}
    assert swapkit.configure(make_model(), document).unmatched == []
    assert warnings(caplog) == []


@pytest.mark.promise("B14")
def test_layers_when_there_are_none_of_these_numbers_then_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swapkit.configure(
        make_model(), {**op_swap("up", [2, 3, -1]), "recompute_config": {"recompute": [7]}}
    )
    assert warnings(caplog) == [
        "recompute: layers [7] do not exist; the last layer is 2",
        "op_swap(up): layers [3, -1] do not exist; the last layer is 2",
    ]


@pytest.mark.promise("B13")
def test_swaps_when_what_is_around_is_recomputed_then_said_for_the_first_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = op_swap("up|down|tanh|mul|sin", True)
    swapkit.configure(make_model(), {**document, "recompute_config": {"recompute": [0, 1, 2]}})
    (text,) = [text for text in warnings(caplog) if "no effect" in text]
    assert text.startswith("no effect: layers.0.mul (layers.0 is recomputed), layers.0.sin (")
    assert text.endswith(" and 3 more")
    assert len(re.findall(r"is recomputed\)", text)) == 12
