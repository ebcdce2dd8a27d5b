"""`AdamWSwap`: AdamW whose states live on the host between steps.

Source:
    MindSpeed, `fsdp/memory/swap_optimizer`: name and arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit.api.offloading import offload
from swapkit.errors import InvalidArgument
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim.optimizer import ParamsT

_log = get_logger(__name__)

MEM_FRACTION = 0.8  # MindSpeed's default
STATE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamWSwap(torch.optim.AdamW):
    """AdamW with `swapkit.offload(optimizer)` applied: same results, states on the host."""

    def __init__(  # noqa: PLR0913 - MindSpeed's arguments
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 - as in torch
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        mem_fraction_static: float | None = MEM_FRACTION,
        state_keys: Iterable[str] | None = None,
    ) -> None:
        """Create the optimizer; its states go to the host as steps create them.

        Args:
            params: as for `torch.optim.AdamW`, like the other arguments up to `fused`, which all
                have torch's meaning. (MindSpeed always uses its fused kernel.)
            lr: see `params`.
            betas: see `params`.
            eps: see `params`.
            weight_decay: see `params`.
            amsgrad: see `params`.
            maximize: see `params`.
            foreach: see `params`.
            capturable: see `params`.
            differentiable: see `params`.
            fused: see `params`.
            mem_fraction_static: the share of free memory that a step may use for states, above 0
                and at most 1. No effect: swapkit copies in pieces of at most 64 MiB.
            state_keys: names of the states to move. No effect, as in MindSpeed: all states move.

        Raises:
            InvalidArgument: `mem_fraction_static` is out of range, or a name in `state_keys` is not
                one of AdamW's states.
        """
        _check(mem_fraction_static, state_keys)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        offload(self)


def _check(mem_fraction_static: float | None, state_keys: Iterable[str] | None) -> None:
    if mem_fraction_static is not None and not 0 < mem_fraction_static <= 1:
        raise InvalidArgument(
            f"mem_fraction_static={mem_fraction_static!r}: expected a number above 0, at most 1"
        )
    unknown = sorted(set(() if state_keys is None else state_keys).difference(STATE_KEYS))
    if unknown:
        raise InvalidArgument(
            f"state_keys names {', '.join(unknown)}; the states of AdamW are "
            f"{', '.join(STATE_KEYS)}"
        )
    if mem_fraction_static not in {None, MEM_FRACTION}:
        _log.warning(
            "mem_fraction_static=%s has no effect: swapkit copies states in pieces of at most "
            "64 MiB",
            mem_fraction_static,
        )
