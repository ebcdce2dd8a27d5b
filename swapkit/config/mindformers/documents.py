r"""Configuration documents for recomputation and swap.

A document is a YAML or JSON file, a mapping, or an instance of a dataclass. It has two sections,
`recompute_config` and `swap_config`. These keys describe the model where a call does not:

- `model.model_config`: `num_layers` (plus `mtp_depth`, the multi-token prediction layers),
  `offset`, `pp_interleave_num`;
- `parallel_config.pipeline_stage`;
- `parallel.pipeline_config.pipeline_interleave`.

All other keys are ignored; `WITHOUT_EFFECT` gives the reason for keys in MindFormers' examples.

Source:
    MindFormers, `TransformerRecomputeConfig`, `TransformerSwapConfig` and the template of its YAML.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swapkit.config.mindformers.log_lines import LogLine, warning
from swapkit.config.mindformers.sections import RecomputeConfig, SwapConfig, check_bool
from swapkit.config.mindformers.selections import ModelInputs, is_whole
from swapkit.config.yaml_documents import read_text, read_yaml
from swapkit.errors import WrongKey, WrongType
from swapkit.texts import printable
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Iterator


Section = TypeVar("Section", RecomputeConfig, SwapConfig)

SECTIONS = ("recompute_config", "swap_config")
# Keys of `context`, and the reason why they have no effect.
WITHOUT_EFFECT = {
    "memory_optimize_level": "it applies only to MindSpore's static graphs",
}
ALIKE = 0.75  # similarity (of 1) from which a key counts as a misspelt section


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
    _check_no_section(sections)
    _check_spelling(sections)
    log_lines = tuple(
        warning(f"The input config {name} is empty.")
        for name in SECTIONS
        if _is_empty(sections.get(name))
    )
    return Document(
        recompute=_read_section("recompute_config", sections, RecomputeConfig),
        swap=_read_section("swap_config", sections, SwapConfig),
        inputs=_read_inputs(sections),
        without_effect=tuple(_find_without_effect(sections.get("context"))),
        log_lines=log_lines,
    )


def _check_spelling(sections: Mapping[str, Any]) -> None:
    """Raise if a key looks like a misspelt section; other keys are not ours."""
    for key in sections:
        meant = difflib.get_close_matches(str(key), SECTIONS, n=1, cutoff=ALIKE)
        if key not in SECTIONS and meant:
            message = f"The document has the key {show(key)}; the section is named {meant[0]!r}"
            raise WrongKey(message)


def _as_mapping(source: object) -> Mapping[str, Any]:
    if isinstance(source, (str, os.PathLike)):
        source = _load(source)
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return {item.name: getattr(source, item.name) for item in dataclasses.fields(source)}
    if not isinstance(source, Mapping):
        message = (
            f"A configuration document is a mapping of sections, but got {show(source)}; pass "
            "a path, a mapping or a dataclass with 'recompute_config' and 'swap_config'"
        )
        raise WrongType(message)
    return source


def _load(source: str | os.PathLike[str]) -> object:
    """Return the content of a YAML document; JSON is YAML too."""
    is_text = isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{"))
    name = "The document" if is_text else os.fspath(source)
    return read_yaml(str(source) if is_text else read_text(Path(source)), name)


def _is_empty(section: object) -> bool:
    return section is None or section == {}


def _check_no_section(sections: Mapping[str, object]) -> None:
    """Raise if keys of a section are at the top level of the document."""
    for name, kind in (("recompute_config", RecomputeConfig), ("swap_config", SwapConfig)):
        stray = [item.name for item in dataclasses.fields(kind) if item.name in sections]
        if stray:
            message = f"The keys {stray} belong under {name!r}, not at the top of the document"
            raise WrongKey(message)


def _read_section(name: str, sections: Mapping[str, object], kind: type[Section]) -> Section:
    section = sections.get(name)
    if isinstance(section, kind):
        return section
    if _is_empty(section):
        return kind()
    if not isinstance(section, Mapping) and not dataclasses.is_dataclass(section):
        message = (
            f"The config '{name}' must be a mapping of its keys, but got "
            f"{type(section).__name__}: {show(section)}"
        )
        raise WrongType(message)
    values = _as_mapping(section)
    known = [item.name for item in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            shown = printable(str(key))
            message = f"The config '{name}' gets an unexpected key: {shown}. It takes {known}"
            raise WrongKey(message)
    return kind(**values)


def _find_without_effect(context: object) -> Iterator[str]:
    """Yield a warning for each entry without effect. `context` may be text: `key=value`."""
    values = (
        dict([context.split("=", 1)]) if isinstance(context, str) and "=" in context else context
    )
    if isinstance(values, Mapping):
        for key, reason in WITHOUT_EFFECT.items():
            if key in values:
                yield f"context: {key}={values[key]} has no effect: {reason}"


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
    message = f"{key}={show(value)}: expected a whole number"
    raise WrongType(message)
