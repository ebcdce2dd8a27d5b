"""The operators that a module runs, known from its class or read from the source of `forward`.

The reader finds calls and operator signs in the body of `forward`, and in Python functions and
methods of the class that the body names. Not every operator found runs: of two attention kernels,
only one may.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.operators.names import is_known

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ATTENTION = ("flash_attention", "scaled_dot_product_attention")
ACTIVATIONS = ("gelu", "hardswish", "leaky_relu", "mish", "relu", "sigmoid", "silu", "tanh")
_IS_ATTENTION = re.compile(r".*(attention|attn).*", re.IGNORECASE)
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "linear", "mm"})
_BY_SIGN = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
}
_BY_CLASS: tuple[tuple[type[torch.nn.Module], tuple[str, ...]], ...] = (
    (torch.nn.Linear, ("linear", "matmul", "bias_add")),
    (torch.nn.Embedding, ("embedding",)),
    (torch.nn.Dropout, ("dropout",)),
)
# For a class without source: it may run any of these.
_USUAL = (*_BY_SIGN.values(), *ACTIVATIONS, *ATTENTION, "dropout", "softmax")
_WRAPPER = "adapt_mem_func_wrapper"
_FOLLOWED = 2  # depth of calls that are followed
_KINDS = 1024  # classes remembered


def operators_of(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of operators that a module's own `forward` may run."""
    kind = type(module)
    for base, names in _BY_CLASS:
        if isinstance(module, base):
            return names
    names = tuple(_read_operators(kind))  # type: ignore[arg-type]
    activation = kind.__name__.lower().removesuffix("activation")
    return (*names, activation) if is_known(activation) else names


@functools.lru_cache(maxsize=_KINDS)
def _read_operators(kind: type[torch.nn.Module]) -> frozenset[str]:
    """Return the names of operators in the source of a class's `forward`."""
    if kind.forward is torch.nn.Module.forward:
        return frozenset()
    try:
        names = frozenset(_Reader(kind).read(kind.forward, _FOLLOWED))
    except (OSError, TypeError, SyntaxError):
        return frozenset(_USUAL)
    return names | {"matmul"} if names & _PRODUCTS else names


class _Reader:
    """Reads the `forward` of one class and the functions it calls, each once."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        self._kind = kind
        self._read: set[object] = set()

    def read(self, function: Any, follow: int) -> Iterator[str]:  # noqa: ANN401
        """Yield the names of the operators that a function runs.

        Raises:
            OSError: the source is not available.
        """
        function = inspect.unwrap(function)
        self._read.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        body = getattr(tree.body[0], "body", tree.body)  # skip decorators: a call does not run them
        around = getattr(function, "__globals__", {})
        for statement in body if isinstance(body, list) else [body]:
            for node in ast.walk(statement):
                yield from _names_of(node)
                yield from _find_applied(node, around)
                beside = self._find_function(node, around)
                if follow and beside is not None and beside not in self._read:
                    try:
                        yield from self.read(beside, follow - 1)
                    except (OSError, TypeError, SyntaxError):
                        continue

    def _find_function(self, node: ast.AST, around: Mapping[str, object]) -> object | None:
        """Return the Python function or method that a source node names, if any."""
        found = None
        if isinstance(node, ast.Name):
            found = around.get(node.id)
        elif _is_of_self(node):
            found = inspect.getattr_static(self._kind, node.attr, None)  # type: ignore[attr-defined]
        found = getattr(found, "__func__", found)  # of a static or class method
        if not inspect.isfunction(found) or found.__module__.startswith("swapkit."):
            return None
        function: object = inspect.unwrap(found)
        return function


def _is_of_self(node: ast.AST) -> bool:
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id == "self"  # type: ignore[attr-defined]


def _find_applied(node: ast.AST, around: Mapping[str, object]) -> Iterator[str]:
    """Yield the name of an `autograd.Function` that is applied through swapkit."""
    if isinstance(node, ast.Call) and node.args and _is_wrapper(_called(node), around):
        function = node.args[0]
        name = getattr(function, "attr", getattr(function, "id", ""))
        yield getattr(around.get(name), "__name__", name)


def _is_wrapper(name: str, around: Mapping[str, object]) -> bool:
    return getattr(around.get(name), "__name__", name) == _WRAPPER  # perhaps under an alias


def _called(node: ast.Call) -> str:
    """Return the name of the called function or method."""
    called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    name: str = getattr(called, "attr", getattr(called, "id", ""))
    return name


def _names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _BY_SIGN:
        yield _BY_SIGN[type(node.op)]
    elif isinstance(node, ast.Call) and not _is_of_self(node.func):
        name = _called(node)
        if _IS_ATTENTION.fullmatch(name):
            yield from ATTENTION
        if is_known(name):
            yield name
