"""The two sections of a configuration document, as dataclasses that users may also create.

Source:
    MindFormers, `TransformerRecomputeConfig` and `TransformerSwapConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapkit.config.mindformers.swap_entries import SwapEntries, read_swap_entries
from swapkit.errors import WrongType


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """The section `recompute_config`.

    Args:
        recompute: layers to recompute as a whole. With swap off: a bool, the number of first layers
            for each stage, or a row of such numbers for each chunk; a number may be a bool. With
            swap on: a bool, or a list of layer indices.
        select_recompute: modules and operators to recompute: a list of patterns, or a mapping of
            patterns to layers, given as for `recompute`; or only layers, for the default patterns.
        select_comm_recompute: the same for operators whose communication is repeated.
        select_recompute_exclude: operators not to recompute; there are no default patterns.
        select_comm_recompute_exclude: operators whose communication is not repeated.
        parallel_optimizer_comm_recompute: whether weights are gathered again.
        mp_comm_recompute: whether collectives inside a recomputed region run again.
        recompute_slice_activation: whether a recomputed layer's kept input is sliced over ranks.

    Raises:
        WrongType: one of the last three is not a bool.
    """

    recompute: object = False
    select_recompute: object = False
    select_comm_recompute: object = False
    select_recompute_exclude: object = False
    select_comm_recompute_exclude: object = False
    parallel_optimizer_comm_recompute: bool = False
    mp_comm_recompute: bool = True
    recompute_slice_activation: bool = False

    def __post_init__(self) -> None:
        for key in (
            "parallel_optimizer_comm_recompute",
            "mp_comm_recompute",
            "recompute_slice_activation",
        ):
            check_bool(key, getattr(self, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig:
    """The section `swap_config`.

    Args:
        swap: whether to swap; if False, the other keys are only checked.
        default_prefetch: prefetch distance, in operators, of the default strategy, which swaps
            attention in every layer.
        layer_swap: layers to swap, a list of `{backward_prefetch, layers}`. None: none.
        op_swap: operators to swap, a list of `{op_name, backward_prefetch, layers}`. None: none; if
            both are None, the default strategy holds.

    Raises:
        InvalidConfiguration: a value has the wrong form.
        WrongType: `swap` is not a bool, or an entry is not a mapping.
        WrongKey: an entry lacks a key.
    """

    swap: bool = False
    default_prefetch: object = 1
    layer_swap: object = None
    op_swap: object = None

    def __post_init__(self) -> None:
        check_bool("swap", self.swap)
        self.read_entries()

    def read_entries(self) -> SwapEntries:
        """Return the two lists, or the default strategy, in normal form."""
        return read_swap_entries(
            self.layer_swap, self.op_swap, default_prefetch=self.default_prefetch
        )


def check_bool(key: str, value: object) -> None:
    """Raise `WrongType` if the value of a key is not a bool."""
    if not isinstance(value, bool):
        message = (
            f"The '{key}' must be a bool, but got {type(value).__name__}. "
            f"It is {value!r}; give True or False"
        )
        raise WrongType(message)
