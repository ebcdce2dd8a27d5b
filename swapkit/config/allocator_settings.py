"""The settings of torch's allocators: all keys, and those that ours obeys."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger
from swapkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# ---- allocator keys ------------------------------------------------------------------------------
#
# The keys of torch's allocator variables: the values that are accepted, and their effect here.
#
# Source:
#   torch 2.13, `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h`; torch_npu 2.13,
#   `NPUAllocatorConfig.cpp`; MindSpeed's allocators: the keys and their ranges.

Value: TypeAlias = "int | float | bool | str | tuple[int, ...]"
LEAST_SPLIT_MB = 20
ROUNDUP_INTERVALS = 16  # powers of two from 1 MiB
_KEY_PAIR = re.compile(r"(\d+|>):(\d+)")


class AllocatorKey(NamedTuple):
    """One key. `parse` raises ValueError or KeyError for a value that is not accepted."""

    origin: str  # "torch", "torch_npu", "CUDA" or "MindSpeed"
    parse: Callable[[str], Value]
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


def _flag(value: str) -> bool:
    return {"True": True, "False": False}[value]


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range."""

    def parse(value: str) -> int:
        if not value.isdecimal():  # `int` accepts signs and underscores
            raise ValueError(value)
        number = int(value)
        if number < least or (most is not None and number > most):
            raise ValueError(value)
        return number

    return parse


def _split_bytes(value: str) -> int:
    return _whole(LEAST_SPLIT_MB + 1)(value) * MIB


def _between(least: float, most: float, *, with_ends: bool) -> Callable[[str], float]:
    def parse(value: str) -> float:
        number = float(value)
        is_inside = least <= number <= most if with_ends else least < number < most
        if not is_inside or number == float("inf"):
            raise ValueError(value)
        return number

    return parse


def _one_of(*values: str) -> Callable[[str], str]:
    return {value: value for value in values}.__getitem__


def _power_of_two(most: int | None = None) -> Callable[[str], int]:
    def parse(value: str) -> int:
        number = _whole(1, most)(value)
        if number & (number - 1):
            raise ValueError(value)
        return number

    return parse


def parse_divisions(value: str) -> tuple[int, ...]:
    """Return the divisions of each interval, from 1 MiB, 2 MiB, 4 MiB and so on.

    As in torch: `4` is for all sizes. In `[256:1,512:2,>:4]`, each pair is for sizes from so many
    MiB to twice as many; the first with a number also for smaller ones, `>` for all that are larger
    than the last one named. Pairs apply in turn: `[>:4,256:2]` gives 4 to sizes from 512 MiB only.

    Raises:
        ValueError: a division is not a power of two (in a list, 0 is one more), or a size.
    """
    if not value.startswith("["):
        return (_power_of_two()(value),) * ROUNDUP_INTERVALS
    divisions, last, is_first = [0] * ROUNDUP_INTERVALS, 0, True
    pairs = [] if value == "[]" else value[1:-1].removesuffix(",").split(",")
    for pair in pairs:
        match = _KEY_PAIR.fullmatch(pair)
        if match is None:
            raise ValueError(value)
        count = 0 if match[2] == "0" else _power_of_two()(match[2])
        if match[1] == ">":
            divisions[last + 1 :] = [count] * (ROUNDUP_INTERVALS - last - 1)
            continue
        last = min(_power_of_two()(match[1]).bit_length(), ROUNDUP_INTERVALS) - 1
        if is_first:
            divisions[:last] = [count] * last
        is_first = False
        divisions[last] = count
    return tuple(divisions)


_TRUE = "True or False"
_NO_LIFETIMES = "none: `install(lifetimes=True)` keeps memory apart by its lifetime"
_PINNED = "none: swapkit pins the host memory of its copies itself"
KEYS: dict[str, AllocatorKey] = {
    "max_split_size_mb": AllocatorKey(
        "torch",
        _split_bytes,
        "a whole number above 20",
        "in whole segments, larger blocks are not split; none in ranges of virtual memory",
        "max_split_bytes",
    ),
    "garbage_collection_threshold": AllocatorKey(
        "torch",
        _between(0, 1, with_ends=False),
        "a number above 0 and below 1",
        "above this share of the budget, cached memory is given back before the pool grows",
        "garbage_collection_threshold",
    ),
    "expandable_segments": AllocatorKey(
        "torch",
        _flag,
        _TRUE,
        "False: whole segments instead of ranges of virtual memory",
        "expandable_segments",
    ),
    "roundup_power2_divisions": AllocatorKey(
        "torch",
        parse_divisions,
        "a power of 2, or a list such as [256:1,512:2,>:4]",
        "sizes of blocks are rounded up to parts of powers of two",
        "roundup_divisions",
    ),
    "per_process_memory_fraction": AllocatorKey(
        "torch",
        _between(0, 1, with_ends=True),
        "a number from 0 to 1",
        "the limit of `swapkit.install()`, if it is given none",
        "memory_fraction",
    ),
    "page_size": AllocatorKey(
        "torch_npu",
        _one_of("1g"),
        "1g",
        "the size of physical pages on an NPU; none on other devices",
        "page_policy",
        device_type="npu",
    ),
    "default_lc_threshold": AllocatorKey(
        "MindSpeed",
        _between(0, float("inf"), with_ends=True),
        "a number of bytes, at least 0",
        _NO_LIFETIMES,
        "short_lived_bytes",
    ),
    "open_memory_optimize": AllocatorKey(
        "MindSpeed",
        {"true": True, "1": True, "false": False, "0": False}.__getitem__,
        "true, 1, false or 0",
        _NO_LIFETIMES,
        "optimizes_lifetimes",
    ),
    "max_non_split_rounding_mb": AllocatorKey(
        "torch", _whole(20), "a whole number of at least 20", "none: the best fit is chosen"
    ),
    "large_segment_size_mb": AllocatorKey(
        "torch", _whole(11), "a whole number above 10", "none: segments grow by granules"
    ),
    "segment_size_mb": AllocatorKey(
        "torch_npu",
        _whole(20, 512),
        "a whole number from 20 to 512",
        "none: segments grow by granules",
    ),
    "base_addr_aligned_kb": AllocatorKey(
        "torch_npu",
        _whole(0, 16),
        "a whole number from 0 to 16",
        "none: blocks start at multiples of 512 bytes",
    ),
    "multi_stream_lazy_reclaim": AllocatorKey(
        "torch_npu", _flag, _TRUE, "none: blocks in use by other streams are polled"
    ),
    "release_lock_on_npumalloc": AllocatorKey(
        "torch_npu", _flag, _TRUE, "none: the pool chooses when its lock is held"
    ),
    "throw_on_npumalloc_oom": AllocatorKey(
        "torch_npu", _flag, _TRUE, "none: a failed allocation raises `torch.OutOfMemoryError`"
    ),
    "pin_memory_expandable_segments": AllocatorKey("torch_npu", _flag, _TRUE, _PINNED),
    "pinned_mem_register": AllocatorKey("torch_npu", _flag, _TRUE, _PINNED),
    "pinned_reserve_segment_size_mb": AllocatorKey(
        "torch", _whole(0), "a whole number of at least 0", _PINNED
    ),
    "pinned_max_round_threshold_mb": AllocatorKey(
        "torch", _whole(0), "a whole number of at least 0", _PINNED
    ),
    "pinned_max_cached_size_mb": AllocatorKey(
        "torch", _whole(0), "a whole number of at least 0", _PINNED
    ),
    "pinned_use_background_threads": AllocatorKey("torch", _flag, _TRUE, _PINNED),
    "backend": AllocatorKey(
        "CUDA",
        _one_of("native", "cudaMallocAsync"),
        "native or cudaMallocAsync",
        "none: swapkit's pool replaces both",
        usual="native",
    ),
    **dict.fromkeys(
        ("release_lock_on_cudamalloc", "release_lock_on_hipmalloc"),
        AllocatorKey("CUDA", _flag, _TRUE, "none: the pool chooses when its lock is held"),
    ),
    "throw_on_cudamalloc_oom": AllocatorKey(
        "CUDA", _flag, _TRUE, "none: a failed allocation raises `torch.OutOfMemoryError`"
    ),
    "graph_capture_record_stream_reuse": AllocatorKey(
        "CUDA", _flag, _TRUE, "none: graphs need torch's own allocator"
    ),
    **dict.fromkeys(
        ("pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_free_catch_all"),
        AllocatorKey("CUDA", _flag, _TRUE, _PINNED),
    ),
    "pinned_num_register_threads": AllocatorKey(
        "CUDA", _power_of_two(128), "a power of 2 of at most 128", _PINNED
    ),
}


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
