"""Values that a text describes: what is accepted is what the text says."""

from __future__ import annotations

import re

import pytest

from swapkit.config.values import accepts, read_value, read_variable


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ("a number from 0 to 1", [0, 0.5, 1], [-1, 1.5, float("nan"), True, "1", None]),
        ("a number above 0 and below 1", [0.5], [0, 1, float("inf")]),
        ("a number of bytes, at least 0", [0, 1.5], [-1]),
        ("a whole number", [-5, 0], [1.0, False]),
        ("a whole number of at least -1", [-1, 3], [-2]),
        ("a power of 2 of at most 128", [1, 128], [0, -2, 3, 256, 2.0]),
    ],
)
def test_number_when_described_then_accepted_only_as_the_words_say(
    words: str, good: list[object], bad: list[object]
) -> None:
    assert [value for value in good if not accepts(words, value)] == []
    assert [value for value in bad if accepts(words, value)] == []


@pytest.mark.parametrize(
    ("words", "text", "value"),
    [
        ("a whole number of at least 0", "7", 7),
        ("a number of at least 0", "1e3", 1000.0),
        ("true, 1, false or 0", "1", True),
        ("True or False", "False", False),
        ("native or cudaMallocAsync", "native", "native"),
    ],
)
def test_text_when_as_described_then_its_value(words: str, text: str, value: object) -> None:
    read = read_value(words, text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("a whole number of at least 0", "+7"),
        ("a whole number of at least 0", "1_0"),
        ("a whole number of at least 0", ""),
        ("a number of at least 0", "inf"),
        ("True or False", "true"),
        ("native or cudaMallocAsync", "cuda"),
    ],
)
def test_text_when_not_as_described_then_value_error(words: str, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the reader of a table says more
        read_value(words, text)


@pytest.mark.parametrize(("default", "instead"), [(3, "using 3"), (None, "ignoring it")])
def test_variable_when_not_as_described_then_the_default_and_a_warning(
    default: int | None, instead: str
) -> None:
    words = "a number from 1 to 4"
    with pytest.warns(UserWarning, match=f"^N='9': expected {words}; {instead}$"):
        assert read_variable({"N": "9"}, "N", words, default) == default
    assert read_variable({"N": " 4 "}, "N", words, default) == 4
    assert read_variable({}, "N", words, default) == default


@pytest.mark.parametrize("text", ["+4", "1_000", "\u0663", "-1", "", "4" * 5000])
def test_text_when_it_has_other_than_digits_then_it_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(text)}$|^Exceeds the limit"):
        read_value("a whole number of at least 0", text)
