"""Training whose every result is compared: on the CPU, on the device, and there under swapkit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.language_model import LanguageModel, ModelSize
from tests.simulated.small_models import LENGTH, WIDTH

VOCABULARY = 128
TOKENS = 64
STEPS = 3
SIZE = ModelSize(dim=64, layers=4, heads=4, hidden=176, tokens=TOKENS, batch=4, steps=STEPS)


def demo() -> nn.Module:
    """Return the demo's model."""
    return LanguageModel(SIZE)


def llama() -> nn.Module:
    """Return a small Llama of `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        attn_implementation="eager",
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


class Convolutional(nn.Module):
    """Convolutions with what has a state beside parameters: batch norm and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8),
                          nn.GELU(), nn.Dropout(0.1))
            for i in range(4)
        )  # fmt: skip
        self.head = nn.Linear(8 * WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :LENGTH]).unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(2).flatten(1))
        return logits


BATCHES = {"demo": 4, "llama": 8, "convolutional": 64}
MODELS = {"demo": demo, "llama": llama, "convolutional": Convolutional}
LAYERS = {"demo": r"blocks\.\d+", "llama": r"model\.layers\.\d+", "convolutional": r"layers\.\d+"}
# Whose results do not depend on the device's random numbers.
COMPARABLE = ("demo", "llama")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that a program can see after training."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    found = model(windows[:, :-1])
    logits = found if isinstance(found, torch.Tensor) else found.logits
    target = windows[:, 1:] if logits.dim() == 3 else windows[:, 0]
    return functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


def train(name: str, device: str, way: Any = None, *, steps: int = STEPS) -> State:
    """Train a model from a fixed seed.

    Args:
        name: of the model.
        device: where.
        way: makes the context of all steps, of the model and the optimizer; None: none.
        steps: how many.
    """
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(1)
    losses = []
    gradients: dict[str, torch.Tensor] = {}
    context = contextlib.nullcontext() if way is None else way(model, optimizer)
    with sdpa_kernel(SDPBackend.MATH), context:
        for step in range(steps):
            windows = torch.randint(0, VOCABULARY, (BATCHES[name], TOKENS + 1), generator=numbers)
            loss = loss_of(model, windows.to(device))
            loss.backward()
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradients[f"gradient {step} {key}"] = parameter.grad.cpu()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return State(losses=losses, tensors={**gradients, **_state(model, optimizer, device)})


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> dict[str, torch.Tensor]:
    tensors = {f"parameter {key}": value.detach().cpu() for key, value in model.named_parameters()}
    tensors |= {f"buffer {key}": value.cpu() for key, value in model.named_buffers()}
    for number, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"state {number} {key}": value.cpu() for key, value in slots.items()}
    tensors["random cpu"] = torch.get_rng_state()
    if device != "cpu":
        tensors["random device"] = getattr(torch, device).get_rng_state()
    return tensors


def assert_equal(found: State, expected: State) -> None:
    """Check that two trainings gave the same bits."""
    assert found.losses == expected.losses
    assert found.tensors.keys() == expected.tensors.keys()
    wrong = [
        key for key, value in found.tensors.items() if not torch.equal(value, expected.tensors[key])
    ]
    assert not wrong


def largest_difference(found: State, expected: State) -> float:
    """Return how far the losses and parameters of two trainings are apart."""
    pairs = [(torch.tensor(found.losses), torch.tensor(expected.losses))]
    pairs += [
        (value, expected.tensors[key])
        for key, value in found.tensors.items()
        if key.startswith("parameter")
    ]
    return max((one - other).abs().max().item() for one, other in pairs)
