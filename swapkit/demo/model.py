"""A byte-level language model in the style of Llama, in plain torch modules.

RMSNorm before each half of a block, rotary position embedding, causal scaled dot product attention,
SwiGLU feed-forward. The model code does not use swapkit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from swapkit.demo.sizes import ModelSize

BYTE_VALUES = 256
_ROTARY_BASE = 10_000.0


def rotary_table(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotation angles of every position.

    Args:
        tokens: number of positions.
        head_dim: width of one head.

    Returns:
        Two tensors of shape `(tokens, head_dim / 2)`.
    """
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (first half, second half) of every head by the angle of its position.

    Args:
        x: queries or keys.
        cosines: from `rotary_table`.
        sines: from `rotary_table`.

    Shape:
        `x` and the result: `(batch, heads, tokens, head_dim)`.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, size: ModelSize) -> None:
        """Create the four projections.

        Args:
            size: shape of the model.
        """
        super().__init__()
        self.heads = size.heads
        self.query = nn.Linear(size.dim, size.dim, bias=False)
        self.key = nn.Linear(size.dim, size.dim, bias=False)
        self.value = nn.Linear(size.dim, size.dim, bias=False)
        self.output = nn.Linear(size.dim, size.dim, bias=False)
        cosines, sines = rotary_table(size.tokens, size.dim // size.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position attend to itself and to earlier positions.

        Args:
            x: hidden states.

        Shape:
            `x` and the result: `(batch, tokens, dim)`.
        """
        batch, tokens, dim = x.shape
        query, key, value = (
            projection(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        cosines, sines = self.cosines[:tokens], self.sines[:tokens]
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(seen.transpose(1, 2).reshape(batch, tokens, dim))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward network."""

    def __init__(self, size: ModelSize) -> None:
        """Create the three projections.

        Args:
            size: shape of the model.
        """
        super().__init__()
        self.gate = nn.Linear(size.dim, size.hidden, bias=False)
        self.up = nn.Linear(size.dim, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, gate, narrow.

        Args:
            x: hidden states.

        Shape:
            `x` and the result: `(batch, tokens, dim)`.
        """
        narrowed: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return narrowed


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        """Create the two halves and their norms.

        Args:
            size: shape of the model.
        """
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.RMSNorm(size.dim)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        """Add both halves to the residual stream.

        Args:
            x: hidden states.

        Shape:
            `x` and the result: `(batch, tokens, dim)`.
        """
        x = x + self.attention(self.attention_norm(x))
        summed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return summed


class LanguageModel(nn.Module):
    """A model that predicts the next byte of a text."""

    def __init__(self, size: ModelSize, *, recompute: bool = False) -> None:
        """Create the blocks, the embedding and the head.

        Args:
            size: shape of the model.
            recompute: keep only the blocks' inputs and run every block again in backward.
        """
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(BYTE_VALUES, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, BYTE_VALUES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the byte after each position.

        Args:
            text: bytes, as integers.

        Shape:
            `text`: `(batch, tokens)`; the result: `(batch, tokens, 256)`.
        """
        x = self.embedding(text)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(model: LanguageModel, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of every window's bytes, each given the bytes before it.

    Args:
        model: the model.
        windows: inputs and targets in one tensor.

    Shape:
        `windows`: `(batch, tokens + 1)`; the result: a scalar.
    """
    logits: Tensor = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
