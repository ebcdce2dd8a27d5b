"""The models of `compiled.py`: each with its blocks, compiled in one of several ways."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS, HEADS = 128, 6, 4
BATCH, TOKENS = 4, 256
CHANNELS, IMAGE = 32, 32
EXPERTS = 4
VOCABULARY = 512
KINDS = ("whole", "blocks", "break")  # break: a graph break in the middle


class Block(nn.Module):
    """Attention and a feed-forward layer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = self.make_feed()

    def make_feed(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: torch.Tensor = self.feed(self.second_norm(x))
        return x + fed


class Experts(nn.Module):
    """The two best of several feed-forward layers for each token, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, which = self.gate(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (best * (which == index)).sum(-1, keepdim=True)
            result = result + expert(x) * share
        return result


class ExpertBlock(Block):
    """A block whose feed-forward layer is a mixture of experts."""

    def make_feed(self) -> nn.Module:
        return Experts()


class ConvBlock(nn.Module):
    """Two convolutions with batch norm, and what goes around them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Stack(nn.Module):
    """Blocks between a first and a last layer."""

    def __init__(self, first: nn.Module, make: Callable[[], nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(make() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


def _of_tokens(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.ModuleList, torch.Tensor]:
    model = Stack(nn.Embedding(VOCABULARY, WIDTH), make, nn.Linear(WIDTH, VOCABULARY))
    return model, model.blocks, torch.randint(0, VOCABULARY, (BATCH, TOKENS))


def _of_images() -> tuple[nn.Module, nn.ModuleList, torch.Tensor]:
    model: nn.Module = Stack(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        ConvBlock,
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)),
    )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    blocks: Any = model.blocks
    images = torch.randn(8, 3, IMAGE, IMAGE).to(memory_format=torch.channels_last)
    return model, blocks, images


def _gpt2() -> tuple[nn.Module, nn.ModuleList, torch.Tensor]:
    transformers: Any = importlib.import_module("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip
    return model, model.transformer.h, torch.randint(0, VOCABULARY, (BATCH, TOKENS))


MODELS: dict[str, Callable[[], tuple[nn.Module, nn.ModuleList, torch.Tensor]]] = {
    "transformer": lambda: _of_tokens(Block),
    "conv": _of_images,
    "experts": lambda: _of_tokens(ExpertBlock),
    "gpt2": _gpt2,
}


@dataclass
class Training:
    """A model, compiled or not, and its batch; `restart` goes back to the first step."""

    model: nn.Module
    batch: torch.Tensor

    def __post_init__(self) -> None:
        self._begin = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.restart()

    def restart(self) -> None:
        self.model.load_state_dict(self._begin)
        self.model.zero_grad()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.steps = 0

    def step(self) -> None:
        """Train one step, always on the same batch."""
        torch.manual_seed(self.steps)
        self.steps += 1
        found = self.model(self.batch)
        result: torch.Tensor = getattr(found, "logits", found)
        result.square().mean().backward()  # type: ignore[no-untyped-call]
        del found, result
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Return a digest of all that a step changes."""
        states = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        found = hashlib.sha256()
        for each in (*self.model.state_dict().values(), *states, torch.get_rng_state()):
            found.update(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()[:16]


def make_training(name: str, kind: str, backend: str) -> Training:
    """Make a model from its seed, compiled as `kind` says; eager without a backend."""
    torch.manual_seed(0)
    model, blocks, batch = MODELS[name]()
    if kind == "break":
        blocks[len(blocks) // 2].register_forward_pre_hook(_break)
    if backend:
        for module in blocks if kind == "blocks" else [model]:
            module.compile(backend=backend)
    return Training(model, batch)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _break(_module: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """Run outside of any graph."""
