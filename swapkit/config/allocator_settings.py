"""The settings of torch's allocators: all keys, and those that ours obeys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from swapkit.config.values import read_value
from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger
from swapkit.units import MIB

# ---- allocator keys ------------------------------------------------------------------------------
#
# The keys of torch's allocator variables: the values that are accepted, and their effect here.
#
# Source:
#   torch 2.13, `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h`; torch_npu 2.13,
#   `NPUAllocatorConfig.cpp`; MindSpeed's allocators: the keys and their ranges.

Value: TypeAlias = "int | float | bool | str | tuple[int, ...]"
ROUNDUP_INTERVALS = 16  # powers of two from 1 MiB
_KEY_PAIR = re.compile(r"(\d+|>):(\d+)")


class AllocatorKey(NamedTuple):
    """One key; `accepted` describes its values as `read_value` reads them."""

    origin: str  # "torch", "torch_npu", "CUDA" or "MindSpeed"
    accepted: str
    effect: str  # for people
    field: str = ""  # of `AllocatorSettings`; empty: the value has no effect
    usual: str = ""  # the value without this key, if it is a text
    device_type: str = ""  # the only one where it has its effect; empty: all

    def missing_effect(self, value: Value, device_type: str) -> str:
        """Return why a value has no effect on a device type; empty: it has, or asks for nothing."""
        if value is False or value == self.usual:
            return ""
        if self.device_type not in {"", device_type}:
            return f"devices of type {device_type!r} do not have it, {self.device_type!r} ones do"
        return self.effect.removeprefix("none: ") if self.effect.startswith("none") else ""


def _power_of_two(text: str) -> int:
    return int(read_value("a power of 2", text))


def parse_divisions(value: str) -> tuple[int, ...]:
    """Return the divisions of each interval, from 1 MiB, 2 MiB, 4 MiB and so on.

    As in torch: `4` is for all sizes. In `[256:1,512:2,>:4]`, each pair is for sizes from so many
    MiB to twice as many; the first with a number also for smaller ones, `>` for all that are larger
    than the last one named. Pairs apply in turn: `[>:4,256:2]` gives 4 to sizes from 512 MiB only.

    Raises:
        ValueError: a division is not a power of two (in a list, 0 is one more), or a size.
    """
    if not value.startswith("["):
        return (_power_of_two(value),) * ROUNDUP_INTERVALS
    divisions, last, is_first = [0] * ROUNDUP_INTERVALS, 0, True
    pairs = [] if value == "[]" else value[1:-1].removesuffix(",").split(",")
    for pair in pairs:
        match = _KEY_PAIR.fullmatch(pair)
        if match is None:
            raise ValueError(value)
        count = 0 if match[2] == "0" else _power_of_two(match[2])
        if match[1] == ">":
            divisions[last + 1 :] = [count] * (ROUNDUP_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(match[1]).bit_length(), ROUNDUP_INTERVALS) - 1
        if is_first:
            divisions[:last] = [count] * last
        is_first = False
        divisions[last] = count
    return tuple(divisions)


_BOOL, _COUNT = "True or False", "a whole number of at least 0"
_THRESHOLD = "garbage_collection_threshold"
_DIVISIONS = "a power of 2, or a list such as [256:1,512:2,>:4]"
_SPLIT = "in whole segments, larger blocks are not split; none in ranges of virtual memory"
_GARBAGE = "above this share of the budget, cached memory is given back before the pool grows"
_SEGMENTS = "False: whole segments instead of ranges of virtual memory"
_ROUNDED = "sizes of blocks are rounded up to parts of powers of two"
_FRACTION = "the limit of `swapkit.install()`, if it is given none"
_PAGES = "the size of physical pages on an NPU; none on other devices"
_LIFETIMES = "none: `install(lifetimes=True)` keeps memory apart by its lifetime"
_GROWS = "none: segments grow by granules"
_LOCK = "none: the pool chooses when its lock is held"
_RAISES = "none: a failed allocation raises `torch.OutOfMemoryError`"
_PINNED = "none: swapkit pins the host memory of its copies itself"
_FITS, _PLACED = "none: the best fit is chosen", "none: blocks start at multiples of 512 bytes"
_POLLED = "none: blocks in use by other streams are polled"
_GRAPHS = "none: graphs need torch's own allocator"
_BACKEND = "none: swapkit's pool replaces both"
_BYTES, _ANY_BOOL = "a number of bytes, at least 0", "true, 1, false or 0"
_NPU = "torch_npu"
_ROWS = (
    ("max_split_size_mb", "torch", "a whole number above 20", _SPLIT, "max_split_bytes"),
    (_THRESHOLD, "torch", "a number above 0 and below 1", _GARBAGE, _THRESHOLD),
    ("expandable_segments", "torch", _BOOL, _SEGMENTS, "expandable_segments"),
    ("roundup_power2_divisions", "torch", _DIVISIONS, _ROUNDED, "roundup_divisions"),
    ("per_process_memory_fraction", "torch", "a number from 0 to 1", _FRACTION, "memory_fraction"),
    ("page_size", _NPU, "1g", _PAGES, "page_policy", "", "npu"),
    ("default_lc_threshold", "MindSpeed", _BYTES, _LIFETIMES, "short_lived_bytes"),
    ("open_memory_optimize", "MindSpeed", _ANY_BOOL, _LIFETIMES, "optimizes_lifetimes"),
    ("max_non_split_rounding_mb", "torch", "a whole number of at least 20", _FITS),
    ("large_segment_size_mb", "torch", "a whole number above 10", _GROWS),
    ("segment_size_mb", _NPU, "a whole number from 20 to 512", _GROWS),
    ("base_addr_aligned_kb", _NPU, "a whole number from 0 to 16", _PLACED),
    ("multi_stream_lazy_reclaim", _NPU, _BOOL, _POLLED),
    ("release_lock_on_npumalloc", _NPU, _BOOL, _LOCK),
    ("throw_on_npumalloc_oom", _NPU, _BOOL, _RAISES),
    ("pin_memory_expandable_segments", _NPU, _BOOL, _PINNED),
    ("pinned_mem_register", _NPU, _BOOL, _PINNED),
    ("pinned_reserve_segment_size_mb", "torch", _COUNT, _PINNED),
    ("pinned_max_round_threshold_mb", "torch", _COUNT, _PINNED),
    ("pinned_max_cached_size_mb", "torch", _COUNT, _PINNED),
    ("pinned_use_background_threads", "torch", _BOOL, _PINNED),
    ("backend", "CUDA", "native or cudaMallocAsync", _BACKEND, "", "native"),
    ("release_lock_on_cudamalloc", "CUDA", _BOOL, _LOCK),
    ("release_lock_on_hipmalloc", "CUDA", _BOOL, _LOCK),
    ("throw_on_cudamalloc_oom", "CUDA", _BOOL, _RAISES),
    ("graph_capture_record_stream_reuse", "CUDA", _BOOL, _GRAPHS),
    ("pinned_use_cuda_host_register", "CUDA", _BOOL, _PINNED),
    ("pinned_use_hip_host_register", "CUDA", _BOOL, _PINNED),
    ("pinned_free_catch_all", "CUDA", _BOOL, _PINNED),
    ("pinned_num_register_threads", "CUDA", "a power of 2 of at most 128", _PINNED),
)
KEYS = {name: AllocatorKey(*columns) for name, *columns in _ROWS}


def format_keys() -> str:
    """Return the table of all keys, in Markdown; `docs/environment.md` contains it.

    Example:
        >>> print(format_keys().splitlines()[0])
        | key | of | values | effect |
    """
    rows = [
        f"| `{name}` | {key.origin} | {key.accepted} | {key.effect} |" for name, key in KEYS.items()
    ]
    return "\n".join(["| key | of | values | effect |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(format_keys())  # noqa: T201 - prints the table for the documentation

# ---- allocator settings --------------------------------------------------------------------------
#
# The settings of torch's allocators that ours obeys: `PYTORCH_ALLOC_CONF` and its variants.
#
# The keys, their values and their effects stand above. A key without effect is checked,
# and reported once per process. `swapkit.memory_stats()` shows the values in force:
# `max_split_size`, `expandable_segments`, `num_garbage_collections`, `garbage_collected_bytes`.
#
# Source:
#   torch 2.13 and torch_npu 2.13: the form of the text, and the precedence of the variables.

_log = get_logger("settings")

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
            parsed = _READERS.get(key, partial(read_value, known.accepted))(value)
        except ValueError:
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
# Of keys whose values mean more than their text.
_READERS: dict[str, Callable[[str], Value]] = {
    "max_split_size_mb": lambda text: MIB * int(read_value("a whole number above 20", text)),
    "roundup_power2_divisions": parse_divisions,
}
