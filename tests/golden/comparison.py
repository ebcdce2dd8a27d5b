"""Compares what a case gave here with what was recorded of the original.

Every field of a case has its place in one of the tables below; a field that has none is an error,
so that nothing recorded goes unread.
"""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING, Any

from tests.golden.cases import LAYOUT_KEYS, OPTIONAL_LAYOUT_KEYS, Case, Outcome, Tree, decode
from tests.golden.effects import derive_effects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swapkit.config.mindformers.layer_actions import LayerActions
    from swapkit.config.mindformers.patterns import Match
    from swapkit.config.mindformers.selections import LayerPlace

INPUTS = {
    *LAYOUT_KEYS, *OPTIONAL_LAYOUT_KEYS, "pipeline_interleave_enabled", "recompute_config",
    "swap_config", "tree", "impl",
}  # fmt: skip
# About a case: its name, where it comes from, and how another release of the original behaves.
REMARKS = {"name", "note", "source", "r1_8_0"}
RECORDS = {"expected", "error", "error_stage", "log_lines_before_error", "check_rules_error"}


def list_unknown_fields(case: Case) -> set[str]:
    """Return the fields of a case, at any depth, that nothing here reads."""
    expected = case.get("expected", {})
    unknown = set(case) - INPUTS - REMARKS - RECORDS
    unknown |= set(expected) - set(COMPARERS) - {"check_rules_error", "per_layer"} - UNREPEATED
    for layer in expected.get("per_layer", []):
        unknown |= set(layer) - set(LAYER_COMPARERS) - {"layer", "effective"}
        unknown |= set(layer.get("effective", {})) - EFFECTS
    return unknown


# The original changes lists of the caller; that this does not is checked where a case runs.
UNREPEATED = {"input_mutated"}
EFFECTS = {"recompute_ops", "swap_ops", "suppressed_swap_ops"}


def _patterns(key: str) -> Callable[[Outcome], Any]:
    def read(outcome: Outcome) -> Any:
        patterns = outcome.settings.recomputation.patterns[key]
        return {pattern: layers.printed for pattern, layers in patterns.items()}

    return read


def _read_swap_config(outcome: Outcome) -> Any:
    swap = outcome.document.swap
    entries = swap.read_entries()
    named = {name: list(map(_entry, group)) for name, group in entries.op_swap.items()}
    return {
        "layer_swap": list(map(_entry, entries.layer_swap)),
        "default_prefetch": swap.default_prefetch,
        # The original has a list where no operator is named because layers are.
        "op_swap": [] if swap.op_swap is None and swap.layer_swap is not None else named,
        "swap": swap.swap,
    }


def _entry(entry: Any) -> dict[str, Any]:
    return {"backward_prefetch": entry.backward_prefetch, "layers": entry.layers}


def _places(outcome: Outcome) -> list[LayerPlace]:
    return [outcome.layout.find_place(layer) for layer in range(outcome.layout.num_layers)]


COMPARERS: dict[str, Callable[[Outcome], Any]] = {
    "layer_list": lambda outcome: outcome.layout.table,
    "layer_accu": lambda outcome: outcome.layout.cumulative,
    "pp_ids": lambda outcome: [place.stage for place in _places(outcome)],
    "interleave_ids": lambda outcome: [place.chunk for place in _places(outcome)],
    "layer_recompute": lambda outcome: outcome.settings.recomputation.full.printed,
    "select_recompute": _patterns("select_recompute"),
    "select_comm_recompute": _patterns("select_comm_recompute"),
    "select_recompute_exclude": _patterns("select_recompute_exclude"),
    "select_comm_recompute_exclude": _patterns("select_comm_recompute_exclude"),
    "layer_swap": lambda outcome: [rule.printed for rule in outcome.settings.swapping.layer_swap],
    "op_swap": lambda outcome: {
        name: [rule.printed for rule in rules]
        for name, rules in outcome.settings.swapping.op_swap.items()
    },
    "swap_config_normalised": _read_swap_config,
    "log_lines": lambda outcome: outcome.lines,
}


def _paths(matches: Iterable[Match]) -> list[str]:
    return list(map(str, matches))


def _keywords(actions: LayerActions) -> dict[str, bool] | None:
    if not actions.full:
        return None
    slices = actions.slice_activation
    return {} if slices is None else {"recompute_slice_activation": slices}


LAYER_COMPARERS: dict[str, Callable[[LayerActions], Any]] = {
    "stage": lambda actions: actions.stage,
    "chunk": lambda actions: actions.chunk,
    "pipeline_stage_attr": lambda actions: actions.pipeline_stage,
    "full": lambda actions: actions.full,
    "full_kwargs": _keywords,
    "select": lambda actions: _paths(actions.select),
    "comm": lambda actions: _paths(actions.comm),
    "select_exclude": lambda actions: _paths(actions.select_exclude),
    "comm_exclude": lambda actions: _paths(actions.comm_exclude),
    "swap": lambda actions: {
        "layer": actions.layer_swap,
        "ops": {str(match): prefetch for match, prefetch in actions.op_swaps},
    },
}
MARKS = {"select", "comm", "select_exclude", "comm_exclude"}


def check_expected(case: Case, outcome: Outcome, trees: dict[str, Any]) -> None:
    """Compare a case that the original runs to its end."""
    if outcome.error is not None:
        raise outcome.error
    expected = case["expected"]
    for key in set(expected) & set(COMPARERS):
        wanted, got = decode(expected[key]), COMPARERS[key](outcome)
        if key == "log_lines":
            wanted = list(map(unify_reprs, wanted))
        if key == "swap_config_normalised":  # the keys of an entry have no order
            wanted, got = _sort_keys(wanted), _sort_keys(got)
        check_same(key, got, wanted)
    assert len(expected["per_layer"]) == len(outcome.layers)
    for record, actions in zip(expected["per_layer"], outcome.layers, strict=True):
        check_layer(record, actions)
        if "effective" in record:
            got = derive_effects(actions, Tree(trees[case["tree"]]), case["tree"])
            check_effects(record["layer"], got, record["effective"])


def _sort_keys(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def check_layer(record: dict[str, Any], actions: LayerActions) -> None:
    for key in set(record) & set(LAYER_COMPARERS):
        wanted = record[key]
        if key in MARKS:
            wanted = list(dict.fromkeys(wanted))  # marking something twice changes nothing
        check_same(f"layer {record['layer']}, {key}", LAYER_COMPARERS[key](actions), wanted)


def check_effects(layer: int, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in EFFECTS:
        check_same(f"layer {layer}, {key}", _sorted(got[key]), _sorted(wanted[key]))


def _sorted(value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, dict) else sorted(value)


def check_same(what: str, got: Any, wanted: Any) -> None:
    """Compare values in their written form: True is not 1 there, and dicts have an order."""
    __tracebackhide__ = True
    assert json.dumps(got, indent=1) == json.dumps(wanted, indent=1), what


def unify_reprs(line: str) -> str:
    """Return a recorded line with tuples and arrays printed as the lists that they stand for."""
    lead, separator, text = line.partition(": ")
    if "Formative" not in lead:
        return line
    text = re.sub(r"array\((\[[^]]*\]), dtype=int32\)", r"\1", text)
    return f"{lead}{separator}{_as_lists(ast.literal_eval(text))}"


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
