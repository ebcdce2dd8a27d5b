"""Documents changed at random: what is read is sound, or an InvalidDocument says why not."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from swapkit.errors import InvalidDocument
from swapkit.ir import codec
from swapkit.ir.checks import check_machine, check_plan, check_trace
from swapkit.ir.documents import parse_document
from tests.unit.ir.values import DECODERS, DOCUMENTS


def places(document: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of everything inside a document."""
    if isinstance(document, dict):
        steps: list[tuple[str | int, object]] = list(document.items())
    elif isinstance(document, list):
        steps = list(enumerate(document))
    else:
        return []
    found: list[tuple[str | int, ...]] = []
    for step, inner in steps:
        found += [(*path, step), *places(inner, (*path, step))]
    return found


PLACES = {kind: places(document) for kind, document in DOCUMENTS.items()}
WORDS = st.sampled_from(["forward", "backward", "swap", "keep", "disk", "use", 10**400])
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 6), st.integers(), st.floats(), WORDS,
    st.text(max_size=3),
)  # fmt: skip
JUNK = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


def change(document: Any, data: st.DataObject, path: tuple[str | int, ...]) -> None:
    """Delete what is at a place, or put something else there."""
    *steps, last = path
    try:
        for step in steps:
            document = document[step]
        if data.draw(st.integers(0, 4)) == 0:
            del document[last]
        else:
            document[last] = data.draw(JUNK)
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took that place away


def check(kind: str, value: Any) -> None:
    if kind == "trace":
        check_trace(value)
    elif kind == "machine":
        check_machine(value)
    elif kind == "plan":
        check_plan(value)
    else:
        trace, plan = value
        check_trace(trace)
        check_plan(plan, trace)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_document_when_changed_anywhere_then_sound_or_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    document = copy.deepcopy(DOCUMENTS[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        change(document, data, data.draw(st.sampled_from(PLACES[kind])))
    try:
        value = DECODERS[kind](document)
    except InvalidDocument:
        return
    check(kind, value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.data())
def test_bytes_when_changed_anywhere_then_sound_or_refused(
    junk: bytes, data: st.DataObject
) -> None:
    content = json.dumps(DOCUMENTS["planned"]).encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 60)))
    try:
        value = codec.decode_planned(parse_document(content[:start] + junk + content[end:]))
    except InvalidDocument:
        return
    check("planned", value)
