"""Small models of every common family, with random weights; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 128
TOKENS = (2, 24)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model to be trained.

    Attributes:
        name: as test ids show it.
        build: makes the model from a fixed seed.
        batch: makes the arguments of its forward, labels included.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]


def text() -> Batch:
    tokens = torch.randint(0, VOCABULARY, TOKENS)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_text() -> Batch:
    batch = text()
    mask = torch.ones(TOKENS, dtype=torch.int64)
    mask[0, -7:] = 0
    return {**batch, "attention_mask": mask}


def images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 24, 24), "labels": torch.tensor([0, 3])}


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def llama_with_checkpoints() -> torch.nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def llama_eager_attention() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, attn_implementation="eager", tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def qwen3() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=48, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**sizes))


def t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=24, patch_size=4, num_labels=4, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


def mixtral() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return MixtralForCausalLM(config)


def qwen2_moe() -> torch.nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=48, decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def mamba() -> torch.nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=48, state_size=8, num_hidden_layers=2, use_mambapy=False
    )
    return MambaForCausalLM(config)


def lora() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(llama(), config)


FAMILIES = (
    Family(name="llama", build=llama, batch=text),
    Family(name="llama_checkpointed", build=llama_with_checkpoints, batch=text),
    Family(name="llama_eager_tied_padded", build=llama_eager_attention, batch=padded_text),
    Family(name="qwen3", build=qwen3, batch=padded_text),
    Family(name="gpt2", build=gpt2, batch=text),
    Family(name="bert", build=bert, batch=padded_text),
    Family(name="t5", build=t5, batch=text),
    Family(name="vit", build=vit, batch=images),
    Family(name="mixtral_experts", build=mixtral, batch=text),
    Family(name="qwen2_experts", build=qwen2_moe, batch=text),
    Family(name="mamba", build=mamba, batch=text),
    Family(name="llama_lora", build=lora, batch=text),
)
