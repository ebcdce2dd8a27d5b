"""Decoders on the meta device that record as on an accelerator, without computing or allocating.

Layer norm and flash attention are called as the single kernels of an accelerator. On the meta
device torch would decompose them, and autograd would save a different set of tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a decoder; `experts`: experts per MLP, 0: none.

    `shards`: devices that share each matrix, of which this is one (tensor parallelism): it has its
    part of the heads, of the hidden units and of the vocabulary. Their sums need no memory.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int = 32000
    experts: int = 0
    experts_of_token: int = 2
    shards: int = 1


SHAPES = {
    "7b": Shape(layers=32, width=4096, heads=32, key_heads=32, hidden=11008),
    "7b-gqa": Shape(layers=32, width=4096, heads=32, key_heads=8, hidden=14336),
    "13b": Shape(layers=40, width=5120, heads=40, key_heads=40, hidden=13824),
    "70b": Shape(layers=80, width=8192, heads=64, key_heads=8, hidden=28672),
    "7b tp8": Shape(layers=32, width=4096, heads=32, key_heads=32, hidden=11008, shards=8),
    "13b tp8": Shape(layers=40, width=5120, heads=40, key_heads=40, hidden=13824, shards=8),
    "70b tp8": Shape(layers=80, width=8192, heads=64, key_heads=8, hidden=28672, shards=8),
    "moe": Shape(layers=32, width=4096, heads=32, key_heads=8, hidden=14336, experts=8),
    "tiny": Shape(layers=4, width=512, heads=4, key_heads=2, hidden=1408, vocabulary=1000),
    "tiny-moe": Shape(
        layers=3, width=512, heads=4, key_heads=2, hidden=1024, vocabulary=1000, experts=4
    ),
}


def cut_layers(shape: Shape, layers: int) -> Shape:
    """Return the shape of a part with `layers` layers."""
    return replace(shape, layers=layers)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, through the flash kernel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        wide = shape.heads * self.head // shape.shards
        narrow = shape.key_heads * self.head // shape.shards
        self.query = nn.Linear(shape.width, wide, bias=False)
        self.key = nn.Linear(shape.width, narrow, bias=False)
        self.value = nn.Linear(shape.width, narrow, bias=False)
        self.out = nn.Linear(wide, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, tokens, -1, self.head).transpose(1, 2)

        def turn(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cosine + torch.cat((-second, first), dim=-1) * sine

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        y = flash(turn(query), turn(key), value, 0.0, True)[0]  # noqa: FBT003
        return cast("torch.Tensor", self.out(y.transpose(1, 2).reshape(batch, tokens, -1)))


class Gated(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden // shape.shards
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.down(functional.silu(self.gate(x)) * self.up(x)))


class Experts(nn.Module):
    """Gated MLPs, each for the tokens routed to it; every call draws their numbers."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(Gated(shape) for _ in range(shape.experts))
        self.of_token = shape.experts_of_token
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = functional.softmax(self.router(flat), dim=-1)[:, : self.of_token].reshape(-1, 1)
        rows = torch.empty(len(flat) * self.of_token, dtype=torch.long, device=x.device)
        parts = torch.split(flat.index_select(0, rows), self.route(len(rows)))
        pairs = zip(self.experts, parts, strict=True)
        made = torch.cat([expert(part) for expert, part in pairs]) * weights
        return torch.zeros_like(flat).index_add(0, rows, made).view(x.shape)

    def route(self, rows: int) -> list[int]:
        """Draw the number of rows of each expert: between 1/3 and 5/3 of its share."""
        shares = [self.draw.uniform(1, 5) for _ in self.experts]
        sizes = [int(rows * share / sum(shares)) for share in shares]
        sizes[-1] += rows - sum(sizes)
        return sizes


class Layer(nn.Module):
    """Attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp = Experts(shape, draw) if shape.experts else Gated(shape)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return cast("torch.Tensor", x + self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """A decoder or a part of one; the first has the embedding, the last the head and the loss."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, shape: Shape, *, tokens: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        draw = random.Random(0)
        vocabulary = shape.vocabulary // shape.shards
        self.embedding = nn.Embedding(vocabulary, shape.width) if is_first else None
        self.layers = nn.ModuleList(Layer(shape, draw) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False) if is_last else None
        self.head = nn.Linear(shape.width, vocabulary, bias=False) if is_last else None
        head = shape.width // shape.heads
        self.register_buffer("cosine", torch.empty(tokens, head))
        self.register_buffer("sine", torch.empty(tokens, head))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss, or the input of the next part."""
        tokens = x.shape[1]
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cosine[:tokens], self.sine[:tokens])
        if self.norm is None or self.head is None or labels is None:
            return x
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(shape: Shape, *, tokens: int, is_first: bool = True, is_last: bool = True) -> Decoder:
    """Return the decoder on the meta device, in bf16."""
    with torch.device("meta"):
        model = Decoder(shape, tokens=tokens, is_first=is_first, is_last=is_last)
    return model.to(DTYPE).train()


def recompute_layers(model: Decoder) -> None:
    """Put `torch.utils.checkpoint` around every layer."""
    for layer in model.layers:
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def checkpointed(*args: Any) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False
        )
        return result

    return checkpointed


def make_inputs(model: Decoder, width: int, *, batch: int, tokens: int) -> dict[str, Any]:
    """Return the inputs of a part; `gradient`: gradient of its output, None for a loss."""
    numbers = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    states = torch.empty(batch, tokens, width, dtype=DTYPE, device="meta")
    is_first, is_last = model.embedding is not None, model.head is not None
    return {
        "x": numbers if is_first else states.requires_grad_(),
        "labels": numbers if is_last else None,
        "gradient": None if is_last else torch.empty_like(states, requires_grad=False),
    }


def run(model: Decoder, inputs: dict[str, Any]) -> None:
    """Run forward and backward of one microbatch; free its output in between, as if sent on."""
    edge = torch.autograd.graph.get_gradient_edge(model(inputs["x"], inputs["labels"]))
    torch.autograd.backward(edge, inputs["gradient"])
