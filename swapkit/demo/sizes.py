"""The sizes of the demo's model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the model and of its batches.

    Args:
        dim: width of the residual stream; a multiple of `2 * heads`.
        layers: number of blocks.
        heads: attention heads of every block.
        hidden: inner width of every feed-forward.
        tokens: bytes of text in one sequence.
        batch: sequences in one step.
        steps: default number of timed steps.
    """

    dim: int
    layers: int
    heads: int
    hidden: int
    tokens: int
    batch: int
    steps: int


SIZES = {
    "tiny": ModelSize(dim=128, layers=4, heads=4, hidden=352, tokens=256, batch=6, steps=3),
    "compact": ModelSize(dim=192, layers=8, heads=4, hidden=512, tokens=256, batch=6, steps=7),
    "small": ModelSize(dim=256, layers=8, heads=4, hidden=704, tokens=512, batch=8, steps=7),
    "medium": ModelSize(dim=512, layers=12, heads=8, hidden=1408, tokens=512, batch=8, steps=5),
}
