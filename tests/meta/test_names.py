"""Names that stand for one thing each."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import swapkit

PACKAGE = Path(swapkit.__file__).parent


def classes_of(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


# One class for each framework, under one name: users import it from the framework's module.
FRAMEWORKS = "integrations"
SHARED = "SwapkitCallback"


def test_classes_when_all_files_are_read_then_no_name_stands_for_two() -> None:
    files = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in classes_of(file.read_text()):
            if name == SHARED and file.parent.name == FRAMEWORKS:
                continue
            files[name].append(str(file.relative_to(PACKAGE)))
    assert len(files) > 300
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
