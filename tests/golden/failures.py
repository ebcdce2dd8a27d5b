"""Compares the error that a case gives here with the one that was recorded of the original."""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING

from swapkit.errors import InvalidConfiguration
from tests.golden.cases import Case, Outcome, list_lists, list_values, read_sections
from tests.golden.comparison import check_same, unify_reprs

if TYPE_CHECKING:
    from collections.abc import Iterator

# The original says `select_recompute` whatever key it means.
ILLEGAL = re.compile(r"Illegal input list for select_recompute: (?P<value>.*)", re.DOTALL)
# Errors of Python or numpy, whose text says nothing of the document.
BARE = re.compile(
    r"index \d+ is out of bounds for axis \d+ with size \d+|list index out of range"
    r"|string indices must be integers.*|'\w+' object is not subscriptable"
)
# Beginnings of texts that are the same here.
KEPT = (
    "offset.shape[", "The sum of `offset`", "The '", "Invalid ", "layer_swap must", "op_swap must",
    "The input value must be int", "length of ", "Type of ", "If the type of ", "Layer info of ",
)  # fmt: skip
# With swap on, the layers of a pattern may be a bool: the description of the keys says so.
BOOL_RULE = re.compile(
    r"ValueError: Layer info of select_(comm_)?recompute must be list .*<class '(?:bool|tuple)'>\."
)


def check_error(case: Case, outcome: Outcome) -> None:
    """Compare the error of a case that the original rejects."""
    assert outcome.error is not None, f"accepted, but the original says {case['error']}"
    assert outcome.stage == case["error_stage"]
    check_exception(outcome.error, case["error"], case)
    before = list(map(unify_reprs, case["log_lines_before_error"]))
    check_same("lines before the error", outcome.lines, before)


def check_rules_error(case: Case, outcome: Outcome) -> None:
    """Compare what the trainer's rules say, where it is recorded."""
    record = case.get("expected", case)
    if "check_rules_error" not in record or outcome.document is None:
        return
    recorded = record["check_rules_error"]
    if recorded is None or BOOL_RULE.fullmatch(recorded):
        assert outcome.rules_error is None, outcome.rules_error
    else:
        assert outcome.rules_error is not None, f"accepted, but the original says {recorded}"
        check_exception(outcome.rules_error, recorded, case)


def check_exception(error: Exception, recorded: str, case: Case) -> None:
    """Compare class and text: ours begins with the original's where that is not misleading."""
    name, _, text = recorded.partition(": ")
    ours = str(error)
    unknown_key = "unexpected keyword argument" in text
    assert unknown_key or isinstance(error, InvalidConfiguration), repr(error)
    if name == "AttributeError":  # some type that the original did not think of
        return
    kind = re.error if name == "error" else getattr(builtins, name)
    assert isinstance(error, kind), f"{error!r} is no {name}"
    illegal = ILLEGAL.fullmatch(text)
    if illegal:
        assert illegal["value"] in ours, ours
        assert any(
            f"Illegal input list for {key}" in ours for key in _keys_of(case, illegal["value"])
        )
    elif unknown_key:
        assert text.partition(" ")[2] in ours
    elif name in {"KeyError", "error"}:
        assert text in ours, ours
    elif BARE.fullmatch(text) or not text.startswith(KEPT):
        sections = read_sections(case)
        # Of an index that is out of range, the whole list must be named.
        values = list_lists(sections) if name == "IndexError" else list_values(sections)
        assert any(str(value) in ours for value in values), ours
        assert any(key in ours for section in sections.values() for key in section), ours
    else:
        assert _squeeze(ours).startswith(_squeeze(text)), f"{ours}\nis not\n{text}"


def _squeeze(text: str) -> str:
    """Return a text without blanks, commas and a last full stop: numpy prints lists its own way."""
    return re.sub(r"[\s,]+", "", text).removesuffix(".")


def _keys_of(case: Case, value: str) -> Iterator[str]:
    """Yield the keys of the document that hold a value, given as it is printed."""
    sections = read_sections(case)
    recompute, swap = sections["recompute_config"], sections["swap_config"] or {}
    for key, found in recompute.items():
        if str(found) == value:
            yield key
        if isinstance(found, dict):
            yield from (f"{key}({name})" for name, item in found.items() if str(item) == value)
    for key in ("layer_swap", "op_swap"):
        if value in str(swap.get(key)):
            yield key
