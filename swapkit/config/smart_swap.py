"""The settings of SmartSwap, `swap_policy_config`, under their original names.

A few properties of `SmartSwapConfig` define their meaning here. All other fields are checked but
have no effect: swapkit measures, simulates or searches what they tune.

Source:
    MindSpeed, SmartSwap: `swap_policy_config.py`, the fields and their defaults.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from swapkit.config.values import accepts
from swapkit.config.yaml_documents import read_text, read_yaml
from swapkit.errors import InvalidArgument
from swapkit.units import MIB, parse_bytes

GIB = 1 << 30
Bytes: TypeAlias = int  # or text with a unit, converted
SmartSwapSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | object"


class SwapPolicyPref(enum.Enum):
    """The tensors that may be swapped."""

    BETTER_PERFORMANCE = 1  # activations
    BETTER_MEMORY_SAVING = 2  # activations and optimizer states


@dataclass(frozen=True, slots=True, kw_only=True)
class SmartSwapConfig:
    """The settings of SmartSwap. Sizes are bytes, or text with a unit such as `"3GiB"`."""

    # Version 2: the selection of tensors.
    policy_v2: bool = True
    policy_pref: SwapPolicyPref = SwapPolicyPref.BETTER_PERFORMANCE
    swap_bucket_size: Bytes = -1  # of each stage; below 0: everything, 0: nothing
    num_attn_layers_per_stage: int = 1
    # The stages of a run, in steps from its start.
    warmup_step: int = 2
    stable_step: int = 3
    op_diff_thresh: float = 0.05  # share of operators that may differ in the same sequence
    # Goals: the memory to save, or the memory to come down to.
    target_mode: bool = False  # True: target_memory is the goal
    reduction_memory: Bytes = 3 * GIB
    target_memory: Bytes = 40 * GIB
    redundant_memory: Bytes = 2 * GIB  # margin below the peak once memory ran out
    adjust_memory: Bytes = 300 * MIB  # added to that margin each further time
    tensor_size_filter: Bytes = 20 * MIB  # smaller tensors are not candidates
    tensor_size_thresh: Bytes = 2**31 - 1
    # The model of transfers, and scores.
    D2H_bandwidth: float = 25600.0  # MB/s
    H2D_bandwidth: float = 25600.0
    free_stage_delay: int = 4
    swap_in_free_stage_delay: int = 2
    size_coverage_weight: float = 2
    adjust_size_coverage_weight: float = 0
    adjust_step_duration: float = 1
    enable_custom_record_stream: bool = True
    # Output.
    save_policy: bool = False
    save_profiler_data: bool = False
    output_root_path: str = "./swap_output"
    print_level: int = 1  # 0: everything, 1: what matters, 2: nothing
    print_rank: int = 0  # -1: all
    # Not a field of MindSpeed's: the fields that were set explicitly, even to their default.
    named: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name != "named":  # the dataclass is frozen: convert its fields before any use
                value = _convert(each.name, str(each.type), getattr(self, each.name))
                object.__setattr__(self, each.name, value)
        if self.stable_step <= self.warmup_step:
            above = f"so it must be above warmup_step={self.warmup_step}"
            text = f"stable_step={self.stable_step}: both count from the first step, {above}"
            raise InvalidArgument(text)

    @property
    def moves_optimizer(self) -> bool:
        """Whether optimizer states are swapped too."""
        return self.policy_pref is SwapPolicyPref.BETTER_MEMORY_SAVING or not self.policy_v2

    @property
    def bucket_bytes(self) -> int | None:
        """The most bytes that a stage swaps; None: no limit."""
        return None if self.swap_bucket_size < 0 else self.swap_bucket_size

    @property
    def search_steps(self) -> int | None:
        """The number of steps that try plans; None: not specified.

        One step means None: MindSpeed then makes and tries a single plan, so it chooses nothing.
        """
        steps = self.stable_step - self.warmup_step
        return steps if steps > 1 else None

    @property
    def has_stages(self) -> bool:
        """Whether the settings specify what a stage is, or how much it swaps."""
        is_said = (
            self.bucket_bytes is not None
            or "swap_bucket_size" in self.named  # -1: stages swap all that they can
            or self.is_changed("num_attn_layers_per_stage")
        )
        return self.policy_v2 and is_said

    @property
    def least_bytes(self) -> int:
        """The smallest size in bytes of a candidate tensor; 0: not specified."""
        return self.tensor_size_filter if self.is_changed("tensor_size_filter") else 0

    @property
    def stage_least_bytes(self) -> int:
        """The smallest size in bytes of what a stage swaps.

        The default filter fits models whose layers save gigabytes. Whoever sets up stages for a
        smaller model expects them to swap, so it holds only if it was set explicitly.
        """
        is_said = "tensor_size_filter" in self.named or self.is_changed("tensor_size_filter")
        return self.tensor_size_filter if is_said else 0

    @property
    def limit_bytes(self) -> int | None:
        """The memory to come down to; None: not specified."""
        return self.target_memory if self.target_mode else None

    @property
    def reduction_bytes(self) -> int:
        """The reduction in bytes relative to no swap; version 1 always has one."""
        is_aim = not self.policy_v2 or self.is_changed("reduction_memory")
        return self.reduction_memory if is_aim and not self.target_mode else 0

    def is_changed(self, name: str) -> bool:
        """Return whether a field differs from its default."""
        return bool(getattr(self, name) != _DEFAULTS[name])


# Of MindSpeed's fields.
_DEFAULTS = {each.name: each.default for each in fields(SmartSwapConfig) if each.name != "named"}


class SwapPolicyConfig:
    """The settings of SmartSwap as mutable attributes, as in MindSpeed."""

    def __init__(self) -> None:
        """Start with the defaults, none of which counts as set explicitly."""
        vars(self).update(_DEFAULTS)
        vars(self)["_named"] = set()

    def __setattr__(self, name: str, value: object) -> None:
        """Change a setting; `read_smart_swap` rejects unknown ones."""
        super().__setattr__(name, value)
        vars(self)["_named"].add(name)

    def given(self) -> dict[str, object]:
        """Return the settings that were set explicitly."""
        return {name: getattr(self, name) for name in vars(self)["_named"] if hasattr(self, name)}

    def __str__(self) -> str:
        """Return all settings as text."""
        return str({name: value for name, value in vars(self).items() if name != "_named"})


# Scripts written for MindSpeed edit this object; --smart-swap uses it unless given other settings.
swap_policy_config = SwapPolicyConfig()

# What a field accepts by its type, if not a whole number of at least 0; then by its name.
BY_TYPE = {"float": "a number of at least 0", "bool": "a bool", "str": "a str"}
POSITIVE = ("num_attn_layers_per_stage", "warmup_step", "stable_step", "target_memory")
ACCEPTED = {
    **dict.fromkeys(POSITIVE, "a whole number of at least 1"),
    **dict.fromkeys(("D2H_bandwidth", "H2D_bandwidth"), "a number of at least 1"),
    "op_diff_thresh": "a number from 0 to 1",
    "swap_bucket_size": "a whole number",
    "print_level": "a whole number from 0 to 2",
    "print_rank": "a whole number of at least -1",
}
# Fields of older versions: swapkit measures or knows their values.
FORMER_FIELDS = frozenset({"rank", "bandwidth_arg", "tensor_freq_thresh"})


def read_smart_swap(source: SmartSwapSource = None) -> SmartSwapConfig:
    """Return the settings of a file, a mapping or an object; missing ones have their defaults.

    Args:
        source: path of a YAML or JSON file, a mapping, or an object with these attributes; None:
            the defaults.

    Raises:
        InvalidArgument: a field is unknown, a value is invalid, or the file cannot be read.
    """
    if source is None or isinstance(source, SmartSwapConfig):
        return source or SmartSwapConfig()
    if isinstance(source, (str, os.PathLike)):
        source = _read_file(Path(source))
    values = _list_values(source)
    known = set(_DEFAULTS)
    unknown = ", ".join(sorted(str(name) for name in set(values) - known - FORMER_FIELDS))
    if unknown:
        fields_here = ", ".join(sorted(known))
        raise InvalidArgument(f"SmartSwap has no field {unknown}; its fields are {fields_here}")
    chosen = {name: value for name, value in values.items() if name in known}
    is_whole = set(chosen) == known  # an object has all settings, set explicitly or not
    return SmartSwapConfig(**chosen, named=frozenset() if is_whole else frozenset(chosen))


def _list_values(source: object) -> Mapping[str, Any]:
    if isinstance(source, SwapPolicyConfig):
        return source.given()
    return source if isinstance(source, Mapping) else vars(source)


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = read_text(path)
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot read it: {error.strerror}") from None
    if path.suffix not in {".json", ".yaml", ".yml"}:
        raise InvalidArgument(f"{path}: expected a .yaml, .yml or .json file")
    values = read_yaml(text, str(path)) or {}
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{path}: expected a mapping of fields to values")
    return values


def _convert(name: str, kind: str, value: object) -> object:
    """Return a field's value converted to the field's type."""
    if kind == "SwapPolicyPref":
        return _find_preference(value)
    if kind == "Bytes" and isinstance(value, str):
        return parse_bytes(value, name=name)
    words = ACCEPTED.get(name) or BY_TYPE.get(kind, "a whole number of at least 0")
    plain = {"bool": bool, "str": str}.get(kind)
    if not (isinstance(value, plain) if plain else accepts(words, value)):
        raise InvalidArgument(f"{name}={value!r}: expected {words}")
    return value


def _find_preference(value: object) -> SwapPolicyPref:
    """Return the member with the name of `value`: a text, or a member of any enumeration."""
    name = getattr(value, "name", value)
    if isinstance(name, str) and name in SwapPolicyPref.__members__:
        return SwapPolicyPref[name]
    names = " or ".join(SwapPolicyPref.__members__)
    raise InvalidArgument(f"policy_pref={value!r}: expected {names}")
