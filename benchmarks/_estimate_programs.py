"""The programs of `estimate.py`: each trains one step on a batch of any size."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from examples.language_model import SIZES, LanguageModel, next_byte_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    Loss = Callable[[int], torch.Tensor]

VOCABULARY, TOKENS = 512, 128
ROWS, WIDTH = 64, 256  # of one sample of `Mlp`
MICROBATCHES = 3


class Program:
    """A model, its optimizer, and a step that takes the size of its batch."""

    batch = 8  # the larger size that `estimate` records; the smaller one is half of it

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def make(self) -> torch.nn.Module:
        raise NotImplementedError

    def loss(self, batch: int) -> torch.Tensor:
        raise NotImplementedError

    def step(self, batch: int) -> None:
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


class Demo(Program):
    """The demo's language model."""

    size = replace(SIZES["tiny"], layers=6, tokens=TOKENS)

    def make(self) -> torch.nn.Module:
        return LanguageModel(self.size)

    def loss(self, batch: int) -> torch.Tensor:
        assert isinstance(self.model, LanguageModel)
        return next_byte_loss(self.model, torch.randint(0, 256, (batch, self.size.tokens + 1)))


class Mlp(Program):
    """Linear layers of equal width."""

    def make(self) -> torch.nn.Module:
        linear, gelu = torch.nn.Linear, torch.nn.GELU
        return torch.nn.Sequential(
            *[torch.nn.Sequential(linear(WIDTH, WIDTH), gelu()) for _ in range(8)]
        )

    def loss(self, batch: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(batch, ROWS, WIDTH)).square().mean()
        return loss


class Accumulation(Mlp):
    """Several microbatches for each step of the optimizer."""

    def step(self, batch: int) -> None:
        for _ in range(MICROBATCHES):
            (self.loss(batch) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


class Cnn(Program):
    """Convolutions with batch norm; its first layers have the largest activations."""

    def make(self) -> torch.nn.Module:
        layers: list[torch.nn.Module] = []
        for inner, outer in ((3, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)):
            stride = 2 if inner not in {3, outer} else 1
            layers += [
                torch.nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False),
                torch.nn.BatchNorm2d(outer),
                torch.nn.ReLU(),
            ]
        return torch.nn.Sequential(
            *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
        )

    def loss(self, batch: int) -> torch.Tensor:
        labels = torch.randint(0, 10, (batch,))
        return torch.nn.functional.cross_entropy(self.model(torch.randn(batch, 3, 48, 48)), labels)


class Transformers(Program):
    """A small Llama of the package `transformers`, from a configuration."""

    def make(self) -> torch.nn.Module:
        transformers = importlib.import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
        )
        model: torch.nn.Module = transformers.LlamaForCausalLM(config)
        return model

    def loss(self, batch: int) -> torch.Tensor:
        tokens = torch.randint(0, VOCABULARY, (batch, TOKENS))
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


PROGRAMS: dict[str, type[Program]] = {
    "demo": Demo,
    "mlp": Mlp,
    "accumulation": Accumulation,
    "cnn": Cnn,
    "transformers": Transformers,
}
