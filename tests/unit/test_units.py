"""What users write as an amount of memory, and what they read."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from swapkit.errors import InvalidArgument
from swapkit.units import MOST_BYTES, format_bytes, parse_bytes, show


@pytest.mark.parametrize(
    ("amount", "nbytes"),
    [
        (1, 1),
        (10**12, 10**12),
        (4096.0, 4096),
        ("4096", 4096),
        ("7b", 7),
        ("500MB", 500 * 10**6),
        ("2 kb", 2000),
        ("1TB", 10**12),
        ("10GiB", 10 * 2**30),
        ("1.5gib", 3 * 2**29),
        (" 3 KiB ", 3072),
        (".5MiB", 2**19),
        ("2TiB", 2**41),
        ("10G", 10**10),
        ("10 g", 10**10),
        ("512k", 512 * 10**3),
        ("10Gi", 10 * 2**30),
        ("3mi", 3 * 2**20),
        ("9007199254740993", 9007199254740993),  # more than a float holds
        ("0" * 5000 + "1KiB", 1024),
        (MOST_BYTES, MOST_BYTES),
    ],
)
def test_parse_when_bytes_are_written_then_they_are_read(amount: float | str, nbytes: int) -> None:
    assert parse_bytes(amount, name="limit") == nbytes


@pytest.mark.parametrize("amount", [0, "0", 0.0, "0GiB", "0 B"])
def test_parse_when_nothing_is_an_amount_then_zero_is_read(amount: float | str) -> None:
    assert parse_bytes(amount, name="min_bytes", least=0) == 0
    with pytest.raises(InvalidArgument):
        parse_bytes(amount, name="limit")
    with pytest.raises(InvalidArgument, match="min_bytes=-1 is less than no bytes"):
        parse_bytes(-1, name="min_bytes", least=0)


@pytest.mark.promise("E7")
@pytest.mark.parametrize(
    ("amount", "nbytes"),
    [("80%", 800), ("12.5 %", 125), (0.5, 500), (1.0, 1000), ("100%", 1000), (0.001, 1)],
)
def test_parse_when_a_share_is_written_then_it_is_taken_of_the_whole(
    amount: float | str, nbytes: int
) -> None:
    assert parse_bytes(amount, whole_bytes=1000, name="limit") == nbytes


@pytest.mark.parametrize("amount", ["80%", 0.5])
def test_parse_when_there_is_no_whole_then_a_share_is_refused(amount: float | str) -> None:
    with pytest.raises(InvalidArgument, match=r"host_limit=.*a share is not supported here"):
        parse_bytes(amount, name="host_limit")


@pytest.mark.parametrize("amount", [0.0, -0.25, float("-inf"), "0%", "101%", "9" * 5000 + "%"])
def test_parse_when_a_share_is_out_of_range_then_the_range_is_named(amount: float | str) -> None:
    with pytest.raises(InvalidArgument, match="a share must be above 0 and at most 100 %"):
        parse_bytes(amount, whole_bytes=1000, name="limit")


def test_parse_when_text_has_many_spaces_then_refused_soon() -> None:
    start = time.process_time()
    with pytest.raises(InvalidArgument, match="not understood"):
        parse_bytes("1" + " " * 100_000 + "!", name="limit")
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "amount", ["", "GiB", "10 gallons", "-1GiB", "1e9", "1,5GiB", "10GiB free", "nan", "% 50"]
)
def test_parse_when_text_is_not_an_amount_then_the_forms_are_listed(amount: str) -> None:
    with pytest.raises(InvalidArgument, match=r'limit=.* not understood; .*"10GiB"'):
        parse_bytes(amount, whole_bytes=1000, name="limit")


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), 1.5, Fraction(10**400, 3)])
def test_parse_when_a_number_is_not_whole_then_refused(amount: float) -> None:
    with pytest.raises(InvalidArgument, match="not a whole number"):
        parse_bytes(amount, whole_bytes=1000, name="limit")


@pytest.mark.parametrize(
    "amount",
    [
        MOST_BYTES + 1,
        10**400,
        10**5000,
        1e300,
        "1048577TiB",
        *("9" * digits + rest for digits in (400, 5000) for rest in ("", "GiB", ".0", ".5GiB")),
    ],
    ids=lambda amount: show(amount)[:20],
)
def test_parse_when_more_than_any_device_has_then_refused_in_a_line(amount: float | str) -> None:
    with pytest.raises(InvalidArgument, match=r'limit=.* more than any device has; .*"10GiB"') as e:
        parse_bytes(amount, whole_bytes=1000, name="limit")
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("amount", [0, -5, -(10**400), "0", "0" * 5000, "0GiB"])
def test_parse_when_less_than_a_byte_then_refused(amount: int | str) -> None:
    with pytest.raises(InvalidArgument, match="less than one byte"):
        parse_bytes(amount, whole_bytes=1000, name="limit")


def test_parse_when_a_share_is_less_than_a_byte_then_refused() -> None:
    with pytest.raises(InvalidArgument, match="less than one byte"):
        parse_bytes(0.5, whole_bytes=1, name="limit")


@pytest.mark.parametrize("amount", [True, False, None, b"10GiB", [1], 1j])
def test_parse_when_neither_number_nor_text_then_refused(amount: object) -> None:
    with pytest.raises(InvalidArgument, match=r"limit=.*expected bytes"):
        parse_bytes(amount, name="limit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096.00 TiB"),
        (-512, "-512 B"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_format_when_given_bytes_then_the_largest_fitting_unit_is_used(
    nbytes: int, text: str
) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("text", ["1.00 KiB", "5.50 MiB", "2.25 GiB", "3.00 TiB", "17 B"])
def test_format_when_the_text_was_parsed_then_it_is_the_same_again(text: str) -> None:
    assert format_bytes(parse_bytes(text, name="limit")) == text
