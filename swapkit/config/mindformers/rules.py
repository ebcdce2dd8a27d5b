"""The checks that MindFormers' trainer makes before it builds a model.

With swap on, the layers of a pattern may also be True, False or a tuple, as the documentation of
the keys says.

Source:
    MindFormers, `check_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from swapkit.errors import InvalidConfiguration

if TYPE_CHECKING:
    from swapkit.config.mindformers.documents import Document
    from swapkit.config.mindformers.selections import Layout

LAYER_KEYS = ("recompute", "select_recompute", "select_comm_recompute")


def check_rules(document: Document, layout: Layout) -> None:
    """Check a document as MindFormers' trainer does; `LayerSetting` alone accepts more.

    Args:
        document: the document.
        layout: the layout; only its `pipeline_stage` is used.

    Raises:
        InvalidConfiguration: a value breaks a rule.
    """
    for key in LAYER_KEYS:
        value = getattr(document.recompute, key)
        if document.swap.swap:
            _check_indices(key, value)
        else:
            _check_length(key, value, layout.pipeline_stage)
    if not document.swap.swap:
        return
    prefetch = document.swap.default_prefetch
    if not isinstance(prefetch, int) or prefetch < 1:
        message = (
            "Type of default_prefetch must be int and value of it must be positive, "
            f"but get {type(prefetch)} and {prefetch}."
        )
        raise InvalidConfiguration(message)
    entries = document.swap.read_entries()
    lists = {"layer_swap": entries.layer_swap}
    lists |= {f"op_swap({name})": of_name for name, of_name in entries.op_swap.items()}
    for key, of_key in lists.items():
        for entry in of_key:
            _check_indices(f"{key}.layers", entry.layers)
            _check_prefetch(f"{key}.backward_prefetch", entry.backward_prefetch)


def _check_length(key: str, value: object, stages: int) -> None:
    if not isinstance(value, (list, tuple)) or len(value) <= stages:
        return
    if all(isinstance(item, int) for item in value):
        message = (
            f"length of {key} should be equal or less than pipeline_stage number, but get "
            f"length of {key} ({value}) > pp({stages})"
        )
        raise InvalidConfiguration(message)


def _check_indices(key: str, value: object) -> None:
    if isinstance(value, Mapping):
        for layers in value.values():
            if not isinstance(layers, (bool, list, tuple)):
                message = (
                    f"Layer info of {key} must be list when enabling swap, "
                    f"but get {type(layers)}. It is {layers!r}; True and False are accepted too"
                )
                raise InvalidConfiguration(message)
    elif not isinstance(value, (bool, list, tuple)):
        message = (
            f"Type of {key} must be bool, list or tuple when enabling swap, "
            f"but get {type(value)}. It is {value!r}"
        )
        raise InvalidConfiguration(message)
    elif not isinstance(value, bool):
        for item in value:
            if not isinstance(item, int):
                message = (
                    f"If the type of {key} is list or tuple, the type of element of it must be "
                    f"int, but get {type(item)}. It is {value!r}; give layer indices"
                )
                raise InvalidConfiguration(message)


def _check_prefetch(key: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        message = (
            f"Type of {key} must be int and the value of {key} must be positive, but get {value}."
        )
        raise InvalidConfiguration(message)
