"""Cases in which the original fails by accident, recognised by the error that was recorded.

Here such a case must do the sensible thing. What that is, another case says that the original's
rules cover: the same one with lists for tuples, with [] for False, with one pattern at a time, or
with names instead of a wildcard.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swapkit.config.mindformers.patterns import SEPARATOR
from swapkit.errors import InvalidConfiguration
from tests.golden.cases import Case, Outcome, Tree, list_lists, read_sections, run
from tests.golden.comparison import check_same, unify_reprs
from tests.golden.effects import derive_effects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Check = Callable[[Case, Outcome, dict[str, Any]], None]

SELECT_KEYS = ("select_recompute", "select_comm_recompute")
PATTERN_KEYS = (*SELECT_KEYS, "select_recompute_exclude", "select_comm_recompute_exclude")


def check_hang(case: Case, outcome: Outcome, _trees: dict[str, Any]) -> None:
    assert isinstance(outcome.error, InvalidConfiguration), outcome.error
    assert outcome.stage == case["error_stage"]
    assert any(str(value) in str(outcome.error) for value in list_lists(read_sections(case)))


def check_tuples(case: Case, outcome: Outcome, trees: dict[str, Any]) -> None:
    check_equal(outcome, run(with_lists(case), trees))


def check_false(case: Case, outcome: Outcome, trees: dict[str, Any]) -> None:
    rewritten = copy.deepcopy(case)
    for key in SELECT_KEYS:
        value = rewritten["recompute_config"].get(key)
        if isinstance(value, dict):
            rewritten["recompute_config"][key] = {
                pattern: [] if layers is False else layers for pattern, layers in value.items()
            }
    assert rewritten != case
    check_equal(outcome, run(rewritten, trees))


def check_wildcard(case: Case, outcome: Outcome, trees: dict[str, Any]) -> None:
    names = list_names(Tree(trees[case["tree"]]))
    rewritten = rename_patterns(case, lambda pattern: spell_out(pattern, names))
    assert rewritten != case
    check_same_layers(outcome, run(rewritten, trees))


def check_duplicates(case: Case, outcome: Outcome, trees: dict[str, Any]) -> None:
    """Each part is marked by each pattern on its own; exclusion beats selection."""
    assert outcome.error is None, outcome.error
    singles = [run(single, trees) for single in list_single_patterns(case, outcome)]
    for index, actions in enumerate(outcome.layers):
        for key in ("select", "comm", "select_exclude", "comm_exclude"):
            marks = [str(match) for one in singles for match in getattr(one.layers[index], key)]
            check_same(key, list(map(str, getattr(actions, key))), list(dict.fromkeys(marks)))
        effects = derive_effects(actions, Tree(trees[case["tree"]]), case["tree"])
        assert not set(effects["recompute_ops"]) & set(map(str, actions.select_exclude))


@dataclass(frozen=True, kw_only=True)
class Accident:
    """An error of the original that is one of its framework, and what must happen instead."""

    error: str
    stage: str
    check: Check


ACCIDENTS = (
    Accident(error="Hang: ", stage="layer_setting", check=check_hang),
    Accident(
        error="TypeError: 'tuple' object does not support item assignment",
        stage="layer_setting",
        check=check_tuples,
    ),
    # With swap on.
    Accident(
        error="ValueError: Illegal input list for select_recompute: (",
        stage="layer_setting",
        check=check_tuples,
    ),
    Accident(
        error="TypeError: 'bool' object is not iterable", stage="layer_setting", check=check_false
    ),
    Accident(
        error="TypeError: 'bool' object is not callable", stage="apply", check=check_duplicates
    ),
    Accident(error="AttributeError: ", stage="apply", check=check_wildcard),
)


def find_accident(case: Case) -> Accident | None:
    for accident in ACCIDENTS:
        error = case.get("error", "")
        if error.startswith(accident.error) and case["error_stage"] == accident.stage:
            return accident
    return None


def check_accident(case: Case, outcome: Outcome, trees: dict[str, Any]) -> None:
    accident = find_accident(case)
    assert accident is not None
    accident.check(case, outcome, trees)
    # What the original logged before it failed is logged here too.
    before = list(map(unify_reprs, case["log_lines_before_error"]))
    check_same("lines before the error", outcome.lines[: len(before)], before)


def check_equal(outcome: Outcome, other: Outcome) -> None:
    check_same_layers(outcome, other)
    check_same("log_lines", outcome.lines, other.lines)


def check_same_layers(outcome: Outcome, other: Outcome) -> None:
    assert outcome.error is None, outcome.error
    assert other.error is None, other.error
    assert outcome.layers
    for actions, others in zip(outcome.layers, other.layers, strict=True):
        check_same("actions", describe(actions), describe(others))


def describe(actions: Any) -> dict[str, str]:
    """Return actions without the identity of modules, which differs from run to run."""
    return {
        name: str(getattr(actions, name))
        if name not in {"select", "comm", "select_exclude", "comm_exclude", "op_swaps"}
        else "; ".join(
            f"{item[0]} {item[1]}" if isinstance(item, tuple) else str(item)
            for item in getattr(actions, name)
        )
        for name in actions.__slots__
    }


def with_lists(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"__tuple__"}:
        return with_lists(value["__tuple__"])
    if isinstance(value, dict):
        return {key: with_lists(item) for key, item in value.items()}
    return [with_lists(item) for item in value] if isinstance(value, list) else value


def list_names(tree: Tree) -> list[str]:
    names = [*tree.operators]
    for name, child in tree.children:
        names += [name, *list_names(child)]
    return sorted(set(names))


def spell_out(pattern: str, names: list[str]) -> str:
    """Return a pattern with the names that its last component matches in place of it."""
    *lead, last = pattern.split(SEPARATOR)
    matching = [re.escape(name) for name in names if re.fullmatch(last, name)]
    return SEPARATOR.join([*lead, f"(?:{'|'.join(matching)})"])


def rename_patterns(case: Case, rename: Callable[[str], str]) -> Case:
    rewritten = copy.deepcopy(case)
    section = rewritten["recompute_config"]
    for key in PATTERN_KEYS:
        value = section.get(key)
        if isinstance(value, dict):
            section[key] = {rename(pattern): layers for pattern, layers in value.items()}
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            section[key] = list(map(rename, value))
    swaps = (rewritten["swap_config"] or {}).get("op_swap") or []
    for entry in [swaps] if isinstance(swaps, dict) else swaps:
        names = entry["op_name"]
        entry["op_name"] = rename(names) if isinstance(names, str) else list(map(rename, names))
    return rewritten


def list_single_patterns(case: Case, outcome: Outcome) -> Iterator[Case]:
    """Yield the case with one pattern at a time; of those that an exclusion removes, none."""
    section = case["recompute_config"]
    assert outcome.settings is not None
    for key in PATTERN_KEYS:
        for pattern in outcome.settings.recomputation.patterns.get(key, ()):
            value = section.get(key, False)
            single = copy.deepcopy(case)
            single["recompute_config"] |= dict.fromkeys(PATTERN_KEYS, False)
            single["recompute_config"][key] = {
                pattern: value[pattern] if isinstance(value, dict) else _layers_of(value)
            }
            yield single


def _layers_of(value: Any) -> Any:
    """Return the layers of a pattern that is not given in a mapping: of a list of patterns, all."""
    named = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return True if named and value else value
