"""Models whose training on the simulated device must equal that on the CPU, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 100
WIDTH = 32
HEADS = 4
LENGTH = 16


class Trained(NamedTuple):
    losses: list[float]
    weights: list[Tensor]


class Norm(nn.Module):
    """A root mean square norm of plain operators; torch's own has a kernel only GPUs have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return hidden * scale.to(hidden.dtype) * self.weight


def _rotate(heads: Tensor) -> Tensor:
    length, width = heads.shape[-2:]
    place = torch.arange(length, device=heads.device, dtype=torch.float32)
    step = torch.arange(0, width, 2, device=heads.device).float() / width
    angle = torch.outer(place, 10000.0**-step).repeat(1, 2)
    first, second = heads.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return heads * angle.cos().to(heads.dtype) + turned * angle.sin().to(heads.dtype)


class Layer(nn.Module):
    """Attention and a gated network, as Llama has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList((Norm(), Norm()))
        self.query = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.query(self.norms[0](hidden)).chunk(3, -1)
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        with sdpa_kernel(SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(
                _rotate(query), _rotate(key), value, is_causal=True
            )
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        inner = self.norms[1](hidden)
        added: Tensor = self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return hidden + added


def llama() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(Layer() for _ in range(3)),
        Norm(),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, VOCABULARY),
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Unflatten(0, (-1, 1)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(1, 3),
        nn.Linear(4 * LENGTH * WIDTH, VOCABULARY),
    )


class Logits(nn.Module):
    """A model of transformers as one that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def transformers_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        attn_implementation="eager",
    )
    return Logits(LlamaForCausalLM(config))


def train(
    build: Callable[[], nn.Module],
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    steps: int = 3,
) -> Trained:
    """Train a few steps from a fixed seed; `variant` names AdamW's way to compute.

    By default that is torch's choice for the device; "single" goes tensor by tensor.
    """
    torch.manual_seed(0)
    model = build().to(device, dtype)
    numbers = torch.Generator().manual_seed(1)
    losses = []
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,
        foreach={"foreach": True, "single": False}.get(variant or ""),
        fused=variant == "fused" or None,
    )
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=numbers).to(device)
        logits = model(tokens[:, :-1]).float()
        target = tokens[:, 1:] if logits.dim() == 3 else tokens[:, 0]
        loss = functional.cross_entropy(logits.flatten(0, -2), target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [weight.detach().cpu() for weight in model.parameters()])
