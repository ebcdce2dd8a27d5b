"""The settings of torch's allocators that ours obeys: `PYTORCH_ALLOC_CONF` and its variants.

`allocator_keys.py` has the keys, their values and their effects. A key without effect is checked,
and reported once per process. `swapkit.memory_stats()` shows the values in force: `max_split_size`,
`expandable_segments`, `num_garbage_collections`, `garbage_collected_bytes`.

Source:
    torch 2.13 and torch_npu 2.13: the form of the text, and the precedence of the variables.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapkit.config.allocator_keys import KEYS
from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit.config.allocator_keys import Value

_log = get_logger(__name__)

COMMON = "PYTORCH_ALLOC_CONF"
OWN = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}
_reported: set[str] = set()
_PAIR = re.compile(r"([^,:\[\]]*)(?::(\[[^\[\]]*\]|[^,:\[\]]*))?(?:,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the pool; the defaults are those of an empty environment.

    `short_lived_bytes` and `optimizes_lifetimes` are for pools by lifetime. This version only
    stores them: it has no such pools.
    """

    max_split_bytes: int = 0  # 0: no limit
    garbage_collection_threshold: float = 0.0  # 0: never
    expandable_segments: bool = True  # where the device has virtual memory
    # Of requests from 1 MiB, 2 MiB, 4 MiB and so on; 0 and 1: no rounding. Empty: none anywhere.
    roundup_divisions: tuple[int, ...] = ()
    memory_fraction: float | None = None  # limit of an installation without one; None: no limit
    page_policy: str = ""  # "1g": pages of 1 GiB on an NPU; empty: the device's usual pages
    short_lived_bytes: float = 0.0  # default_lc_threshold: tensors up to it count as short-lived
    optimizes_lifetimes: bool = False  # open_memory_optimize
    # What each key without effect would have to say, for `report_settings`; not a setting.
    without_effect: tuple[str, ...] = field(default=(), compare=False)


def read_allocator_settings(
    device_type: str = "cpu", variables: Mapping[str, str] = os.environ
) -> AllocatorSettings:
    """Return the settings of one device type.

    Only the first variable that is set counts, in this order: `PYTORCH_ALLOC_CONF`, the device's
    own, those of other devices. So a script written for one device keeps its settings on another.

    Args:
        device_type: `"cpu"`, `"cuda"` or `"npu"`.
        variables: the environment.

    Raises:
        InvalidArgument: a key is unknown or its value is invalid; the text names the variable.
    """
    own = [OWN[device_type]] if device_type in OWN else []
    for variable in dict.fromkeys([COMMON, *own, *OWN.values()]):
        text = variables.get(variable)
        if text is not None:
            return parse_allocator_settings(text, device_type, variable=variable)
    return AllocatorSettings()


def parse_allocator_settings(
    text: str, device_type: str = "cpu", *, variable: str = COMMON
) -> AllocatorSettings:
    """Return the settings in a text `key:value,key:value`; blanks are ignored.

    Args:
        text: the value of the variable.
        device_type: the type of device that they are for.
        variable: its name, for the errors.

    Raises:
        InvalidArgument: a key is unknown or its value is invalid.

    Example:
        >>> parse_allocator_settings("max_split_size_mb:64").max_split_bytes >> 20
        64
    """
    values: dict[str, Value] = {}
    unused: list[str] = []
    bare = re.sub(r"\s", "", text)
    position = 0
    while position < len(bare):
        match = _PAIR.match(bare, position)
        if match is None:
            raise InvalidArgument(f"{variable}: cannot parse {bare[position:]!r}; {_FORM}")
        key, value = match[1], match[2]
        if not key or not value:
            raise InvalidArgument(f"{variable}: {match[0]!r} is not a key with a value; {_FORM}")
        known = KEYS.get(key)
        if known is None:
            raise InvalidArgument(f"{variable}: unknown key {key!r}; keys: {', '.join(KEYS)}")
        try:
            parsed = known.parse(value)
        except (ValueError, KeyError):
            raise InvalidArgument(f"{variable}: {key}:{value}: expected {known.accepted}") from None
        if known.field:
            values[known.field] = parsed
        missing = known.missing_effect(parsed, device_type)
        if missing:
            unused.append(f"{variable}: {key} has no effect: {missing}")
        position = match.end()
    return AllocatorSettings(**values, without_effect=tuple(unused))  # type: ignore[arg-type]


def report_settings(settings: AllocatorSettings) -> None:
    """Log the keys that were given and have no effect, each once per process."""
    for text in settings.without_effect:
        if text not in _reported:
            _reported.add(text)
            _log.warning("%s", text)


_FORM = "expected key:value,key:value"
