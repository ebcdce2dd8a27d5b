r"""Configuration documents for recomputation and swap.

A document is a YAML or JSON file, a mapping, or an instance of a dataclass. It has two sections,
`recompute_config` and `swap_config`. These keys describe the model where a call does not:

- `model.model_config`: `num_layers` (plus `mtp_depth`, the multi-token prediction layers),
  `offset`, `pp_interleave_num`;
- `parallel_config.pipeline_stage`;
- `parallel.pipeline_config.pipeline_interleave`.

All other keys are ignored; `WITHOUT_EFFECT` gives the reason for keys in MindFormers' examples.

Source:
    MindFormers, `TransformerRecomputeConfig`, `TransformerSwapConfig`, the template of its YAML,
    and `check_rules`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from swapkit.config.mindformers.selections import (
    Layout,
    LogLine,
    ModelInputs,
    is_list_of,
    is_whole,
    warning,
)
from swapkit.config.yaml_documents import read_text, read_yaml
from swapkit.errors import InvalidConfiguration, WrongKey, WrongType
from swapkit.texts import printable
from swapkit.units import show

Section = TypeVar("Section", bound="_Section")

# Keys of `context`, and the reason why they have no effect.
WITHOUT_EFFECT = {"memory_optimize_level": "it applies only to MindSpore's static graphs"}
ALIKE = 0.75  # similarity (of 1) from which a key counts as a misspelt section

# ---- swap entries --------------------------------------------------------------------------------
#
# The two lists of a `swap_config`, `layer_swap` and `op_swap`, checked and normalised.

# Swapped if neither list is given: attention, in every layer.
DEFAULT_OPERATOR = r".*\.flash_attention"
_KEYS = {
    "layer_swap": "the keys 'backward_prefetch' and 'layers'",
    "op_swap": "the keys 'op_name', 'backward_prefetch' and 'layers'",
}


class SwapEntry(NamedTuple):
    """Layers and their prefetch distance in operators, not yet checked."""

    backward_prefetch: object
    layers: object


class SwapEntries(NamedTuple):
    """Entries for whole layers and for each operator pattern; the first that fits holds."""

    op_swap: dict[str, tuple[SwapEntry, ...]]
    layer_swap: tuple[SwapEntry, ...] = ()


def _list_mappings(key: str, value: object) -> Sequence[Mapping[str, object]]:
    entries = [] if value is None else [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, (list, tuple)):
        raise InvalidConfiguration(f"{key} must be a list or dict, or None, but got {value!r}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise WrongType(f"{key}[{index}]={entry!r}: expected a mapping with {_KEYS[key]}")
    return entries


def _read_entries(key: str, value: object) -> dict[str, tuple[SwapEntry, ...]]:
    """Return the entries of each pattern, in the order in which the patterns first appear.

    Those of `layer_swap` are for layers, not for a pattern: all are under the key itself.
    """
    groups: dict[str, list[Mapping[str, object]]] = {}
    for index, entry in enumerate(_list_mappings(key, value)):
        if key == "layer_swap":
            groups.setdefault(key, []).append(entry)
            continue
        named = {"layers": entry.get("layers"), "backward_prefetch": entry.get("backward_prefetch")}
        for name in _read_names(index, entry):
            groups.setdefault(name, []).append(named)
    lead = "" if key == "layer_swap" else f"{key}: "
    return {name: _normalise(f"{lead}{name}", of_name) for name, of_name in groups.items()}


def _read_names(index: int, entry: Mapping[str, object]) -> Sequence[str]:
    if "op_name" not in entry:
        text = f"op_swap[{index}]={dict(entry)}: 'op_name' is missing; give {_KEYS['op_swap']}"
        raise WrongKey(text)
    names = [entry["op_name"]] if isinstance(entry["op_name"], str) else entry["op_name"]
    if is_list_of(names, str):
        return names
    is_list = isinstance(names, (list, tuple))
    must = "list must contain only strings" if is_list else "must be a string, list, or tuple"
    raise InvalidConfiguration(
        f"Invalid op_swap configuration at index {index}: {dict(entry)}. 'op_name' {must}."
    )


def _normalise(mode: str, entries: Sequence[Mapping[str, object]]) -> tuple[SwapEntry, ...]:
    """Check and return the entries of one list; an entry for all layers replaces them all."""
    read: list[SwapEntry] = []
    before: object = None
    differing = False
    for index, entry in enumerate(entries):
        made = SwapEntry(entry.get("backward_prefetch"), entry.get("layers"))
        _check_layers(mode, made.layers)
        differing = differing or (before is not None and before != made.backward_prefetch)
        before = made.backward_prefetch
        read.append(made)
        if differing and any(each.layers is True for each in read):
            advice = "If one entry has 'layers: True', give all entries the same value"
            raise InvalidConfiguration(
                f"Invalid {mode} configuration at index {index}: {dict(entry)}. "
                f"Inconsistent 'backward_prefetch' values. {advice}"
            )
        if "backward_prefetch" not in entry:
            advice = "'backward_prefetch' is missing; give a number of at least 1"
            raise WrongKey(f"{mode}[{index}]={dict(entry)}: {advice}")
    if any(each.layers is True for each in read):
        return (SwapEntry(read[0].backward_prefetch, layers=True),)
    return tuple(read)


def _check_layers(mode: str, layers: object) -> None:
    lists = layers if is_list_of(layers, list, tuple) else [layers]
    if isinstance(layers, bool) or all(
        is_list_of(each, int) and all(map(is_whole, each)) for each in lists
    ):
        return
    is_list = isinstance(layers, (list, tuple))
    must = "list of ints or list of lists of ints" if is_list else "list, tuple, or bool"
    raise InvalidConfiguration(
        f"Invalid {mode} configuration: {layers!r}. Expected 'layers' to be a {must}."
    )


# ---- sections ------------------------------------------------------------------------------------
#
# The two sections of a document, as dataclasses that users may also create.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if each.type == "bool":
                check_bool(each.name, getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig(_Section):
    """The section `recompute_config`.

    Args:
        recompute: layers to recompute as a whole. With swap off: a bool, the number of first layers
            for each stage, or a row of such numbers for each chunk; a number may be a bool. With
            swap on: a bool, or a list of layer indices.
        select_recompute: modules and operators to recompute: a list of patterns, or a mapping of
            patterns to layers, given as for `recompute`; or only layers, for the default patterns.
        select_comm_recompute: the same for operators whose communication is repeated.
        select_recompute_exclude: operators not to recompute; there are no default patterns.
        select_comm_recompute_exclude: operators whose communication is not repeated.
        parallel_optimizer_comm_recompute: whether weights are gathered again.
        mp_comm_recompute: whether collectives inside a recomputed region run again.
        recompute_slice_activation: whether a recomputed layer's kept input is sliced over ranks.

    Raises:
        WrongType: one of the last three is not a bool.
    """

    recompute: object = False
    select_recompute: object = False
    select_comm_recompute: object = False
    select_recompute_exclude: object = False
    select_comm_recompute_exclude: object = False
    parallel_optimizer_comm_recompute: bool = False
    mp_comm_recompute: bool = True
    recompute_slice_activation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig(_Section):
    """The section `swap_config`.

    Args:
        swap: whether to swap; if False, the other keys are only checked.
        default_prefetch: prefetch distance, in operators, of the default strategy, which swaps
            attention in every layer.
        layer_swap: layers to swap, a list of `{backward_prefetch, layers}`. None: none.
        op_swap: operators to swap, a list of `{op_name, backward_prefetch, layers}`. None: none; if
            both are None, the default strategy holds.

    Raises:
        InvalidConfiguration: a value has the wrong form.
        WrongType: `swap` is not a bool, or an entry is not a mapping.
        WrongKey: an entry lacks a key.
    """

    swap: bool = False
    default_prefetch: object = 1
    layer_swap: object = None
    op_swap: object = None

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        self.read_entries()

    def read_entries(self) -> SwapEntries:
        """Return the two lists, or the default strategy, in normal form."""
        if self.layer_swap is None and self.op_swap is None:
            return SwapEntries({DEFAULT_OPERATOR: (SwapEntry(self.default_prefetch, layers=True),)})
        layer_swap = _read_entries("layer_swap", self.layer_swap).get("layer_swap", ())
        return SwapEntries(_read_entries("op_swap", self.op_swap), layer_swap)


SECTIONS: dict[str, type[_Section]] = {
    "recompute_config": RecomputeConfig,
    "swap_config": SwapConfig,
}


def check_bool(key: str, value: object) -> None:
    """Raise `WrongType` if the value of a key is not a bool."""
    if not isinstance(value, bool):
        advice = f"It is {value!r}; give True or False"
        raise WrongType(f"The '{key}' must be a bool, but got {type(value).__name__}. {advice}")


# ---- documents -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of a document."""

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    inputs: ModelInputs = field(default_factory=ModelInputs)
    without_effect: tuple[str, ...] = field(default=(), compare=False)  # warnings
    log_lines: tuple[LogLine, ...] = field(default=(), compare=False)


def read_document(source: object) -> Document:
    """Read a document.

    Args:
        source: a path, as a `str` or a path object; the text of a document: a `str` that has
            several lines or starts with a brace; a mapping; an instance of a dataclass with the
            fields `recompute_config` and `swap_config`, each a mapping or a dataclass instance; or
            a `Document`, `RecomputeConfig` or `SwapConfig`. It is never changed.

    Returns:
        The sections; checks that need the model are still to do.

    Raises:
        InvalidConfiguration: a value is wrong, or the text is not valid YAML.
        WrongKey: a section has an unknown key, or a section's name is misspelt.
        WrongType: the document or a section is not a mapping, or a value has the wrong type.
        OSError: the file cannot be read.

    Example:
        >>> document = read_document({"recompute_config": {"recompute": [2, 1]}})
        >>> document.recompute.recompute, document.swap.swap
        ([2, 1], False)
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, RecomputeConfig):
        return Document(recompute=source)
    if isinstance(source, SwapConfig):
        return Document(swap=source)
    sections = _as_mapping(source)
    _check_keys(sections)
    empty = [name for name in SECTIONS if _is_empty(sections.get(name))]
    return Document(
        recompute=_read_section("recompute_config", sections, RecomputeConfig),
        swap=_read_section("swap_config", sections, SwapConfig),
        inputs=_read_inputs(sections),
        without_effect=tuple(_find_without_effect(sections.get("context"))),
        log_lines=tuple(warning(f"The input config {name} is empty.") for name in empty),
    )


def _check_keys(sections: Mapping[str, Any]) -> None:
    """Raise if keys of a section, or a misspelt section, are at the top; others are not ours."""
    for name, kind in SECTIONS.items():
        stray = [key for key in kind.__dataclass_fields__ if key in sections]
        if stray:
            raise WrongKey(
                f"The keys {stray} belong under {name!r}, not at the top of the document"
            )
    for key in sections:
        meant = difflib.get_close_matches(str(key), SECTIONS, n=1, cutoff=ALIKE)
        if key not in SECTIONS and meant:
            shown = show(key)
            raise WrongKey(f"The document has the key {shown}; the section is named {meant[0]!r}")


def _as_mapping(source: object) -> Mapping[str, Any]:
    if isinstance(source, (str, os.PathLike)):
        source = _load(source)
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return {item.name: getattr(source, item.name) for item in dataclasses.fields(source)}
    if not isinstance(source, Mapping):
        raise WrongType(
            f"A configuration document is a mapping of sections, but got {show(source)}; pass "
            "a path, a mapping or a dataclass with 'recompute_config' and 'swap_config'"
        )
    return source


def _load(source: str | os.PathLike[str]) -> object:
    """Return the content of a YAML document; JSON is YAML too."""
    is_text = isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{"))
    name = "The document" if is_text else os.fspath(source)
    return read_yaml(str(source) if is_text else read_text(Path(source)), name)


def _is_empty(section: object) -> bool:
    return section is None or section == {}


def _read_section(name: str, sections: Mapping[str, object], kind: type[Section]) -> Section:
    section = sections.get(name)
    if isinstance(section, kind):
        return section
    if _is_empty(section):
        return kind()
    if not isinstance(section, Mapping) and not dataclasses.is_dataclass(section):
        what = f"{type(section).__name__}: {show(section)}"
        raise WrongType(f"The config '{name}' must be a mapping of its keys, but got {what}")
    values = _as_mapping(section)
    known = [*kind.__dataclass_fields__]
    for key in values:
        if key not in known:
            shown = f"{printable(str(key))}. It takes {known}"
            raise WrongKey(f"The config '{name}' gets an unexpected key: {shown}")
    return kind(**values)


def _find_without_effect(context: object) -> Iterator[str]:
    """Yield a warning for each entry without effect. `context` may be text: `key=value`."""
    if isinstance(context, str) and "=" in context:
        context = dict([context.split("=", 1)])
    if isinstance(context, Mapping):
        for key, reason in WITHOUT_EFFECT.items():
            if key in context:
                yield f"context: {key}={context[key]} has no effect: {reason}"


def _read_inputs(sections: Mapping[str, Any]) -> ModelInputs:
    model = _descend(sections, "model", "model_config")
    layers = _read_whole(model, "num_layers")
    further = _read_whole(model, "mtp_depth")
    flag = _descend(sections, "parallel", "pipeline_config").get("pipeline_interleave")
    if flag is not None:
        check_bool("pipeline_interleave", flag)
    return ModelInputs(
        num_layers=None if layers is None else layers + (further or 0),
        offset=model.get("offset") or 0,
        pp_interleave_num=_read_whole(model, "pp_interleave_num"),
        pipeline_stage=_read_whole(_descend(sections, "parallel_config"), "pipeline_stage"),
        pipeline_interleave=flag,
    )


def _descend(sections: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at a path of keys; empty: there is none."""
    found: object = sections
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _read_whole(mapping: Mapping[str, object], key: str) -> int | None:
    value = mapping.get(key)
    if value is None or (isinstance(value, int) and is_whole(value)):
        return value
    raise WrongType(f"{key}={show(value)}: expected a whole number")


# ---- rules ---------------------------------------------------------------------------------------
#
# The checks that MindFormers' trainer makes before it builds a model.
#
# With swap on, the layers of a pattern may also be True, False or a tuple, as the documentation of
# the keys says.

LAYER_KEYS = ("recompute", "select_recompute", "select_comm_recompute")


def check_rules(document: Document, layout: Layout) -> None:
    """Check a document as MindFormers' trainer does; `LayerSetting` alone accepts more.

    Args:
        document: the document.
        layout: the layout; only its `pipeline_stage` is used.

    Raises:
        InvalidConfiguration: a value breaks a rule.
    """
    swap, stages = document.swap, layout.pipeline_stage
    for key in LAYER_KEYS:
        value = getattr(document.recompute, key)
        if swap.swap:
            _check_indices(key, value)
        elif is_list_of(value, int) and len(value) > stages:
            must = f"length of {key} should be equal or less than pipeline_stage number"
            but = f"but get length of {key} ({value}) > pp({stages})"
            raise InvalidConfiguration(f"{must}, {but}")
    if not swap.swap:
        return
    given = swap.default_prefetch
    _check_prefetch("default_prefetch", "value of it", given, f"{type(given)} and {given}")
    entries = swap.read_entries()
    lists = {"layer_swap": entries.layer_swap}
    lists |= {f"op_swap({name})": of_name for name, of_name in entries.op_swap.items()}
    for key, of_key in lists.items():
        for prefetch, layers in of_key:
            _check_indices(f"{key}.layers", layers)
            where = f"{key}.backward_prefetch"
            _check_prefetch(where, f"the value of {where}", prefetch, str(prefetch))


def _check_indices(key: str, value: object) -> None:
    is_mapping = isinstance(value, Mapping)
    for layers in value.values() if isinstance(value, Mapping) else (value,):
        if not isinstance(layers, (bool, list, tuple)):
            whole, tail = f"Type of {key} must be bool, list or tuple", ""
            if is_mapping:
                whole, tail = (
                    f"Layer info of {key} must be list",
                    "; True and False are accepted too",
                )
            but = f"but get {type(layers)}. It is {layers!r}{tail}"
            raise InvalidConfiguration(f"{whole} when enabling swap, {but}")
    for item in value if isinstance(value, (list, tuple)) else ():
        if not isinstance(item, int):
            must = f"If the type of {key} is list or tuple, the type of element of it must be int"
            but = f"but get {type(item)}. It is {value!r}; give layer indices"
            raise InvalidConfiguration(f"{must}, {but}")


def _check_prefetch(key: str, which: str, value: object, shown: str) -> None:
    if not isinstance(value, int) or value < 1:
        must = f"Type of {key} must be int and {which} must be positive"
        raise InvalidConfiguration(f"{must}, but get {shown}.")
