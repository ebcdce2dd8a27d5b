"""The layers of an ordinary torch model, and the names of their parts.

A layer is an element of the model's list of layers. Its parts are its submodules. Each part has its
own name and further *names*, such as `attention` for the `self_attn` of a Llama. The operators of a
module are those that its `forward` calls. They are read from its source and from the functions that
it names, or known for its class (`operators/names.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swapkit._runtime.model.tracker import runs
from swapkit._runtime.operators.names import ACTIVATIONS, ATTENTION, is_known, operators_of
from swapkit.errors import InvalidArgument

_LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_NORM = re.compile(r".*norm\d?d?", re.IGNORECASE)

# For each name in a configuration, the paths of that part in models that name it differently. The
# first path that exists counts.
NAMES: Mapping[str, tuple[str, ...]] = {
    "attention": (
        *("self_attn", "attn", "self_attention", "attention"),
        "layer.0.SelfAttention",
    ),
    "attention.wq": ("q_proj", "query", "q_lin", "q", "self.query", "attention.query"),
    "attention.wk": ("k_proj", "key", "k_lin", "k", "self.key", "attention.key"),
    "attention.wv": ("v_proj", "value", "v_lin", "v", "self.value", "attention.value"),
    "attention.w_qkv": ("qkv_proj", "c_attn", "query_key_value", "linear_qkv", "Wqkv"),
    "attention.wo": (
        *("o_proj", "out_proj", "c_proj", "dense", "out_lin", "o", "linear_proj"),
        *("output.dense",),
    ),
    "cross_attention": (
        *("encoder_attn", "crossattention", "layer.1.EncDecAttention", "multihead_attn"),
    ),
    "feed_forward": (
        *("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"),
        *("layer.2.DenseReluDense", "layer.1.DenseReluDense"),
        *("intermediate, output", "fc1, activation_fn, fc2", "linear1, linear2"),
    ),
    "feed_forward.w1": (
        *("gate_proj", "c_fc", "fc1", "dense_h_to_4h", "linear_fc1", "lin1"),
        *("wi_0", "wi", "intermediate.dense", "linear1", "up_proj"),
    ),
    "feed_forward.w2": (
        *("down_proj", "c_proj", "fc2", "dense_4h_to_h", "linear_fc2", "lin2"),
        *("wo", "output.dense", "linear2"),
    ),
    "feed_forward.w3": ("up_proj", "wi_1"),
    "feed_forward.activation": (
        *("act_fn", "act", "activation_func", "activation_fn", "activation"),
        *("intermediate.intermediate_act_fn",),
    ),
    "attention_norm": (
        *("input_layernorm", "ln_1", "self_attn_layer_norm", "norm1", "ln1", "layernorm_before"),
        *("layer.0.layer_norm", "attention.output.LayerNorm", "sa_layer_norm"),
    ),
    "ffn_norm": (
        *("pre_feedforward_layernorm", "post_attention_layernorm", "pre_mlp_layernorm"),
        *("ln_2", "final_layer_norm", "norm2", "ln2", "layernorm_after"),
        *("layer.2.layer_norm", "layer.1.layer_norm", "output.LayerNorm", "output_layer_norm"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOperator:
    """Operators under one name: the module that runs them, and a pattern for their names."""

    module: torch.nn.Module
    pattern: str


class ModulePart:
    """A layer or a part of a layer, with its operators and parts by name.

    `modules`: usually one. Several form one part by name only. None: it has only operators.
    """

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.modules = modules
        # Every part with its names, the usual ones first: a log shows the first that matches.
        self._parts: list[tuple[list[str], ModulePart]] = []
        self._operators: dict[str, ModuleOperator] = {}

    @property
    def operators(self) -> Sequence[str]:
        """The names of the operators that the part's own forward runs."""
        return sorted(self._operators)

    @property
    def children(self) -> Sequence[tuple[str, ModulePart]]:
        """The parts inside, by all of their names, in the order of their declaration."""
        return [(name, part) for names, part in self._parts for name in names]

    def operator(self, name: str) -> ModuleOperator:
        """Return the operators with this name."""
        return self._operators[name]

    def find(self, path: str) -> ModulePart | None:
        """Return the part at a path of any of the names; None: there is none."""
        part: ModulePart | None = self
        for name in path.split(".") if path else ():
            part = dict(part.children).get(name) if part else None
        return part

    def walk(self) -> Iterator[ModulePart]:
        """Yield this part and all parts inside it, outermost first."""
        level: list[ModulePart] = [self]
        while level:
            yield from level
            level = [part for above in level for _, part in above._parts]  # noqa: SLF001 - same class

    def add_part(self, name: str, part: ModulePart) -> bool:
        """Add a name for a part; return False if another part has that name."""
        named = dict(self.children).get(name)
        if named is not None:
            return named is part
        for names, other in self._parts:
            if other is part:
                names.insert(0, name)
                return True
        self._parts.append(([name], part))
        return True

    def add_operator(self, name: str, operator: ModuleOperator) -> None:
        """Add a name for operators, unless other operators have that name."""
        self._operators.setdefault(name, operator)


def name_layers(layers: Iterable[torch.nn.Module], names: Mapping[str, str]) -> list[ModulePart]:
    """Return layers as parts, with the usual names and the user's.

    Args:
        layers: elements of the model's list of layers.
        names: paths in a layer by the name that they get, such as
            `{"attention": "mixer", "attention.flash_attention": "mixer.selective_scan"}`. Layers
            may differ: where a path does not exist in a layer, the name is not added there.

    Raises:
        InvalidArgument: a path exists in no layer, or a name belongs to another part.
    """
    parts = [_read_part(layer, {}) for layer in layers]
    # The user's names first: they take precedence over the usual ones. User names that build on
    # usual names fail here and are added after these.
    later = {name: path for name, path in names.items() if _fail_to_name(parts, name, path)}
    for part in parts:
        _add_usual_names(part)
    for name, path in later.items():
        failure = _fail_to_name(parts, name, path)
        if failure:
            raise InvalidArgument(f"names[{name!r}]: {failure}")
    return parts


def _fail_to_name(parts: Sequence[ModulePart], name: str, path: str) -> str:
    """Add a name to every layer that has the path; return why none has, or an empty string."""
    failures = [_add_user_name(part, name, path) for part in parts]
    return failures[0] if failures and all(failures) else ""


def _read_part(module: torch.nn.Module, known: dict[torch.nn.Module, ModulePart]) -> ModulePart:
    """Return a module as a part. A module that is used in several places is one part."""
    if module not in known:
        part = known[module] = ModulePart(module)
        for name, child in module.named_children():
            part.add_part(name, _read_part(child, known))
        for name in operators_of(module):
            part.add_operator(name, ModuleOperator(module=module, pattern=re.escape(name)))
        if _NORM.fullmatch(type(module).__name__):  # may run one operator or several
            part.add_operator("norm", ModuleOperator(module=module, pattern=".*"))
    return known[module]


# ---- names --------------------------------------------------------------------------------------


def _refuse_part(root: ModulePart, path: str) -> str:
    known = ", ".join(own for own, _ in root.children)
    has = f"its parts are {known}" if known else "it has no parts"
    return f"a layer has no part {path!r}; {has}"


def _add_user_name(root: ModulePart, name: str, path: str) -> str:
    """Add a name; return what is wrong with it, or an empty string."""
    above, _, last = name.rpartition(".")
    parent, found = root.find(above), root.find(path)
    if parent is None:
        return f"a layer has no part {above!r}; name it first"
    if found is not None:
        return "" if parent.add_part(last, found) else "a part with this name already exists"
    inside, _, operator = path.rpartition(".")
    holder = root.find(inside)
    if holder is None or not holder.modules or not (inside or is_known(operator)):
        return _refuse_part(root, path)
    means = ModuleOperator(module=holder.modules[0], pattern=re.escape(operator))
    parent.add_operator(last, means)
    return "" if parent.operator(last) == means else "an operator with this name already exists"


def _add_usual_names(root: ModulePart) -> None:
    named: set[ModulePart] = set()  # a part gets at most one usual name
    for name, places in NAMES.items():
        above, _, last = name.rpartition(".")
        parent = root.find(above)
        found = parent and next(_find_places(parent, places), None)
        if parent and found and found not in named and parent.add_part(last, found):
            named.add(found)
    _name_activation(root)
    for part in [root.find("attention"), root.find("cross_attention")]:
        if part is not None:
            _lend_attention(part)


def _find_places(parent: ModulePart, places: Iterable[str]) -> Iterator[ModulePart]:
    """Yield the parts at some places. A place with several paths yields one part of all of them."""
    for place in places:
        parts = {path: parent.find(path) for path in place.split(", ")}
        found = {path: part for path, part in parts.items() if part is not None}
        if len(found) == 1 == len(parts):
            yield from found.values()
        elif len(found) == len(parts):
            group = ModulePart(*(module for part in found.values() for module in part.modules))
            for path, part in found.items():
                group.add_part(path, part)
            yield group


def _name_activation(root: ModulePart) -> None:
    """Make the activation a part of `w1`, as in the original model, wherever it is."""
    inner, first = root.find("feed_forward"), root.find("feed_forward.w1")
    activation = root.find("feed_forward.activation")
    if inner is None or first is None:
        return
    if activation is None:  # a function call in the forward
        own = [name for name in inner.operators if name in ACTIVATIONS]
        if not own:
            return
        activation = ModulePart()
        for name in own:
            activation.add_operator(name, inner.operator(name))
    first.add_part("activation", activation)


def _lend_attention(part: ModulePart) -> None:
    """Also list the attention operator of an inner part as an operator of the attention."""
    for name in ATTENTION:
        for inner in part.walk():
            if name in inner.operators:
                part.add_operator(name, inner.operator(name))
                break


# ---- finding the layers -------------------------------------------------------------------------


def find_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers of a model by their paths: the elements of its largest list of modules.

    Lists inside layers (experts) do not count. Other lists count too if the classes of their
    elements come from the same source file, such as the decoder's list next to the encoder's.

    Raises:
        InvalidArgument: the model has no list of modules.
    """
    lists = dict(_list_lists(model))
    outer = {
        path: elements
        for path, elements in lists.items()
        if not any(path != other and _is_inside(path, other) for other in lists)
    }
    if not outer:
        raise InvalidArgument(
            f"{type(model).__name__} has no list of layers (a ModuleList of modules with parts): "
            'pass their paths as layers=, a pattern, e.g. r"blocks\\.\\d+"'
        )
    largest = max(outer.values(), key=len)
    origins = {type(one).__module__ for one in largest.values()}
    return {
        path: one
        for elements in outer.values()
        if any(type(one).__module__ in origins for one in elements.values())
        for path, one in elements.items()
    }


def _list_lists(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, torch.nn.Module]]]:
    """Yield the candidates for lists of layers: path of the list, elements by path."""
    for path, module in model.named_modules():
        if isinstance(module, _LISTS) and _holds_layers(module):
            yield (
                path,
                {f"{path}.{name}".lstrip("."): one for name, one in module.named_children()},
            )


def _holds_layers(module: torch.nn.Module) -> bool:
    elements = list(module.children())
    if not elements or not all(any(one.children()) and runs(one) for one in elements):
        return False
    # A backbone and its head are not layers.
    return isinstance(module, torch.nn.ModuleList) or len(set(map(type, elements))) < len(elements)


def _is_inside(path: str, other: str) -> bool:
    return other == "" or path.startswith(f"{other}.")
