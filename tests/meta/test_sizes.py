"""Files and functions stay small: the hard gates, and nothing passes one without a reason."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import lizard

from tests.meta.sources import HEADER, ROOT, list_sources

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GATES = {
    "lines of a Python file": 600,
    "lines of a Python function": 50,
    "statements of a Python function": 40,
    "complexity of a Python function": 10,
    "arguments of a Python function": 6,
    "attributes of a Python class": 15,
    "only child of a base class": 0,
    "lines of a C file": 600,
    "lines of a header": 350,
    "lines of a C function": 60,
    "nesting of a C function": 3,
    "parameters of a C function": 6,
    "functions of the C interface": 60,
    "code lines per assertion": 25,
}
ASSERTED_FLOORS = ("pool", "disk", "sched")
BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension,
    ast.match_case,
)  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
# Thread-safety attributes stand where lizard looks for a function's name.
C_ATTRIBUTE = re.compile(r"\bSK_[A-Z_]+\([^()]*\)(?=\s*(?:SK_[A-Z_]+\(|[{;]))")
C_CONTROL = re.compile(r"^( +)(?:\} )?(?:if|else|for|while|do|switch)\b")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One thing measured against one gate."""

    path: str
    item: str
    gate: str
    value: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.item, self.gate


def walk_own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from walk_own(node)


def measure_python_function(path: str, name: str, node: Function) -> Iterator[Size]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    own = list(walk_own(node))
    documented = ast.get_docstring(node) is not None
    first = node.body[min(1 if documented else 0, len(node.body) - 1)]
    values = {
        "lines": (node.end_lineno or 0) - first.lineno + 1,
        "statements": sum(isinstance(inner, ast.stmt) for inner in own) - documented,
        "complexity": 1
        + sum(isinstance(inner, BRANCHES) for inner in own)
        + sum(len(inner.values) - 1 for inner in own if isinstance(inner, ast.BoolOp)),
        "arguments": sum(argument.arg not in {"self", "cls"} for argument in every),
    }
    for what, value in values.items():
        yield Size(path=path, item=name, gate=f"{what} of a Python function", value=value)


def count_attributes(node: ast.ClassDef) -> int:
    """Return how many attributes of `self` the methods of a class assign."""
    return len(
        {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        }
    )


def measure_python(path: str, text: str) -> Iterator[Size]:
    yield Size(path=path, item="", gate="lines of a Python file", value=text.count("\n"))

    def visit(node: ast.AST, prefix: str) -> Iterator[Size]:
        for inner in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(inner, (*FUNCTIONS, ast.ClassDef)):
                name = f"{prefix}.{inner.name}".lstrip(".")
            if isinstance(inner, FUNCTIONS):
                yield from measure_python_function(path, name, inner)
            if isinstance(inner, ast.ClassDef):
                gate, value = "attributes of a Python class", count_attributes(inner)
                yield Size(path=path, item=name, gate=gate, value=value)
            yield from visit(inner, name)

    yield from visit(ast.parse(text), "")


def names_used(node: ast.AST) -> Iterator[str]:
    """Yield the names in a node, but for annotations and the bases of classes."""
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns", "bases"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.Name):
                    yield child.id
                if isinstance(child, ast.AST):
                    yield from names_used(child)


def measure_bases(sources: dict[str, str]) -> Iterator[Size]:
    """Yield the base classes of a package that nothing makes or recognises."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    used = {name for tree in trees.values() for name in names_used(tree)}
    classes: dict[str, str] = {}
    children: dict[str, set[str]] = {}
    for path, node in ((path, node) for path, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = path
            for base in node.bases:
                name = re.sub(r"\[.*", "", ast.unparse(base))
                children.setdefault(name, set()).add(node.name)
    used |= children.get("Protocol", set())
    for name in (classes.keys() & children.keys()) - used:
        gate, value = "only child of a base class", len(children[name]) == 1
        yield Size(path=classes[name], item=name, gate=gate, value=value)


def count_code_lines(text: str) -> int:
    bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in bare.splitlines())


def measure_nesting(lines: list[str]) -> int:
    """Return how deep control statements nest; the formatter has made it the indentation."""
    return max(
        (len(found[1]) // 4 for line in lines if (found := C_CONTROL.match(line))), default=0
    )


def measure_c(path: str, text: str) -> Iterator[Size]:
    kind = "a header" if path.endswith(".h") else "a C file"
    yield Size(path=path, item="", gate=f"lines of {kind}", value=text.count("\n"))
    lines = text.splitlines()
    measured = lizard.analyze_file.analyze_source_code(path, C_ATTRIBUTE.sub("", text))
    for function in measured.function_list:
        values = {
            "lines": function.end_line - function.start_line + 1,
            "nesting": measure_nesting(lines[function.start_line - 1 : function.end_line]),
            "parameters": len(function.parameters),
        }
        for what, value in values.items():
            yield Size(path=path, item=function.name, gate=f"{what} of a C function", value=value)


def measure_assertions(sources: dict[str, str]) -> Iterator[Size]:
    for floor in ASSERTED_FLOORS:
        folder = f"swapkit/_native/src/{floor}/"
        texts = [text for path, text in sources.items() if path.startswith(folder)]
        asserts = sum(len(re.findall(r"\b(?:sk_assert\w*|ENSURE)\s*\(", text)) for text in texts)
        if texts:
            lines = sum(map(count_code_lines, texts))
            gate = "code lines per assertion"
            yield Size(path=folder, item="", gate=gate, value=lines / max(asserts, 1))


def measure_interface(text: str) -> Size:
    functions = len(set(re.findall(r"^SK_API\b[^;]*?\b(sk_\w+)\(", text, flags=re.MULTILINE)))
    path = HEADER.relative_to(ROOT).as_posix()
    return Size(path=path, item="", gate="functions of the C interface", value=functions)


def read(suffixes: set[str]) -> dict[str, str]:
    paths: list[Path] = [path for path in list_sources() if path.suffix in suffixes]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if "golden" not in path.parts
    }


@functools.cache
def measure_all() -> list[Size]:
    c_sources = read({".c", ".h", ".cpp"})
    python = read({".py"})
    sizes = [size for path, text in python.items() for size in measure_python(path, text)]
    package = {path: text for path, text in python.items() if path.startswith("swapkit/")}
    sizes += measure_bases(package)
    sizes += [size for path, text in c_sources.items() for size in measure_c(path, text)]
    sizes += measure_assertions(c_sources)
    interface = (HEADER, HEADER.with_name("swapkit_sched.h"))
    sizes.append(measure_interface("".join(path.read_text(encoding="utf-8") for path in interface)))
    return sizes


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """One entry of size_exceptions.toml."""

    path: str
    item: str
    gate: str
    limit: float
    reason: str


def load_exceptions() -> dict[tuple[str, str, str], Allowance]:
    text = (ROOT / "tests/meta/size_exceptions.toml").read_text(encoding="utf-8")
    entries = [Allowance(**entry) for entry in tomllib.loads(text).get("exception", [])]
    return {(entry.path, entry.item, entry.gate): entry for entry in entries}


def find_limit(size: Size, exceptions: dict[tuple[str, str, str], Allowance]) -> float:
    allowance = exceptions.get(size.key)
    return GATES[size.gate] if allowance is None else allowance.limit


def test_sizes_when_measured_then_within_the_gates() -> None:
    exceptions = load_exceptions()
    too_large = [
        f"{size.path}: {size.item or 'file'}: {size.gate}: {size.value:g} > {limit:g}"
        for size in measure_all()
        if size.value > (limit := find_limit(size, exceptions))
    ]
    assert not too_large, "\n".join(too_large)


def test_exceptions_when_listed_then_still_needed_and_explained() -> None:
    exceptions = load_exceptions()
    needed = {size.key for size in measure_all() if size.value > GATES[size.gate]}
    assert set(exceptions) <= needed, f"no longer needed: {sorted(set(exceptions) - needed)}"
    assert all(entry.reason.strip() for entry in exceptions.values())


def test_measures_when_python_is_long_then_every_gate_sees_it() -> None:
    body = "".join(f"    if a{number}:\n        pass\n" for number in range(30))
    text = f"def f(a0, a1, a2, *, a3, a4, a5, a6):\n    '''Doc.'''\n{body}" + "\n" * 600
    values = {size.gate: size.value for size in measure_python("x.py", text)}
    assert values == {
        "lines of a Python file": 662,
        "lines of a Python function": 60,
        "statements of a Python function": 60,
        "complexity of a Python function": 31,
        "arguments of a Python function": 7,
    }


def test_measures_when_a_base_has_one_child_then_seen() -> None:
    made = "class Made: ...\nclass Used(Made): ...\ndef f(a: Used): Made()\n"
    text = "class Base: ...\nclass A(Base): ...\nclass Two: ...\nclass B(Two): ...\n"
    found = {each.item: each.value for each in measure_bases({"a": text, "b": "class C(Two): ..."})}
    assert found == {"Base": 1, "Two": 0}
    assert not list(measure_bases({"a": made}))
    assert list(measure_bases({"a": made.replace("Made()", "...")}))


def test_measures_when_c_is_long_then_every_gate_sees_it() -> None:
    text = """\
static int f(int a, int b, int c, int d, int e, int g, int h) SK_REQUIRES(x->lock) {
    if (a) {
        while (b) {
            if (c) {
                a = 1;
            } else if (d) {
                do {
                    b = (pair){.x = 1, .y = e ? 1 : 2};
                } while (c || d);
            }
        }
    }
    return 0;
}
"""
    values = {(size.item, size.gate): size.value for size in measure_c("x.c", text)}
    assert values == {
        ("", "lines of a C file"): 14,
        ("f", "lines of a C function"): 14,
        ("f", "nesting of a C function"): 4,
        ("f", "parameters of a C function"): 7,
    }
    assert count_code_lines("/* a\n b */\nint x; /* c */\n\n") == 1
