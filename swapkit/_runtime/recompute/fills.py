"""What operators fill after autograd has saved it, as `rrelu` its noise.

Torch's checkpoint stops a second run at what is saved last, which would then never be filled.
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
    """Whether the first run of a region has filled what was saved: a second one has to end then."""

    def __init__(self) -> None:
        """Nothing has run yet."""
        self._must_end = False

    @contextlib.contextmanager
    @untraced
    def noting(self) -> Iterator[None]:
        """Look at what the first run fills."""
        shim = get_runtime().shim
        see_fills(shim.operators_known())
        before = shim.fills_run()
        yield
        self._must_end = shim.fills_run() != before

    @contextlib.contextmanager
    @untraced
    def ending(self) -> Iterator[None]:
        """Let a run of the region, which has just begun, end with what is saved last."""
        pair = top_hooks(True)  # noqa: FBT003
        assert pair is not None  # torch's checkpoint has put its own on top
        yield
        if self._must_end:
            with hidden():
                nothing = torch.empty(0)
            pair[0](nothing)
