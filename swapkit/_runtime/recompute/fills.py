"""Tensors that operators fill after autograd has saved them, such as the noise of `rrelu`.

Torch's checkpoint stops a second run at the last saved tensor, which would then stay unfilled.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.process.captures import see_fills
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.torch_compat.internals import top_hooks
from swapkit._runtime.torch_compat.isolation import hidden, untraced

if TYPE_CHECKING:
    from collections.abc import Iterator


class Fills:
    """Tracks whether a region's first run filled saved tensors; then a rerun must go to its end."""

    def __init__(self) -> None:
        """Start before the first run."""
        self._must_end = False

    @contextlib.contextmanager
    @untraced
    def noting(self) -> Iterator[None]:
        """Note whether the first run fills saved tensors."""
        shim = get_runtime().shim
        see_fills(shim.operators_known())
        before = shim.fills_run()
        yield
        self._must_end = shim.fills_run() != before

    @contextlib.contextmanager
    @untraced
    def ending(self) -> Iterator[None]:
        """Save a dummy tensor at the end of a run, so that torch does not stop it earlier."""
        pair = top_hooks(True)  # noqa: FBT003
        assert pair is not None  # torch's checkpoint has pushed its own pair
        yield
        if self._must_end:
            with hidden():
                nothing = torch.empty(0)
            pair[0](nothing)
