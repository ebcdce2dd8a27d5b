"""Patterns: what they name, in which order, and how matches are logged."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from swapkit.config.mindformers.patterns import LayerModule, distinct, find, is_alike, name_last
from swapkit.errors import InvalidPattern


@dataclass(eq=False)
class Node:
    operators: tuple[str, ...] = ()
    children: list[tuple[str, LayerModule]] = field(default_factory=list)


SHARED = Node(operators=("matmul",))
LAYER = Node(
    operators=("add",),
    children=[
        ("wide", Node(operators=("mul", "cast"), children=[("w1", SHARED), ("w2", Node())])),
        ("tied", Node(children=[("w1", SHARED)])),
        ("mul", Node(operators=("mul",))),
    ],
)


def paths(pattern: str) -> list[str]:
    return [str(match) for match in find(pattern, LAYER)]


@pytest.mark.promise("B2")
@pytest.mark.promise("B16")
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("add", ["add"]),
        ("wide", ["wide"]),
        (r"wide\.mul", ["wide.mul"]),
        ("wide.mul", []),
        (r"wid\.mul", []),
        (r"wide\\.mul", ["wide.mul"]),  # as the documents print it
        (r"wide\..*", ["wide.cast", "wide.mul", "wide.w1", "wide.w2"]),
        (r".*\.mul", ["wide.mul", "mul.mul"]),
        (r".*", ["add", "wide", "tied", "mul"]),
        (r"wide\.w[12]", ["wide.w1", "wide.w2"]),
        (r"wide\.w1\.matmul", ["wide.w1.matmul"]),
        (r".*\.matmul", []),
        (r".*\..*\.matmul", ["wide.w1.matmul"]),
        ("", []),
    ],
)
def test_pattern_when_searched_then_operators_before_modules(
    pattern: str, found: list[str]
) -> None:
    assert paths(pattern) == found


def test_pattern_when_a_module_has_two_names_then_found_under_the_first_that_matches() -> None:
    assert paths(r".*\.w1") == ["wide.w1"]
    assert paths(r"tied\.w1") == ["tied.w1"]
    both = find(r"wide\.w1", LAYER) + find(r"tied\.w1", LAYER)
    assert [str(match) for match in distinct(both)] == ["wide.w1"]


def test_match_when_of_an_operator_then_the_module_that_calls_it() -> None:
    (match,) = find(r"wide\.w1\.matmul", LAYER)
    assert (match.part, match.operator) == (SHARED, "matmul")
    (module,) = find(r"wide\.w1", LAYER)
    assert (module.part, module.operator) == (SHARED, None)


def test_names_when_of_one_parent_then_only_the_last() -> None:
    assert name_last(find(r"wide\..*", LAYER)) == ["wide.w2"]
    assert name_last(find(r".*\.mul", LAYER)) == ["wide.mul", "mul.mul"]


@pytest.mark.parametrize(
    ("pattern", "other", "alike"),
    [
        (r"a\.b", r"a\.b", True),
        (r".*\.b", r"a\.b", True),
        (r"a\.b", r".*\.b", True),
        (r"a\..*", r".*\.b", True),
        (r"a\.b", r"a\.c", False),
        (r"a\.b", "a", False),
    ],
)
def test_patterns_when_compared_then_alike_in_either_direction(
    pattern: str, other: str, *, alike: bool
) -> None:
    assert is_alike(pattern, other) is alike


def test_pattern_when_no_regular_expression_then_error_names_it() -> None:
    with pytest.raises(
        InvalidPattern, match=re.escape(r"'wide\\.[': '[' is not a valid regular expression")
    ):
        find(r"wide\.[", LAYER)
    with pytest.raises(re.error, match="not a valid regular expression"):
        is_alike("(", "a")


@pytest.mark.parametrize("pattern", ["a{4294967296}", "(" * 5000])
def test_pattern_when_python_cannot_compile_it_then_invalid(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="not a valid regular expression"):
        find(pattern, LAYER)
    with pytest.raises(InvalidPattern, match="not a valid regular expression"):
        is_alike(pattern, "a")
