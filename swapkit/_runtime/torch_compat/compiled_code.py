"""Whether the program has compiled code, or may have: read from the compiler, if it is loaded."""

from __future__ import annotations

import sys

import torch


def has_compiled() -> bool:
    """Return whether the compiler ran; always before torch 2.13: 2.10 fails at our hook tables."""
    return torch.__version__ < "2.13" or _count_frames() > 0


def may_compile() -> bool:
    """Return whether the compiler ran, or `torch.compile` was called."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and (
        _count_frames() > 0 or any(map(callable, list(loaded.cached_backends.values())))
    )


def _count_frames() -> int:
    loaded = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if loaded is None else int(loaded.FRAME_COUNTER)
