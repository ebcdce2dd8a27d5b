"""The settings of torch's allocators that ours obeys: `PYTORCH_ALLOC_CONF` and its variants.

`expandable_segments:False`: use whole segments instead of ranges of virtual memory, which are the
default where the device supports them. `max_split_size_mb:N` (above 20): do not split blocks of
more than N MiB in whole segments. It has no effect in ranges: the pool releases free memory granule
by granule, so a split large block costs nothing. `garbage_collection_threshold:X` (between 0 and
1): before the pool grows while more than that share of its budget is reserved, it releases cached
memory.

`swapkit.memory_stats()` shows the values in force: `max_split_size`, `expandable_segments`,
`num_garbage_collections`, `garbage_collected_bytes`.

Source:
    torch 2.13, `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h`, torch_npu, and
    MindSpeed's allocators: the keys, their ranges, and the precedence of the variables.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MIB = 1 << 20
LEAST_SPLIT_MB = 20
COMMON = "PYTORCH_ALLOC_CONF"
OWN = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}
# Keys of torch, torch_npu or MindSpeed that have no effect here: they tune mechanisms that our pool
# does not use, or the pinned memory of torch's own allocator.
IGNORED_KEYS = frozenset(
    {
        *("backend", "large_segment_size_mb", "segment_size_mb", "max_non_split_rounding_mb"),
        *("roundup_power2_divisions", "base_addr_aligned_kb", "page_size"),
        *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "release_lock_on_npumalloc"),
        *("throw_on_cudamalloc_oom", "throw_on_npumalloc_oom", "multi_stream_lazy_reclaim"),
        *("graph_capture_record_stream_reuse", "pin_memory_expandable_segments"),
        *("pinned_use_background_threads", "pinned_use_cuda_host_register"),
        *("pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_free_catch_all"),
        *("pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb"),
        *("pinned_max_cached_size_mb", "pinned_mem_register"),
    }
)
_PAIR = re.compile(r"([^,:\[\]]*)(?::(\[[^\[\]]*\]|[^,:\[\]]*))?(?:,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the pool; the defaults are those of an empty environment.

    The last two are for pools by lifetime. This version only stores them: it has no such pools.
    """

    max_split_bytes: int = 0  # 0: no limit
    garbage_collection_threshold: float = 0.0  # 0: never
    expandable_segments: bool = True  # where the device has virtual memory
    short_lived_bytes: float = 0.0  # default_lc_threshold: tensors up to it count as short-lived
    optimizes_lifetimes: bool = False  # open_memory_optimize


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
            return parse_allocator_settings(text, variable=variable)
    return AllocatorSettings()


def parse_allocator_settings(text: str, *, variable: str = COMMON) -> AllocatorSettings:
    """Return the settings in a text `key:value,key:value`; blanks are ignored.

    Args:
        text: the value of the variable.
        variable: its name, for the errors.

    Raises:
        InvalidArgument: a key is unknown or its value is invalid.

    Example:
        >>> parse_allocator_settings("max_split_size_mb:64").max_split_bytes >> 20
        64
    """
    values: dict[str, int | float | bool] = {}
    bare = re.sub(r"\s", "", text)
    position = 0
    while position < len(bare):
        match = _PAIR.match(bare, position)
        if match is None:
            raise InvalidArgument(f"{variable}: cannot parse {bare[position:]!r}; {_FORM}")
        key, value = match[1], match[2]
        if not key or not value:
            raise InvalidArgument(f"{variable}: {match[0]!r} is not a key with a value; {_FORM}")
        if key in _PARSERS:
            field, parse, accepted = _PARSERS[key]
            try:
                values[field] = parse(value)
            except (ValueError, KeyError):
                raise InvalidArgument(f"{variable}: {key}:{value}: expected {accepted}") from None
        else:
            _check_ignored(variable, key)
        position = match.end()
    return AllocatorSettings(**values)  # type: ignore[arg-type]


def _check_ignored(variable: str, key: str) -> None:
    if key == "per_process_memory_fraction":
        warnings.warn(
            f"{variable}: {key} has no effect here. Pass the share to swapkit.install(limit=0.9) "
            "or torch.cuda.set_per_process_memory_fraction().",
            stacklevel=4,
        )
    elif key not in IGNORED_KEYS:
        raise InvalidArgument(
            f"{variable}: unknown key {key!r}; keys with an effect: "
            f"{', '.join(sorted(_PARSERS))}; keys accepted without effect: "
            f"{', '.join(sorted(IGNORED_KEYS))}"
        )


def _split_bytes(value: str) -> int:
    size_mb = int(value)
    if size_mb <= LEAST_SPLIT_MB:
        raise ValueError
    return size_mb * MIB


def _threshold(value: str) -> float:
    threshold = float(value)
    if not 0 < threshold < 1:
        raise ValueError
    return threshold


def _amount(value: str) -> float:
    amount = float(value)
    if not 0 <= amount < float("inf"):
        raise ValueError
    return amount


_FORM = "expected key:value,key:value"
_PARSERS: dict[str, tuple[str, Callable[[str], int | float | bool], str]] = {
    "max_split_size_mb": ("max_split_bytes", _split_bytes, "a whole number above 20"),
    "garbage_collection_threshold": (
        "garbage_collection_threshold",
        _threshold,
        "a number above 0 and below 1",
    ),
    "expandable_segments": (
        "expandable_segments",
        {"True": True, "False": False}.__getitem__,
        "True or False",
    ),
    "default_lc_threshold": ("short_lived_bytes", _amount, "a number of bytes, at least 0"),
    "open_memory_optimize": (
        "optimizes_lifetimes",
        {"true": True, "1": True, "false": False, "0": False}.__getitem__,
        "true, 1, false or 0",
    ),
}
