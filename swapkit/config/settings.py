"""The settings from flags and environment, as plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.config.smart_swap import SmartSwapConfig
from swapkit.units import MIB, format_bytes

CORE_ATTENTION, LAYER_INPUT = "core_attention", "layer_input"
# Modules inside a layer, as Megatron and the models of `transformers` name them.
ROLES = {
    "layer": "",
    LAYER_INPUT: "",  # the inputs of a recomputed layer
    "input_norm": "input_norm|input_layernorm|ln_1",
    "self_attention": "self_attention|self_attn|attention|attn",
    CORE_ATTENTION: r"(?:self_attention|self_attn|attention|attn)\.core_attention",
    "post_attention_norm": ("post_attention_norm|post_attention_layernorm|pre_mlp_layernorm|ln_2"),
    "mlp": "mlp|feed_forward|ffn|block_sparse_moe",
    "activation_function": (
        r"(?:mlp|feed_forward|ffn)(?:\..+)?\.(?:activation_func|act_fn|act|activation|silu)"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """One part of every layer and its action: an entry of `Settings.document`.

    `layers` counts from `first`; a tuple has a number for each pipeline stage.
    """

    action: str  # "recompute" or "swap"
    role: str  # a key of `ROLES`, or a module's name
    layers: int | tuple[int, ...] | None = None  # None: all
    first: int = 0
    group: int = 1  # consecutive layers per region

    @property
    def pattern(self) -> str:
        """Regular expression of the module's path inside its layer; empty: the layer itself."""
        return ROLES.get(self.role, re.escape(self.role))

    def has_layer(self, index: int, *, stage: int = 0) -> bool:
        """Return whether the part includes a layer, counted in its pipeline stage (or chunk)."""
        count = self.layers
        if isinstance(count, tuple):
            count = count[stage] if stage < len(count) else 0
        return index >= self.first and (count is None or index < self.first + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The requested settings. None: not specified.

    SWAP_SIZE_MULTIPLE is missing: no flag affects it, and a session reads it from the environment.
    """

    policy: str | None = None  # of `swapkit.budget`: "auto", "swap", "recompute"
    limit_bytes: int | None = None  # None: the device's memory; see `resolve_limit`
    is_fixed_limit: bool = False  # chosen by hand: `advise` names a larger one if a step fails
    searches_threshold: bool = False  # from `limit_bytes` down; the budget is the device's memory
    profile_steps: int | None = None
    search_steps: int | None = None
    min_swap_bytes: int = MIN_SWAP_BYTES
    document: tuple[LayerPart, ...] = ()
    counts_per_stage: bool = False  # count layers per stage; else per virtual chunk
    swap_optimizer: bool = False
    memory_fragmentation: bool = False  # see `Environment`
    bind_cpus: bool = False  # threads to the CPUs near the device
    smart_swap: SmartSwapConfig | None = None

    def resolve_limit(self, device_bytes: int) -> int:
        """Return the limit on a device: the requested limit, at most the device's memory.

        Args:
            device_bytes: the device's memory.
        """
        return device_bytes if self.limit_bytes is None else min(self.limit_bytes, device_bytes)

    def advise(self, budget_bytes: int) -> str:
        """Return advice for a user whose step does not fit the given size.

        Args:
            budget_bytes: what fits the whole step as far as it is known.
        """
        size = format_bytes(self.limit_bytes or 0)
        return (
            f"--adaptive-recompute-device-size gives {size}. Try {-(-budget_bytes // MIB)} (MiB), "
            "which fits the whole step as far as it is known, or omit the flag to use all memory "
            "of the device"
        )
