"""A byte-level language model in the style of Llama, and its training: plain torch, no swapkit.

It learns the sources of Python's standard library. The demo, benchmarks and tests train it.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

BYTE_VALUES = 256
TEXT_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the model and of its batches, and the default number of timed steps."""

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


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads, head_dim = size.heads, size.dim // size.heads
        self.query = nn.Linear(size.dim, size.dim, bias=False)
        self.key = nn.Linear(size.dim, size.dim, bias=False)
        self.value = nn.Linear(size.dim, size.dim, bias=False)
        self.output = nn.Linear(size.dim, size.dim, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(size.tokens, dtype=torch.float32), frequencies)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position attend to itself and to earlier ones: (batch, tokens, dim)."""
        batch, tokens, dim = x.shape
        query, key, value = (
            projection(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        cosines, sines = self.cosines[:tokens], self.sines[:tokens]
        query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(seen.transpose(1, 2).reshape(batch, tokens, dim))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward network."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.dim, size.hidden, bias=False)
        self.up = nn.Linear(size.dim, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, gate, narrow."""
        narrowed: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return narrowed


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.RMSNorm(size.dim)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        """Add both halves to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        summed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return summed


class LanguageModel(nn.Module):
    """A model that predicts the next byte; with `recompute`, backward runs every block again."""

    def __init__(self, size: ModelSize, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(BYTE_VALUES, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, BYTE_VALUES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        x = self.embedding(text)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of every window's bytes, each given the bytes before it."""
    logits: Tensor = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def standard_library_text(most_bytes: int = TEXT_BYTES) -> bytes:
    """Return the start of the standard library's sources, in the order of their paths."""
    root, paths = Path(sysconfig.get_path("stdlib")), []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "test", "tests"}
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    text = bytearray()
    for path in sorted(paths, key=lambda each: each.relative_to(root).as_posix()):
        if len(text) >= most_bytes:
            break
        text += path.read_bytes()
    return bytes(text[:most_bytes])


class Training:
    """A model, its optimizer and its text; the same seed gives the same numbers."""

    def __init__(self, size: ModelSize, *, seed: int, recompute: bool) -> None:
        torch.manual_seed(seed)
        self.model = LanguageModel(size, recompute=recompute)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps_done = 0
        self._size, self._seed, self._text = size, seed, standard_library_text()

    def step(self, when_full: Callable[[], object] | None = None) -> str:
        """Train one step; return the loss before the update, as `float.hex` formats it."""
        chooser, tokens = random.Random(f"{self._seed}:{self.steps_done}"), self._size.tokens
        starts = [chooser.randrange(len(self._text) - tokens) for _ in range(self._size.batch)]
        joined = b"".join(self._text[start : start + tokens + 1] for start in starts)
        windows = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
        loss = next_byte_loss(self.model, windows.view(len(starts), -1).long())
        if when_full is not None:
            when_full()
        loss.backward()  # type: ignore[no-untyped-call]
        if when_full is not None:
            when_full()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return float(loss.item()).hex()

    def state_bytes(self) -> int:
        """Return the total bytes of parameters, gradients and optimizer states."""
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        parameters = sum(each.nbytes for each in self.model.parameters())
        return 2 * parameters + sum(each.nbytes for each in states if isinstance(each, Tensor))

    def digest(self) -> str:
        """Return the SHA-256 of all parameters, buffers and optimizer states, sorted by name."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, parameter in self.model.named_parameters():
            states = self.optimizer.state[parameter]
            named += [(f"{name}.{key}", value) for key, value in states.items()]
        digest = hashlib.sha256()
        for name, tensor in sorted(named, key=lambda pair: pair[0]):
            digest.update(name.encode() + tensor.detach().numpy().tobytes())
        return digest.hexdigest()
