"""A model of `transformers`, about 1B parameters, with room for 40 % of its activations."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu.comparison import Comparison
from benchmarks.gpu.train import show
from benchmarks.gpu.ways import list_ways

if TYPE_CHECKING:
    from benchmarks.gpu.context import Context

NAMES = ("plain", "pool", "recompute", "swapkit_40", "swapkit_at_recompute")


def run(context: Context, shape: str) -> None:
    """Train it plainly, with its own recompute, and with swapkit."""
    if importlib.util.find_spec("transformers") is None:
        context.report.note("not run: transformers is not installed")
        return
    ways = [way for way in list_ways(context, shape) if way.name in NAMES]
    Comparison(context, ways, partial(show, context, shape, ways)).run()
