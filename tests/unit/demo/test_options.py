"""Options that make no sense are answered with what was asked and what is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapkit.cli.demo import demo
from swapkit.demo.options import (
    DemoOptions,
    GivenOptions,
    OptionError,
    parse_budget,
    parse_budgets,
    processors,
    read_options,
)

MIB = 1 << 20


def read(*arguments: str) -> DemoOptions:
    """Return the options that the command reads from its arguments."""
    given = demo.make_context("demo", list(arguments)).params
    return read_options(GivenOptions(**given))


def test_options_when_none_is_given_then_the_defaults() -> None:
    options = read()
    assert [budget.text for budget in options.budgets] == ["60%", "45%"]
    assert options.size == "compact"
    assert options.steps == 7
    assert options.output == Path("swapkit-demo")
    assert options.json is None
    assert options.seed == 0
    assert options.threads == max(1, processors() // 2)
    assert options.shares == ()
    assert options.sweep_steps == 5


def test_sweep_when_given_then_its_shares_once() -> None:
    assert read("--sweep", "50%, 20%,50%").shares == (0.5, 0.2)
    assert read("--sweep").shares == (0.8, 0.6, 0.45, 0.3, 0.2)


@pytest.mark.parametrize("text", ["", "50", "0%", "100%", "half", "50%,", "none"])
def test_sweep_when_it_is_none_then_says_what_is_possible(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        read("--sweep", text)
    assert repr(text) in str(caught.value)
    assert '"80%,45%"' in str(caught.value)


def test_budgets_when_repeated_and_in_lists_then_all_once() -> None:
    options = read("--budget", "60%,300MiB", "--budget", "60%", "--budget", "1000000")
    assert [budget.text for budget in options.budgets] == ["60%", "300MiB", "1000000"]


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [("60%", 600), ("12.5%", 125), ("700", 700), ("0.5KiB", 512), ("0.5kB", 500), ("600 B", 600)],
)
def test_budget_when_resolved_then_bytes(text: str, expected_bytes: int) -> None:
    assert parse_budget(text).resolve(peak_bytes=1000, least_bytes=100) == expected_bytes


@pytest.mark.parametrize(
    "text", ["", "0%", "100%", "-5%", "ten", "0", "1.5", "10XB", "60%%", "1e9"]
)
def test_budget_when_it_is_none_then_says_what_is_possible(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_budgets([text])
    assert repr(text) in str(caught.value)
    assert '"60%"' in str(caught.value)
    assert '"300MiB"' in str(caught.value)


@pytest.mark.parametrize("text", ["800MiB", "900MiB", "100MiB", "5%"])
def test_budget_when_out_of_reach_then_says_the_bounds(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_budget(text).resolve(peak_bytes=800 * MIB, least_bytes=100 * MIB)
    assert text in str(caught.value)
    assert "below 800.00 MiB" in str(caught.value)
    assert "above 100.00 MiB" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "huge"), "--size 'huge': expected one of tiny, compact"),
        (("--steps", "0"), "--steps 0: expected at least 1"),
        (("--sweep-steps", "0"), "--sweep-steps 0: expected at least 1"),
        (("--threads", "0"), f"--threads 0: expected 1 to {processors()}"),
        (("--threads", "9999"), f"--threads 9999: expected 1 to {processors()}"),
    ],
)
def test_options_when_a_value_makes_no_sense_then_says_what_is_possible(
    arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        read(*arguments)
    assert str(caught.value).startswith(said)


def test_output_when_it_is_a_file_then_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(OptionError, match="this is a file"):
        read("--output", str(taken))
