"""The settings of SmartSwap, `swap_policy_config`, under their original names.

What they mean here is in a few properties of `SmartSwapConfig`. The other fields are read and
checked and change nothing: what they tune is measured, simulated or searched here.

Source:
    MindSpeed, SmartSwap: `swap_policy_config.py`, the fields and their defaults.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from swapkit.errors import InvalidArgument
from swapkit.units import parse_bytes

MIB, GIB = 1 << 20, 1 << 30
SmartSwapSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | object"


class SwapPolicyPref(enum.Enum):
    """What may be swapped."""

    BETTER_PERFORMANCE = 1  # activations
    BETTER_MEMORY_SAVING = 2  # activations and optimizer states


@dataclass(frozen=True, slots=True, kw_only=True)
class SmartSwapConfig:
    """How SmartSwap works. Sizes are bytes, or text with a unit such as `"3GiB"`."""

    # Version 2: what is chosen, and how.
    policy_v2: bool = True
    policy_pref: SwapPolicyPref = SwapPolicyPref.BETTER_PERFORMANCE
    swap_bucket_size: int = -1  # of each stage; below 0: everything, 0: nothing
    num_attn_layers_per_stage: int = 1
    # The stages of a run, in steps from its beginning.
    warmup_step: int = 2
    stable_step: int = 3
    op_diff_thresh: float = 0.05  # share of operators that may differ in the same sequence
    # Aims: to save so much, or to come down to so much.
    target_mode: bool = False  # True: target_memory
    reduction_memory: int = 3 * GIB
    target_memory: int = 40 * GIB
    redundant_memory: int = 2 * GIB  # to stay below the peak once memory ran out
    adjust_memory: int = 300 * MIB  # more than that after each further time
    tensor_size_filter: int = 20 * MIB  # smaller tensors are no candidates
    tensor_size_thresh: int = 2**31 - 1
    # The model of transfers, and scores.
    D2H_bandwidth: float = 25600.0  # MB/s
    H2D_bandwidth: float = 25600.0
    free_stage_delay: int = 4
    swap_in_free_stage_delay: int = 2
    size_coverage_weight: float = 2
    adjust_size_coverage_weight: float = 0
    adjust_step_duration: float = 1
    enable_custom_record_stream: bool = True
    # What is written and printed.
    save_policy: bool = False
    save_profiler_data: bool = False
    output_root_path: str = "./swap_output"
    print_level: int = 1  # 0: everything, 1: what matters, 2: nothing
    print_rank: int = 0  # -1: all
    # Not one of the original's: the fields that somebody has given a value, be it the default.
    named: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            # A frozen value is completed here, before anyone sees it.
            object.__setattr__(self, name, _convert(name, default, getattr(self, name)))
        if self.stable_step <= self.warmup_step:
            raise InvalidArgument(
                f"stable_step={self.stable_step}: both count from the first step, so it must be "
                f"above warmup_step={self.warmup_step}"
            )

    @property
    def moves_optimizer(self) -> bool:
        """Whether optimizer states are swapped, too."""
        return self.policy_pref is SwapPolicyPref.BETTER_MEMORY_SAVING or not self.policy_v2

    @property
    def bucket_bytes(self) -> int | None:
        """Most bytes that a stage swaps; None: all that it can."""
        return None if self.swap_bucket_size < 0 else self.swap_bucket_size

    @property
    def search_steps(self) -> int | None:
        """Steps that try plans; None: nothing was said.

        The original makes one plan and tries it, which leaves nothing to choose.
        """
        steps = self.stable_step - self.warmup_step
        return steps if steps > 1 else None

    @property
    def has_stages(self) -> bool:
        """Whether it is said what stages swap, or what a stage is."""
        is_said = (
            self.bucket_bytes is not None
            or "swap_bucket_size" in self.named  # -1: stages swap all that they can
            or self.is_changed("num_attn_layers_per_stage")
        )
        return self.policy_v2 and is_said

    @property
    def least_bytes(self) -> int:
        """The bytes from which on a tensor is a candidate; 0: nothing was said."""
        return self.tensor_size_filter if self.is_changed("tensor_size_filter") else 0

    @property
    def limit_bytes(self) -> int | None:
        """The memory to come down to; None: none is named."""
        return self.target_memory if self.target_mode else None

    @property
    def reduction_bytes(self) -> int:
        """How much less than without any swap is to be in use. Version 1 always aims at that."""
        is_aim = not self.policy_v2 or self.is_changed("reduction_memory")
        return self.reduction_memory if is_aim and not self.target_mode else 0

    def is_changed(self, name: str) -> bool:
        """Return whether a field has another value than its default."""
        return bool(getattr(self, name) != _DEFAULTS[name])


# Of the original's fields.
_DEFAULTS = {each.name: each.default for each in fields(SmartSwapConfig) if each.name != "named"}


class SwapPolicyConfig:
    """The settings of SmartSwap as the original has them: attributes that may be changed."""

    def __init__(self) -> None:
        """Begin with the defaults, none of which counts as given."""
        vars(self).update(_DEFAULTS)
        vars(self)["_named"] = set()

    def __setattr__(self, name: str, value: object) -> None:
        """Change a setting; one that there is not is refused where the settings are read."""
        super().__setattr__(name, value)
        vars(self)["_named"].add(name)

    def given(self) -> dict[str, object]:
        """Return the settings that were given a value."""
        return {name: getattr(self, name) for name in vars(self)["_named"] if hasattr(self, name)}

    def __str__(self) -> str:
        """Return all settings as text."""
        return str({name: value for name, value in vars(self).items() if name != "_named"})


# What a script that uses the original edits; without other settings, --smart-swap takes these.
swap_policy_config = SwapPolicyConfig()

SIZES = frozenset(
    {
        *("swap_bucket_size", "reduction_memory", "target_memory", "redundant_memory"),
        *("adjust_memory", "tensor_size_filter", "tensor_size_thresh"),
    }
)
WEIGHTS = frozenset({"size_coverage_weight", "adjust_size_coverage_weight", "adjust_step_duration"})
# Least and most, both included.
RANGES: dict[str, tuple[float, float]] = {
    "num_attn_layers_per_stage": (1, math.inf),
    "warmup_step": (1, math.inf),
    "stable_step": (1, math.inf),
    "op_diff_thresh": (0, 1),
    "swap_bucket_size": (-math.inf, math.inf),
    "target_memory": (1, math.inf),
    "D2H_bandwidth": (1, math.inf),
    "H2D_bandwidth": (1, math.inf),
    "print_level": (0, 2),
    "print_rank": (-1, math.inf),
}
# Of older versions: what they say is measured or known here.
FORMER_FIELDS = frozenset({"rank", "bandwidth_arg", "tensor_freq_thresh"})


def read_smart_swap(source: SmartSwapSource = None) -> SmartSwapConfig:
    """Return the settings that a file, a mapping or an object has; what it does not name stays.

    Args:
        source: path of a YAML or JSON file, a mapping, or an object with these attributes; None for
            the defaults.

    Raises:
        InvalidArgument: a field is unknown, a value not possible, or the file cannot be read.
    """
    if source is None:
        return SmartSwapConfig()
    if isinstance(source, SmartSwapConfig):
        return source
    if isinstance(source, (str, os.PathLike)):
        values = _read_file(Path(source))
    elif isinstance(source, Mapping):
        values = source
    elif isinstance(source, SwapPolicyConfig):
        values = source.given()
    else:  # which has all settings, whoever has given them
        values = vars(source)
    known = set(_DEFAULTS)
    unknown = sorted(str(name) for name in set(values) - known - FORMER_FIELDS)
    if unknown:
        raise InvalidArgument(
            f"SmartSwap has no {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    chosen: dict[str, Any] = {name: value for name, value in values.items() if name in known}
    is_whole = set(chosen) == known
    return SmartSwapConfig(**chosen, named=frozenset() if is_whole else frozenset(chosen))


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: it cannot be read: {error.strerror}") from None
    if path.suffix not in {".json", ".yaml", ".yml"}:
        raise InvalidArgument(f"{path}: expected a .yaml, .yml or .json file")
    try:
        values = yaml.safe_load(text) or {}  # JSON is YAML
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidArgument(f"{path}: it is not understood: {reason}") from None
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{path}: expected fields and their values")
    return values


def _convert(name: str, default: object, value: object) -> object:
    """Return the value of a field as its kind demands."""
    if isinstance(default, SwapPolicyPref):
        return _find_preference(value)
    if isinstance(default, (bool, str)):
        if not isinstance(value, type(default)):
            raise InvalidArgument(f"{name}={value!r}: expected a {type(default).__name__}")
        return value
    if name in SIZES and isinstance(value, str):
        return parse_bytes(value, name=name)
    return _check_number(name, value, whole=isinstance(default, int) and name not in WEIGHTS)


def _check_number(name: str, value: object, *, whole: bool) -> object:
    kind = int if whole else (int, float)
    least, most = RANGES.get(name, (0, math.inf))
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "whole number" if whole else "number"
        raise InvalidArgument(f"{name}={value!r}: expected a {what} {_describe(least, most)}")
    return value


def _describe(least: float, most: float) -> str:
    if most != math.inf:
        return f"from {least} to {most}"
    return "" if least == -math.inf else f"of at least {least}"


def _find_preference(value: object) -> SwapPolicyPref:
    """Return the member that is meant, be it named or one of a like enumeration."""
    name = getattr(value, "name", value)
    if isinstance(name, str) and name in SwapPolicyPref.__members__:
        return SwapPolicyPref[name]
    names = " or ".join(SwapPolicyPref.__members__)
    raise InvalidArgument(f"policy_pref={value!r}: expected {names}")
