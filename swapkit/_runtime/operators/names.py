"""Names of operators, as users write them and as a module's `forward` calls them."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from swapkit._runtime.torch_compat.internals import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    all_operator_names,
    higher_order_operators,
    overload_of,
    schema_of,
)
from swapkit.errors import InvalidArgument

# ---- names ---------------------------------------------------------------------------------------
#
# Names of operators, as users write them.
#
# A name is torch's name of an operator in one of these forms, or a word of `ALIASES`:
#
#   mm    aten.mm    aten::mm    aten.mm.default    aten::mm.default    torch.ops.aten.mm
#
# A name without an overload matches all overloads; a name without a namespace matches operators of
# all namespaces. A name also matches the operator's in-place form (`mul` matches `mul_`). Objects
# of `torch.ops` work as well: packets, overloads, and higher-order operators.

Operator: TypeAlias = "OpOverload[..., Any] | HigherOrderOperator"

_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul"),
    *("_addmm_activation", "_int_mm", "_scaled_mm*", "_grouped_mm", "_scaled_grouped_mm*"),
    "npu_linear",
)
_ATTENTION = (
    *("scaled_dot_product_attention", "_scaled_dot_product_*", "_flash_attention_forward*"),
    *("_efficient_attention_forward*", "_cudnn_attention_forward*", "flex_attention"),
    *("_flash_attn*forward", "npu_fusion_attention*"),
)
_CONVOLUTIONS = (
    *("convolution", "_convolution", "convolution_overrideable", "conv[123]d", "conv_depthwise3d"),
    *("cudnn_convolution*", "miopen_convolution*", "mkldnn_convolution", "_slow_conv2d_forward"),
    *("slow_conv3d*", "slow_conv_dilated*", "_conv_depthwise2d"),
)
_BATCH_NORMS = (
    *("batch_norm", "native_batch_norm", "_native_batch_norm_legit*", "_batch_norm_with_update*"),
    *("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"),
)
_LAYER_NORMS = ("layer_norm", "native_layer_norm")
_GROUP_NORMS = ("group_norm", "native_group_norm")
_RMS_NORMS = ("rms_norm", "_fused_rms_norm", "npu_rms_norm")
_SHARD_CHANGES = ("all_to_all_single", "shard_dim_alltoall")

# Words, each with patterns of operator names in any namespace. Backward operators never match a
# word.
ALIASES: dict[str, tuple[str, ...]] = {
    "matmul": _PRODUCTS,
    "linear": _PRODUCTS,
    "attention": _ATTENTION,
    "flash_attention": _ATTENTION,
    "scaled_dot_product_attention": _ATTENTION,
    "convolution": _CONVOLUTIONS,
    "conv": _CONVOLUTIONS,
    "softmax": ("softmax", "_softmax", "_safe_softmax", "_masked_softmax"),
    "log_softmax": ("log_softmax", "_log_softmax"),
    "cross_entropy": ("cross_entropy_loss", "nll_loss*"),
    "norm": (*_BATCH_NORMS, *_LAYER_NORMS, *_GROUP_NORMS, *_RMS_NORMS, "norm", "linalg_*norm"),
    "batch_norm": _BATCH_NORMS,
    "layer_norm": _LAYER_NORMS,
    "group_norm": _GROUP_NORMS,
    "rms_norm": _RMS_NORMS,
    "dropout": ("dropout", "native_dropout", "_fused_dropout", "npu_dropout*", "_npu_dropout*"),
    "all_reduce": ("all_reduce*",),
    "all_gather": ("all_gather_into_tensor*",),
    "reduce_scatter": ("reduce_scatter_tensor*",),
    "all_to_all": _SHARD_CHANGES,
    "collective": (
        *("all_reduce*", "all_gather_into_tensor*", "reduce_scatter_tensor*", *_SHARD_CHANGES),
        "broadcast*",
    ),
}

_NAMES_SUGGESTED = 3
_PREFIX = "torch.ops."


@functools.cache
def operator_names(operator: Operator) -> tuple[str, ...]:
    """Return every name that matches an operator, its own first."""
    if isinstance(operator, HigherOrderOperator):
        name: str = operator.name()  # type: ignore[no-untyped-call]
        return (name, f"higher_order.{name}", f"higher_order::{name}", *_aliases(name))
    return _names_of(schema_of(operator).name, overload_of(operator))


def _names_of(qualified: str, overload: str) -> tuple[str, ...]:
    namespace, _, base = qualified.partition("::")
    # Skip dunder names such as __and__; __iand__ is in place, but not named that way.
    plain = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    bases = (base,) if plain == base else (base, plain)
    names = [
        name
        for each in bases
        for name in (
            each,
            f"{namespace}.{each}",
            f"{namespace}::{each}",
            f"{namespace}.{each}.{overload}",
            f"{namespace}::{each}.{overload}",
        )
    ]
    return tuple(dict.fromkeys([*names, *_aliases(plain)]))


def _aliases(base: str) -> list[str]:
    if base.endswith("_backward"):
        return []
    return [
        word
        for word, patterns in ALIASES.items()
        if any(fnmatchcase(base, pattern) for pattern in patterns)
    ]


@functools.lru_cache(maxsize=256)
def matches(names: tuple[object, ...]) -> Callable[[Operator], bool]:
    """Return a function that tells whether an operator matches any of the names.

    Raises:
        InvalidArgument: no operator matches a name; the message suggests similar names.
    """
    words = frozenset(canonical_name(name) for name in names if isinstance(name, str))
    objects = frozenset(name for name in names if not isinstance(name, str))
    for each in objects:
        if not isinstance(each, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
            raise InvalidArgument(
                f"{each!r}: expected the name of an operator, e.g. 'mm' or 'aten.mm.default', or "
                "an object of torch.ops"
            )

    @functools.cache
    def is_named(operator: Operator) -> bool:
        if operator in objects or getattr(operator, "overloadpacket", None) in objects:
            return True
        return not words.isdisjoint(operator_names(operator))

    return is_named


def canonical_name(name: str) -> str:
    """Return a name in the form that `operator_names` uses.

    Raises:
        InvalidArgument: no operator has this name; the message suggests similar names.
    """
    word = name.strip().removeprefix(_PREFIX)
    if is_known(word):
        return word
    _index.cache_clear()  # a library may have been loaded meanwhile
    if is_known(word):
        return word
    near = difflib.get_close_matches(word, {**ALIASES, **_index()}, n=_NAMES_SUGGESTED)
    hint = f"; similar names: {', '.join(near)}" if near else ""
    raise InvalidArgument(f"no operator is named {name!r}{hint}")


def is_known(name: str) -> bool:
    """Return whether `name` is a word of `ALIASES` or matches a registered operator."""
    return name in ALIASES or name in _index()


def find_operators(name: object) -> Iterator[Operator]:
    """Yield the registered operators that match a name or an object of `torch.ops`."""
    if isinstance(name, OpOverloadPacket):
        overloads: list[str] = name.overloads()  # type: ignore[no-untyped-call]
        yield from (getattr(name, overload) for overload in overloads)
    elif isinstance(name, (OpOverload, HigherOrderOperator)):
        yield name
    elif isinstance(name, str):
        for qualified, overload in _index().get(canonical_name(name), ()):
            operator = _lookup(qualified, overload)
            if operator is not None:
                yield operator


@functools.cache
def _index() -> dict[str, list[tuple[str, str]]]:
    """Return a map from every name to its operators, as qualified name and overload."""
    index: dict[str, list[tuple[str, str]]] = {}
    for full in all_operator_names():
        qualified, _, overload = full.partition(".")
        entry = (qualified, overload or "default")
        for name in _names_of(*entry):
            index.setdefault(name, []).append(entry)
    for name, operator in higher_order_operators.items():
        for each in operator_names(operator):
            index.setdefault(each, []).append((f"higher_order::{name}", ""))
    return index


@functools.lru_cache(maxsize=1)
def names_known(_known: int) -> dict[str, list[tuple[str, str]]]:
    """Return a fresh map from names to operators; the overload is empty for higher-order ones.

    `_known`: a number that changes when an operator is defined.
    """
    _index.cache_clear()
    return _index()


def _lookup(qualified: str, overload: str) -> Operator | None:
    namespace, _, base = qualified.partition("::")
    if not overload:
        return higher_order_operators.get(base)
    try:
        found: Operator = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except (AttributeError, RuntimeError):
        return None
    return found


def is_random(operator: Operator) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


# ---- forward source ------------------------------------------------------------------------------
#
# The operators that a module runs, known from its class or read from the source of `forward`.
#
# The reader finds calls and operator signs in the body of `forward`, and in Python functions and
# methods of the class that the body names. Not every operator found runs: of two attention kernels,
# only one may.

ATTENTION = ("flash_attention", "scaled_dot_product_attention")
ACTIVATIONS = ("gelu", "hardswish", "leaky_relu", "mish", "relu", "sigmoid", "silu", "tanh")
_IS_ATTENTION = re.compile(r".*(attention|attn).*", re.IGNORECASE)
_PRODUCT_LAYERS = frozenset({"addmm", "baddbmm", "bmm", "linear", "mm"})
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
    return names | {"matmul"} if names & _PRODUCT_LAYERS else names


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
                yield from _names_in(node)
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


def _names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _BY_SIGN:
        yield _BY_SIGN[type(node.op)]
    elif isinstance(node, ast.Call) and not _is_of_self(node.func):
        name = _called(node)
        if _IS_ATTENTION.fullmatch(name):
            yield from ATTENTION
        if is_known(name):
            yield name
