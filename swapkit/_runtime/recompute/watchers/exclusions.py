"""A configuration's exclusions: operators in a recomputed region that are not recomputed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from swapkit._runtime.operators.effects import can_keep
from swapkit._runtime.operators.names import operator_names
from swapkit._runtime.process.runtime import get_runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepInside:
    """A selective checkpointing policy that keeps results of some operators of some modules."""

    operators: tuple[tuple[str, str], ...]  # module names, and patterns of operator names

    def __call__(self, _context: object, operator: Any, *_: object, **__: object) -> Any:  # noqa: ANN401 - torch's
        """Decide for one operator."""
        tracker = get_runtime().tracker
        here = tracker.name(tracker.current())
        is_excluded = any(
            is_same(module, here)
            and any(re.fullmatch(pattern, name) for name in operator_names(operator))
            for module, pattern in self.operators
        )
        if is_excluded and can_keep(operator):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def is_same(name: str, other: str) -> bool:
    """Return whether two names may belong to one module, seen from different roots.

    A copy of a configured model may be trained inside another module, which lengthens its names.
    """
    return f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")
