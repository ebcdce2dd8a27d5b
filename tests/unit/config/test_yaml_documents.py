"""Documents of a few lines cannot cost more time and memory than their text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch import nn

import swapkit
from swapkit.config import yaml_documents
from swapkit.config.smart_swap import read_smart_swap
from swapkit.config.yaml_documents import MOST_DIGITS, MOST_LEVELS, MOST_VALUES, read_yaml
from swapkit.errors import InvalidConfiguration

if TYPE_CHECKING:
    from pathlib import Path


def bomb(part: str) -> str:
    """Return 40 lines, each of which names the one before it nine times."""
    lines = [f"a0: &a0 {part}"]
    for level in range(1, 40):
        inner = ", ".join([f"*a{level - 1}"] * 9)
        content = f"[{inner}]" if part.startswith("[") else f"{{<<: [{inner}]}}"
        lines.append(f"a{level}: &a{level} {content}")
    return "\n".join(lines) + "\n"


HOSTILE = {
    "aliases": (bomb("[x, x]"), f"more than {MOST_VALUES} values"),
    "merged aliases": (bomb("{x: 1}"), f"more than {MOST_VALUES} values"),
    "itself": ("a: &a [1, *a]\n", f"more than {MOST_VALUES} values"),
    "deep": (f"a: {'[' * 50_000}{']' * 50_000}\n", f"more than {MOST_LEVELS} levels"),
    "deep blocks": (f"a:\n {'- ' * 50_000}\n", f"more than {MOST_LEVELS} levels"),
    "digits": (f"a: {'9' * 50_000}\n", f"more than {MOST_DIGITS} digits"),
    "digits to the base 60": (f"a: {'1:' * 50_000}1\n", f"more than {MOST_DIGITS} digits"),
    "date": ("a: 2020-99-99\n", "cannot read"),
    "number": ("a: !!int x\n", "cannot read"),
    "empty number": ("a: !!int ''\n", "cannot read"),
    "flag": ("a: !!bool x\n", "cannot read"),
    "time": ("a: !!timestamp x\n", "cannot read"),
    "python": ("a: !!python/object/apply:os.system [true]\n", "not valid YAML"),
    "control character": ("a: \a\n", "not valid YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_document_when_it_is_hostile_then_an_error_that_names_the_reason(
    name: str, tmp_path: Path
) -> None:
    text, reason = HOSTILE[name]
    with pytest.raises(InvalidConfiguration, match=reason):
        swapkit.configure(nn.Sequential(nn.Linear(2, 2)), text)
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfiguration, match=f"settings.yaml .*{reason}"):
        read_smart_swap(file)


def test_document_when_its_bytes_are_no_text_then_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "memory.yaml"
    file.write_bytes(b"a: \xff\n")
    for read in (read_smart_swap, lambda path: swapkit.configure(nn.Linear(2, 2), path)):
        with pytest.raises(InvalidConfiguration, match=r"memory\.yaml is not UTF-8"):
            read(file)


def test_document_when_it_is_just_within_the_limits_then_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yaml_documents, "MOST_VALUES", 10)
    text = "a: &a [1, 2]\nb: *a\nc: 2020-01-01\n"
    found = read_yaml(text.replace("c: 2020-01-01\n", ""), "it")
    assert found == {"a": [1, 2], "b": [1, 2]}
    with pytest.raises(InvalidConfiguration, match="more than 10 values"):
        read_yaml(text + "d: 1\n", "it")
    monkeypatch.undo()
    sentence = "1 " + "word " * MOST_DIGITS
    assert read_yaml(f"a: {sentence}", "it") == {"a": sentence.strip()}
    assert read_yaml("a: " + "[" * (MOST_LEVELS - 1) + "]" * (MOST_LEVELS - 1), "it")
