"""The examples of the original's description give the lines that it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swapkit.config.mindformers.documents import read_document
from swapkit.config.mindformers.layer_actions import settle
from swapkit.config.mindformers.selections import lay_out
from tests.golden.cases import Tree, load

EXAMPLES = Path(__file__).with_name("document_examples.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^## (\w+ ?\d?):.*?```yaml\n(.*?)```.*?```text\n(.*?)```", re.M | re.S)
DOCUMENTS = {name: (source, printed) for name, source, printed in EXAMPLE.findall(EXAMPLES)}
LLAMA = Tree(load()["meta"]["trees"]["llama"])
# What the description's text says beside the example; the others say it in their YAML.
FORTY_EIGHT_LAYERS: dict[str, Any] = {
    "num_layers": 48,
    "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    "pp_interleave_num": 2,
    "pipeline_stage": 5,
}


def log(name: str, only: str) -> list[str]:
    """Return the lines of an example that a search for `only` finds."""
    document = read_document(DOCUMENTS[name][0])
    given: dict[str, Any] = FORTY_EIGHT_LAYERS if name == "Recompute" else {}
    layout = lay_out(document.inputs, **given)
    settings = settle(document, layout)
    lines = list(settings.log_lines)
    for layer in range(layout.num_layers):
        lines += settings.actions(layer, LLAMA).log_lines
    return [str(line) for line in lines if re.search(only, line.text)]


def printed(name: str) -> list[str]:
    return [line.removeprefix("-") for line in DOCUMENTS[name][1].splitlines()]


def squeeze(lines: list[str]) -> list[str]:
    return [re.sub(" +", " ", line) for line in lines]


def test_golden_examples_when_listed_then_all_five() -> None:
    assert set(DOCUMENTS) == {"Recompute", "Swap 1", "Swap 2", "Swap 3", "Swap 4"}


@pytest.mark.promise("B1")
@pytest.mark.promise("B2")
@pytest.mark.promise("B5")
def test_golden_example_when_recompute_then_printed_forms_but_for_doubled_backslashes() -> None:
    lines = log("Recompute", r"^Formative (layer|select|select_comm)_recompute:")
    assert [line.replace(r"\\", "\\") for line in lines] == printed("Recompute")


@pytest.mark.promise("B7")
@pytest.mark.promise("B9")
@pytest.mark.parametrize(
    ("name", "search"),
    [("Swap 1", "attention[.]flash_attention,"), ("Swap 2", "Set layer swap at")],
)
def test_golden_example_when_swap_1_or_2_then_printed_lines_but_for_blanks(
    name: str, search: str
) -> None:
    lines = log(name, search)
    assert squeeze(lines) == printed(name)
    assert lines != printed(name)  # the original's runs of blanks are kept


@pytest.mark.promise("B10")
@pytest.mark.promise("B14")
@pytest.mark.parametrize("name", ["Swap 3", "Swap 4"])
def test_golden_example_when_swap_3_or_4_then_printed_lines(name: str) -> None:
    assert log(name, " at layer ") == printed(name)
