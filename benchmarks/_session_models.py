"""The models for session benchmarks: the demo's, and small ones of `transformers`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from examples.language_model import SIZES, LanguageModel, next_byte_loss

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 1024
WIDTH, LAYERS, HEADS = 192, 6, 4
BATCH, TOKENS = 6, 256


@dataclass(frozen=True)
class Job:
    """A model and its batch. `loss` runs forward."""

    make: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module], torch.Tensor]


class Training:
    """The training of a job."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.model = job.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._loss = job.loss

    def step(self) -> float:
        """Train one step, always on the same batch; return the loss."""
        torch.manual_seed(0)
        loss = self._loss(self.model)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def _demo() -> Job:
    size = SIZES["compact"]
    windows = torch.randint(0, 256, (size.batch, size.tokens + 1))

    def loss(model: torch.nn.Module) -> torch.Tensor:
        assert isinstance(model, LanguageModel)
        return next_byte_loss(model, windows)

    return Job(lambda: LanguageModel(size), loss)


def _text(make: Callable[[], torch.nn.Module]) -> Job:
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))

    def loss(model: torch.nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return Job(make, loss)


def _llama() -> torch.nn.Module:
    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
            max_position_embeddings=TOKENS, **sizes,
        )
    )  # fmt: skip


def _gpt2() -> torch.nn.Module:
    transformers: Any = importlib.import_module("transformers")
    return transformers.GPT2LMHeadModel(  # type: ignore[no-any-return]
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        )
    )  # fmt: skip


def _bert() -> torch.nn.Module:
    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return transformers.BertForMaskedLM(  # type: ignore[no-any-return]
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
            max_position_embeddings=TOKENS, **sizes,
        )
    )  # fmt: skip


JOBS: dict[str, Callable[[], Job]] = {
    "demo": _demo,
    "llama": lambda: _text(_llama),
    "gpt2": lambda: _text(_gpt2),
    "bert": lambda: _text(_bert),
}
