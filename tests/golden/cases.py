"""The recorded cases of the original, and how one of them runs here."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapkit.config.mindformers.documents import Document, RecomputeConfig, SwapConfig, check_rules
from swapkit.config.mindformers.layer_actions import (
    LayerActions,
    settle,
    settle_recomputation,
)
from swapkit.config.mindformers.selections import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

COPY = Path(__file__).with_name("recompute_config.json")
LAYOUT_KEYS = ("num_layers", "offset", "pp_interleave_num", "pipeline_stage")
OPTIONAL_LAYOUT_KEYS = ("start_stage", "stage_num")

Case = dict[str, Any]


def find_file() -> Path:
    return Path(os.environ.get("SWAPKIT_GOLDEN") or COPY)


def load() -> dict[str, Any]:
    """Return the file that SWAPKIT_GOLDEN names, else the copy beside this module."""
    content: dict[str, Any] = json.loads(find_file().read_text(encoding="utf-8"))
    return content


class Tree:
    """A layer, or a module in it, built from the description of a tree."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.operators: list[str] = description.get("ops", [])
        items = dict(description.get("cells", {}))
        items |= {str(index): item for index, item in enumerate(description.get("list", []))}
        unknown = set(description) - {"ops", "cells", "list"}
        assert not unknown, f"no part of a tree is called {unknown}"
        self.children = [(name, Tree(item)) for name, item in items.items()]


def decode(value: Any) -> Any:
    """Return a value with the tuples that JSON has no form for."""
    if isinstance(value, dict) and set(value) == {"__tuple__"}:
        return tuple(decode(item) for item in value["__tuple__"])
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def read_sections(case: Case) -> dict[str, Any]:
    return {key: decode(case[key] or {}) for key in ("recompute_config", "swap_config")}


def list_values(value: Any) -> Iterator[Any]:
    """Yield a value and all values inside it."""
    yield value
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for item in items:
            yield from list_values(item)


def list_lists(value: Any) -> list[Any]:
    """Return the lists and tuples inside a value."""
    return [item for item in list_values(value) if isinstance(item, (list, tuple))]


@dataclass(kw_only=True)
class Outcome:
    """How far a case came, and what it gave on the way."""

    # A document, a layout and settings; None where the case did not come so far.
    document: Any = None
    layout: Any = None
    settings: Any = None
    layers: list[LayerActions] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rules_error: Exception | None = None
    error: Exception | None = None
    stage: str = ""  # where the error came, in the words of the file


def run(case: Case, trees: dict[str, Any]) -> Outcome:
    """Run a case step by step, as the original does, until one fails."""
    outcome = Outcome(stage="config")
    sections = read_sections(case)
    untouched = copy.deepcopy(sections)
    try:
        _run(case, sections, Tree(trees[case["tree"]]), outcome)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        outcome.error = error
    assert sections == untouched
    assert repr(sections) == repr(untouched), "a value was changed in place"
    return outcome


def _run(case: Case, sections: dict[str, Any], layer: Tree, outcome: Outcome) -> None:
    recompute, swap = sections["recompute_config"], sections["swap_config"]
    document = outcome.document = Document(
        recompute=RecomputeConfig(**recompute), swap=SwapConfig(**swap)
    )
    outcome.rules_error = _check_rules(case, document)
    outcome.stage = "layer_setting"
    flavour = case["impl"]
    outcome.layout = Layout(
        **{key: decode(case[key]) for key in LAYOUT_KEYS},
        **{key: case[key] for key in OPTIONAL_LAYOUT_KEYS if key in case},
        pipeline_interleave=case["pipeline_interleave_enabled"],
    )
    # Step by step, so that the lines before an error are known.
    outcome.lines += map(str, outcome.layout.log_lines)
    recomputation = settle_recomputation(
        document.recompute,
        outcome.layout,
        flavour=flavour,
        by_index=document.swap.swap and flavour == "legacy",
    )
    outcome.lines += map(str, recomputation.log_lines)
    outcome.settings = settle(document, outcome.layout, flavour)
    outcome.lines = [str(line) for line in outcome.settings.log_lines]
    outcome.stage = "apply"
    for layer_id in range(case["num_layers"]):
        actions = outcome.settings.actions(layer_id, layer)
        outcome.layers.append(actions)
        outcome.lines += map(str, actions.log_lines)
    outcome.stage = ""


def _check_rules(case: Case, document: Document) -> Exception | None:
    # The rules come before the layout, which may be impossible, and ask it for one number only.
    stages = case["pipeline_stage"]
    try:
        check_rules(document, Layout(num_layers=0, pipeline_stage=stages))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return error
    return None
