"""Models five times the budget train as without one: adapters, teachers, experts, references."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from tests.integrations.support import QUIET, needs
from tests.support.sessions import digest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [needs("transformers", "peft"), QUIET, pytest.mark.usefixtures("installation")]

STEPS = 3
VOCABULARY = 256


def make_model(kind: str, **options: Any) -> Any:
    """Return a language model of transformers; its embedding is one of the smaller weights."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344,
        "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**common, **options})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def adapt(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    return get_peft_model(model, LoraConfig(**options))


def checkpointed(*, use_reentrant: bool) -> Any:
    model = adapt(make_model("Llama", use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model


def last_layer() -> Any:
    model = make_model("Llama")
    return model.requires_grad_(False).model.layers[-1].requires_grad_(True) and model


class Distilled(nn.Module):
    """A student of a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_model("Llama").requires_grad_(False).eval()
        self.student = make_model(
            "Llama", num_hidden_layers=1, hidden_size=32, intermediate_size=64
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        with torch.no_grad():
            taught = self.teacher(input_ids=input_ids).logits.softmax(-1)
        learnt = self.student(input_ids=input_ids).logits.log_softmax(-1)
        return nn.functional.kl_div(learnt, taught, reduction="batchmean")


class Preferred(nn.Module):
    """A policy, and what it was before: another model, or itself without its adapters."""

    def __init__(self, *, is_apart: bool) -> None:
        super().__init__()
        layers = 8 if is_apart else 12
        self.policy = adapt(make_model("Llama", num_hidden_layers=layers))
        self.reference = (
            make_model("Llama", num_hidden_layers=8).requires_grad_(False).eval()
            if is_apart
            else None
        )

    @staticmethod
    def likelihood(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        chances = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        found: torch.Tensor = chances.gather(-1, tokens[:, 1:, None]).sum((1, 2))
        return found

    def compare(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        better, worse = (self.likelihood(model, each) for each in tokens.chunk(2))
        return better - worse

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        if self.reference is None:
            with torch.no_grad(), self.policy.disable_adapter():
                before = self.compare(self.policy, input_ids)
        else:
            with torch.inference_mode():
                before = self.compare(self.reference, input_ids)
        after = self.compare(self.policy, input_ids)
        return -nn.functional.logsigmoid(0.1 * (after - before.clone())).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: adapt(make_model("Llama")),
    "qwen2 tied": lambda: adapt(make_model("Qwen2", tie_word_embeddings=True)),
    "reentrant": lambda: checkpointed(use_reentrant=True),
    "checkpoint": lambda: checkpointed(use_reentrant=False),
    "mixtral": lambda: adapt(
        make_model("Mixtral", num_hidden_layers=6, intermediate_size=172, num_local_experts=4)
    ),
    "qwen2 experts": lambda: adapt(
        make_model(
            "Qwen2Moe", num_hidden_layers=6, moe_intermediate_size=64, num_experts=8,
            shared_expert_intermediate_size=128, num_experts_per_tok=2,
        )
    ),
    "teacher": Distilled,
    "reference": lambda: Preferred(is_apart=True),
    "adapters off": lambda: Preferred(is_apart=False),
    "last layer": last_layer,
}  # fmt: skip


@dataclass
class Loop:
    """How a program trains, and what it saw."""

    microbatches: int = 1
    is_half: bool = False
    evaluates: bool = False
    seen: list[str] = field(default_factory=list)

    def run(self, model: Any, optimizer: torch.optim.Optimizer) -> Loop:
        for step in range(STEPS):
            torch.manual_seed(step)
            for _ in range(self.microbatches):
                tokens = torch.randint(2, VOCABULARY, (2, 24))
                with torch.autocast("cpu", torch.bfloat16, enabled=self.is_half):
                    found = model(input_ids=tokens, labels=tokens)
                    loss = getattr(found, "loss", found)
                loss.backward()
                self.seen.append(digest([loss.detach()]))
                del found, loss
            grads = (each.grad for each in model.parameters() if each.grad is not None)
            self.seen.append(digest(list(grads)))
            optimizer.step()
            optimizer.zero_grad()
            if self.evaluates:
                self.evaluate(model, tokens)
        return self

    def evaluate(self, model: Any, tokens: torch.Tensor) -> None:
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                self.seen.append(digest([model(input_ids=tokens).logits.clone()]))
        again = model.generate(input_ids=tokens[:, :4], max_new_tokens=4, do_sample=False)
        self.seen.append(digest([again]))
        model.train()


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    trained = [each for each in model.parameters() if each.requires_grad]
    if name == "last layer":  # without states
        return model, torch.optim.SGD(trained, lr=1e-2)
    return model, torch.optim.AdamW(trained, lr=1e-3)


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [each for state in optimizer.state.values() for each in state.values()]
    return digest([each.detach() for each in (*model.parameters(), *states)])


@pytest.mark.parametrize(
    ("name", "policy", "options"),
    [
        *[("llama", policy, {}) for policy in ("auto", "swap", "rescue")],
        *[(name, "auto", {}) for name in MODELS if name != "llama"],
        ("llama", "rescue", {"microbatches": 3}),
        ("llama", "swap", {"evaluates": True}),
        ("qwen2 experts", "swap", {"is_half": True}),
        ("reentrant", "rescue", {"is_half": True}),
        ("checkpoint", "swap", {"is_half": True, "microbatches": 2}),
    ],
    ids=str,
)
def test_model_when_five_times_the_budget_then_it_trains_to_the_same_bits(
    name: str, policy: str, options: dict[str, Any]
) -> None:
    model, optimizer = make(name)
    expected = Loop(**options).run(model, optimizer), bits_of(model, optimizer)
    del model, optimizer
    gc.collect()
    before_bytes = swapkit.memory_stats()["allocated_bytes.all.current"]
    model, optimizer = make(name)
    nbytes = sum(each.nbytes for each in model.parameters())
    limit = before_bytes + nbytes // 5
    with swapkit.budget(limit, model, optimizer, policy=policy) as session:
        found = Loop(**options).run(model, optimizer)
        stats = session.stats
    assert (found, bits_of(model, optimizer)) == expected
    assert stats.peak_bytes <= limit
    assert stats.swapped_in_bytes > nbytes
