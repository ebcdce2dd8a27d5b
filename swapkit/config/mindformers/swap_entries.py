"""The two lists of a `swap_config`, `layer_swap` and `op_swap`, checked and normalised.

Source:
    MindFormers, `TransformerSwapConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.config.mindformers.selections import is_whole
from swapkit.errors import InvalidConfiguration, WrongKey, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

# Swapped if neither list is given: attention, in every layer.
DEFAULT_OPERATOR = r".*\.flash_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapEntry:
    """Layers and their prefetch distance in operators, not yet checked."""

    backward_prefetch: object
    layers: object


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapEntries:
    """Entries for whole layers and for each operator pattern; the first that fits holds."""

    layer_swap: tuple[SwapEntry, ...] = ()
    op_swap: dict[str, tuple[SwapEntry, ...]]


def read_swap_entries(
    layer_swap: object, op_swap: object, *, default_prefetch: object
) -> SwapEntries:
    """Check and normalise the two lists of a `swap_config`.

    Args:
        layer_swap: None, an entry, or a list of entries.
        op_swap: the same, with an `op_name` in each entry.
        default_prefetch: prefetch distance of the default strategy, used if both are None.

    Raises:
        InvalidConfiguration: a value has the wrong form, or entries contradict each other.
        WrongKey: an entry lacks a key.
        WrongType: an entry is not a mapping.
    """
    if layer_swap is None and op_swap is None:
        entry = SwapEntry(backward_prefetch=default_prefetch, layers=True)
        return SwapEntries(op_swap={DEFAULT_OPERATOR: (entry,)})
    return SwapEntries(
        layer_swap=_normalise("layer_swap", _list_mappings("layer_swap", layer_swap)),
        op_swap={
            name: _normalise(f"op_swap: {name}", entries)
            for name, entries in _group_by_name(_list_mappings("op_swap", op_swap)).items()
        },
    )


def _list_mappings(key: str, value: object) -> list[Mapping[str, object]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        message = f"{key} must be a list or dict, or None, but got {value!r}"
        raise InvalidConfiguration(message)
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            message = f"{key}[{index}]={entry!r}: expected a mapping with {_describe_keys(key)}"
            raise WrongType(message)
    return list(value)


def _describe_keys(key: str) -> str:
    names = "'op_name', " if key == "op_swap" else ""
    return f"the keys {names}'backward_prefetch' and 'layers'"


def _group_by_name(
    entries: Sequence[Mapping[str, object]],
) -> dict[str, list[Mapping[str, object]]]:
    """Return the entries of each pattern, in the order in which the patterns first appear."""
    groups: dict[str, list[Mapping[str, object]]] = {}
    for index, entry in enumerate(entries):
        for name in _read_names(index, entry):
            named = {key: entry.get(key) for key in ("layers", "backward_prefetch")}
            groups.setdefault(name, []).append(named)
    return groups


def _read_names(index: int, entry: Mapping[str, object]) -> Sequence[str]:
    if "op_name" not in entry:
        message = (
            f"op_swap[{index}]={dict(entry)}: 'op_name' is missing; give "
            f"{_describe_keys('op_swap')}"
        )
        raise WrongKey(message)
    names = entry["op_name"]
    if isinstance(names, str):
        return [names]
    wrong = f"Invalid op_swap configuration at index {index}: {dict(entry)}."
    if not isinstance(names, (list, tuple)):
        message = f"{wrong} 'op_name' must be a string, list, or tuple."
        raise InvalidConfiguration(message)
    if not all(isinstance(name, str) for name in names):
        message = f"{wrong} 'op_name' list must contain only strings."
        raise InvalidConfiguration(message)
    return names


def _normalise(mode: str, entries: Sequence[Mapping[str, object]]) -> tuple[SwapEntry, ...]:
    """Check and return the entries of one list; an entry for all layers replaces them all."""
    previous: object = None
    everywhere = differing = False
    for index, entry in enumerate(entries):
        prefetch, layers = entry.get("backward_prefetch"), entry.get("layers")
        _check_layers(mode, layers)
        differing = differing or (previous is not None and previous != prefetch)
        everywhere = everywhere or layers is True
        if differing and everywhere:
            message = (
                f"Invalid {mode} configuration at index {index}: {dict(entry)}. Inconsistent "
                "'backward_prefetch' values. If one entry has 'layers: True', give all entries "
                "the same value"
            )
            raise InvalidConfiguration(message)
        if "backward_prefetch" not in entry:
            message = (
                f"{mode}[{index}]={dict(entry)}: 'backward_prefetch' is missing; give a number of "
                "at least 1"
            )
            raise WrongKey(message)
        previous = prefetch
    if everywhere:
        first = entries[0]["backward_prefetch"]
        return (SwapEntry(backward_prefetch=first, layers=True),)
    return tuple(
        SwapEntry(backward_prefetch=entry["backward_prefetch"], layers=entry["layers"])
        for entry in entries
    )


def _check_layers(mode: str, layers: object) -> None:
    if not isinstance(layers, (list, tuple, bool)):
        message = (
            f"Invalid {mode} configuration: {layers!r}. "
            "Expected 'layers' to be a list, tuple, or bool."
        )
        raise InvalidConfiguration(message)
    if isinstance(layers, bool) or _are_indices(layers) or all(map(_are_indices, layers)):
        return
    message = (
        f"Invalid {mode} configuration: {layers!r}. "
        "Expected 'layers' to be a list of ints or list of lists of ints."
    )
    raise InvalidConfiguration(message)


def _are_indices(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_whole, value))
