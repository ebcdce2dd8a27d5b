"""Fine-tune a language model within a memory budget: all weights, LoRA or QLoRA.

    python finetune.py --tiny
    python finetune.py --model meta-llama/Llama-3.2-1B --budget 22GiB
    python finetune.py --model meta-llama/Llama-2-7b-hf --method lora --budget 22GiB
    python finetune.py --size 7b --method lora --estimate 4090

With a size instead of a model, the weights are random. The text is random, too: put yours into
`make_batch`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from common import Training, choose_optimizer, main, make_parser
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
)

# Shapes of Llama 3.2 1B and 3B, Llama 2 7B and 13B, and Qwen 2.5 32B.
SIZES: dict[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (64, 128, 2, 4, 2, 256),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "13b": (5120, 13824, 40, 40, 40, 32000),
    "32b": (5120, 27648, 64, 40, 8, 152064),
}
TIED = {"1b", "3b"}  # the embedding is the output layer, too
PART = 2048  # tokens whose logits exist at once: of all, they would take more than the model
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of rows without padding, in torch's fused kernel.

    Without a mask of padding, transformers makes one of all tokens by all tokens: for 128k tokens,
    16 GiB, and no fused kernel takes it.
    """
    y = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", attend)
AttentionMaskInterface.register("causal", lambda *_, **__: None)


def make_model(options: argparse.Namespace, device: torch.device) -> Any:
    """Return the model that is trained, in bfloat16 on the device."""
    if options.model:
        more: dict[str, Any] = {}
        if options.method == "qlora":
            from transformers import BitsAndBytesConfig

            more["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=torch.bfloat16,
            device_map={"": device},
            attn_implementation="causal",
            **more,
        )
    elif options.method == "qlora":
        raise SystemExit("--method qlora quantises trained weights: pass --model")
    else:
        width, hidden, layers, heads, key_heads, words = SIZES[options.size]
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            vocab_size=words,
            max_position_embeddings=options.tokens,
            tie_word_embeddings=options.size in TIED,
        )
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="causal"
            )
    model.config.use_cache = False
    if options.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def make_batch(options: argparse.Namespace, words: int, device: torch.device) -> torch.Tensor:
    """Return token numbers, one row for each sample."""
    return torch.randint(words, (options.rows, options.tokens), device=device)


def without_adapters(model: Any) -> Any:
    """Return the causal model below LoRA, whose layers have the adapters inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each token from those before it, part by part."""
    whole = without_adapters(model)
    states = whole.model(ids[:, :-1]).last_hidden_state.flatten(0, 1)
    parts = zip(states.split(PART), ids[:, 1:].flatten().split(PART), strict=True)
    losses = [
        functional.cross_entropy(whole.lm_head(each).float(), right, reduction="sum")
        for each, right in parts
    ]
    return torch.stack(losses).sum() / states.size(0)


def make_training(options: argparse.Namespace, device: torch.device) -> Training:
    """Return the training for the options of the command line."""
    if options.tiny:
        options.tokens = 64
    model = make_model(options, device).train()
    if options.compile:
        without_adapters(model).model.compile()  # what the loss calls
    optimizer = choose_optimizer(model, device, rate=1e-4)
    ids = make_batch(options, model.config.vocab_size, device)
    return Training(model, optimizer, partial(find_loss, model, ids))


def make_parser_of_model(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options of the model and its batches."""
    parser = make_parser(text, list(SIZES), rows=1)
    parser.add_argument("--model", help="the name or folder of trained weights, for transformers")
    parser.add_argument("--method", choices=["full", "lora", "qlora"], default="full")
    parser.add_argument("--tokens", type=int, default=4096, help="of each sample")
    parser.add_argument("--compile", action="store_true")
    return parser


def make_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    return make_parser_of_model(str(__doc__)).parse_args(arguments)


if __name__ == "__main__":
    main(make_options(), make_training)
