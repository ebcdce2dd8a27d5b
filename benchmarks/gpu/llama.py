"""A Llama-style stack in plain torch, and the shapes that are trained.

Nothing of it is special to swapkit: RMS norm, rotary positions, grouped-query attention through
`scaled_dot_product_attention`, SwiGLU, cross entropy over float32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    RunBlock = Callable[["Block", torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a model is, and how many tokens a step has."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    tokens: int
    library: str = "plain torch"  # or "transformers"
    rank: int = 0  # of adapters, which then alone are trained; 0: everything is


def about_1b(tokens: int, library: str = "plain torch") -> Shape:
    """Return the shape of a model of about a billion parameters."""
    return Shape(
        layers=16,
        width=2048,
        heads=32,
        key_heads=8,
        hidden=8192,
        vocabulary=32000,
        tokens=tokens,
        library=library,
    )


def blocks_of_8b(tokens: int) -> Shape:
    """Return the shape of six of the blocks that an 8B model has."""
    return Shape(
        layers=6,
        width=4096,
        heads=32,
        key_heads=8,
        hidden=14336,
        vocabulary=32000,
        tokens=tokens,
    )


SHAPES = {
    "1b_4k": about_1b(4096),
    "1b_8k": about_1b(8192),
    "8b_8k": blocks_of_8b(8192),
    "8b_32k": blocks_of_8b(32768),
    "hf_1b_4k": about_1b(4096, "transformers"),
    # Llama 2 7B and Qwen 2.5 32B, whose adapters are trained.
    "7b_lora": Shape(
        layers=32,
        width=4096,
        heads=32,
        key_heads=32,
        hidden=11008,
        vocabulary=32000,
        tokens=4096,
        rank=16,
    ),
    "32b_lora": Shape(
        layers=64,
        width=5120,
        heads=40,
        key_heads=8,
        hidden=27648,
        vocabulary=152064,
        tokens=4096,
        rank=16,
    ),
    # For dry runs and tests.
    "tiny": Shape(
        layers=4, width=128, heads=4, key_heads=2, hidden=512, vocabulary=512, tokens=512
    ),
    "hf_tiny": Shape(
        layers=4,
        width=128,
        heads=4,
        key_heads=2,
        hidden=512,
        vocabulary=512,
        tokens=512,
        library="transformers",
    ),
}


class Positions(nn.Module):
    """Rotary position embeddings."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        frequencies = 1 / 500_000 ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(tokens).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    cosine: torch.Tensor
    sine: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cosine + turned * self.sine


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a product of narrow ones that is trained (LoRA)."""

    SCALE = 2.0

    def __init__(self, width: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out, bias=False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x)) * self.SCALE
        return result


def make_linear(shape: Shape, width: int, out: int) -> nn.Module:
    """Return a linear layer of a block, as it is trained."""
    if shape.rank:
        return Adapted(width, out, shape.rank)
    return nn.Linear(width, out, bias=False)


def freeze(model: nn.Module) -> None:
    """Let nothing be trained but adapters."""
    model.requires_grad_(requires_grad=False)
    for module in model.modules():
        if isinstance(module, Adapted):
            module.down.requires_grad_(requires_grad=True)
            module.up.requires_grad_(requires_grad=True)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual path."""

    def __init__(self, shape: Shape, positions: Positions) -> None:
        super().__init__()
        self.shape = shape
        self.positions = positions
        head = shape.width // shape.heads
        narrow = shape.key_heads * head
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.query = make_linear(shape, shape.width, shape.width)
        self.key = make_linear(shape, shape.width, narrow)
        self.value = make_linear(shape, shape.width, narrow)
        self.out = make_linear(shape, shape.width, shape.width)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = make_linear(shape, shape.width, shape.hidden)
        self.up = make_linear(shape, shape.width, shape.hidden)
        self.down = make_linear(shape, shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        y: torch.Tensor = self.mlp_norm(x)
        y = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + y

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        head = width // self.shape.heads

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, tokens, -1, head).transpose(1, 2)

        query, key = self.positions(split(self.query(x))), self.positions(split(self.key(x)))
        y = functional.scaled_dot_product_attention(
            query,
            key,
            split(self.value(x)),
            is_causal=True,
            enable_gqa=self.shape.key_heads != self.shape.heads,
        )
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return result


class Llama(nn.Module):
    """The stack. `run_block` says how a block is run: as it is, or recomputed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        positions = Positions(shape.tokens, shape.width // shape.heads)
        self.blocks = nn.ModuleList(Block(shape, positions) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.run_block: RunBlock | None = None
        if shape.rank:
            freeze(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from those before it."""
        x = self.embedding(tokens)
        for block in cast("list[Block]", self.blocks):
            x = block(x) if self.run_block is None else self.run_block(block, x)
        logits = self.head(self.norm(x))[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build_model(shape: Shape, device: str) -> nn.Module:
    """Return the model in bf16 on the device, with the same weights every time."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = build_transformers(shape) if shape.library == "transformers" else Llama(shape)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.to(device=device, dtype=torch.bfloat16).train()


def build_transformers(shape: Shape) -> nn.Module:
    """Return `transformers.LlamaForCausalLM` of that shape, without a download.

    Raises:
        ImportError: the library is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # type: ignore[no-untyped-call]
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=shape.tokens,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def make_tokens(shape: Shape, step: int, device: str) -> torch.Tensor:
    """Return the tokens of a step, the same every time."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(shape.vocabulary, (1, shape.tokens), generator=generator)
    return tokens.to(device)
