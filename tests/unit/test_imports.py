"""A call when a module is imported: not at a question for it, and not before."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from swapkit.imports import when_imported

if TYPE_CHECKING:
    from pathlib import Path

NAME = "stand_in_for_torch"


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("STATE = 'whole'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def test_call_when_torch_is_imported_then_made_once_with_the_whole_module() -> None:
    seen: list[str] = []
    when_imported(NAME, lambda: seen.append(sys.modules[NAME].STATE))
    assert importlib.util.find_spec(NAME) is not None, "as libraries ask"
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == ["whole"]
    importlib.reload(module)
    assert seen == ["whole"]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    del sys.modules[NAME]


def test_call_when_torch_was_imported_then_made_at_once() -> None:
    seen: list[int] = []
    importlib.import_module(NAME)
    when_imported(NAME, lambda: seen.append(1))
    assert seen == [1]
    del sys.modules[NAME]


def test_call_when_it_raises_then_the_import_raises() -> None:
    def refuse() -> None:
        raise KeyError("no budget")

    when_imported(NAME, refuse)
    with pytest.raises(KeyError, match="no budget"):
        importlib.import_module(NAME)
