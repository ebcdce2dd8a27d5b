"""Definitions of the package that no public name reaches: `python -m tools.reachable`.

A definition is a function, a class or a method. One is reached if code that is reached contains its
name: a name that two definitions share counts for both, so nothing that is used is listed. Roots
are the statements of each module outside of definitions, the public names, the command line, the
folders for other libraries, and what documents and the shim's C++ mention. Tests and benchmarks are
no roots.

Exit status: 0 everything is reached; 1 something is not, and its lines are printed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "swapkit"
# Other libraries and users call what is defined here by names that the package does not contain.
ENTRIES = ("swapkit/integrations/", "swapkit/compat/", "swapkit/testing/", "swapkit/errors.py")
DOCUMENTS = ("README.md", "docs/**/*.md", "tutorials/**/*.py", "examples/**/*.py")
WORD = re.compile(r"[A-Za-z_]\w+")
DOTTED = re.compile(r"[A-Za-z_][\w.:]*")
PROTOCOL = re.compile(r"__\w+__|_repr_\w+_|visit_\w+")  # called by Python and its libraries
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(eq=False)
class Found:
    """A definition, and the names in it but outside of its methods."""

    path: str
    name: str
    node: Definition
    methods: list[Found] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Lines of the definition, with its methods."""
        return (self.node.end_lineno or 0) - self.node.lineno + 1


def names_in(nodes: Iterable[ast.AST], skipped: Iterable[ast.AST] = ()) -> Iterator[str]:
    """Yield the names that code contains, also in strings and as keywords, but no imports."""
    left, without = list(nodes), set(skipped)
    while left:
        node = left.pop()
        if node in without or isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and DOTTED.fullmatch(str(node.value)):
            yield from re.split(r"[.:]", str(node.value))
        left.extend(ast.iter_child_nodes(node))


def is_list_of_exports(node: ast.stmt) -> bool:
    """Return whether a statement is `__all__`, which names what it does not use."""
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"


class Package:
    """The definitions of the package by their names, and the names that the roots contain."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.by_name: defaultdict[str, list[Found]] = defaultdict(list)
        self.roots: set[str] = set()
        for path in sorted(PACKAGE.rglob("*.py")):
            self._read(path)
        for path in PACKAGE.rglob("*.[ch]pp"):
            self.roots.update(re.findall(r'"([A-Za-z_]\w+)"', path.read_text(encoding="utf-8")))
        for pattern in (*DOCUMENTS, "swapkit/__init__.py"):
            for path in ROOT.glob(pattern):
                self.roots.update(WORD.findall(path.read_text(encoding="utf-8")))

    def _read(self, path: Path) -> None:
        own = str(path.relative_to(ROOT))
        outside: list[ast.stmt] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                outside.append(node)
                continue
            found = self._add(Found(own, node.name, node))
            if isinstance(node, ast.ClassDef):
                inner = (each for each in node.body if isinstance(each, FUNCTIONS))
                found.methods = [
                    self._add(Found(own, f"{node.name}.{each.name}", each)) for each in inner
                ]
        self.roots.update(names_in(each for each in outside if not is_list_of_exports(each)))

    def _add(self, found: Found) -> Found:
        self.found.append(found)
        self.by_name[found.node.name].append(found)
        return found

    def unreached(self) -> list[Found]:
        """Return what no root reaches; not the methods of a class that is listed itself."""
        reached = self._reach()
        dead = [each for each in self.found if each not in reached]
        inside = {id(method) for each in dead for method in each.methods}
        return [each for each in dead if id(each) not in inside]

    def _reach(self) -> set[Found]:
        waiting = [each for each in self.found if self._is_entry(each)]
        for name in self.roots:
            waiting += self.by_name.get(name, ())
        reached: set[Found] = set()
        while waiting:
            found = waiting.pop()
            if found in reached:
                continue
            reached.add(found)
            methods = [each.node for each in found.methods]
            for name in names_in([found.node], methods):
                waiting += self.by_name.get(name, ())
            overrides = self._has_foreign_base(found.node)
            waiting += [
                each
                for each in found.methods
                if overrides or PROTOCOL.fullmatch(each.node.name) is not None
            ]
        return reached

    def _is_entry(self, found: Found) -> bool:
        return found.path.startswith(ENTRIES) or any(
            name in {"command", "group", "register"} for name in names_in(found.node.decorator_list)
        )

    def _has_foreign_base(self, node: Definition) -> bool:
        """Whether another library may call the methods of a class, as overrides of its own."""
        return isinstance(node, ast.ClassDef) and any(
            not isinstance(base, ast.Name) or base.id not in self.by_name for base in node.bases
        )


def main() -> int:
    """Print what nothing reaches."""
    dead = Package().unreached()
    for each in dead:
        print(f"{each.path}:{each.node.lineno}: {each.name}, {each.lines} lines")
    if dead:
        print(f"{len(dead)} definitions are reached from no public name; delete or move them")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
