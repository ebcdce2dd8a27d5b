"""`configure` finds the layers and parts of other models, and changes no bit of what they learn."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from tests.integration.configured import (
    HEADS,
    HIDDEN,
    INNER,
    TOKENS,
    VOCABULARY,
    assert_same_training,
    count_calls,
    count_recomputed,
    train,
    watch_sent,
)

if TYPE_CHECKING:
    from collections.abc import Callable

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "use_cache": False,
}


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    head = {"Bert": "ForMaskedLM", "T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}
    return getattr(transformers, name + head.get(name, "ForCausalLM"))(config).train()


def make_gpt2() -> Any:
    return build("GPT2", n_embd=HIDDEN, n_layer=2, n_head=HEADS, n_positions=64,
                 attn_pdrop=0.0)  # fmt: skip


def make_opt() -> Any:
    return build("OPT", ffn_dim=INNER, word_embed_proj_dim=HIDDEN)


def make_t5() -> Any:
    return build("T5", d_model=HIDDEN, d_kv=8, d_ff=INNER, num_layers=2, num_heads=HEADS,
                 decoder_start_token_id=0)  # fmt: skip


def make_qwen2_moe() -> Any:
    return build("Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=INNER,
                 shared_expert_intermediate_size=INNER, num_key_value_heads=2)  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: build("Qwen2", num_key_value_heads=2),
    "gpt2": make_gpt2,
    "mixtral": lambda: build("Mixtral", num_local_experts=4, num_key_value_heads=2),
    "qwen2_moe": make_qwen2_moe,
    "opt": make_opt,
    "bert": lambda: build("Bert", attention_probs_dropout_prob=0.0),
    "t5": make_t5,
}
LAYERS = {
    "qwen2": ["model.layers.0", "model.layers.1"],
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "qwen2_moe": ["model.layers.0", "model.layers.1"],
    "opt": ["model.decoder.layers.0", "model.decoder.layers.1"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
}
# By pattern: what it names in the last layer of a model; "": nothing, of which it is warned.
GATED = {
    "attention": "self_attn",
    r"attention\.wq": "self_attn.q_proj",
    r"attention\.wo": "self_attn.o_proj",
    r"attention\.flash_attention": "self_attn.flash_attention",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
PARTS: dict[str, dict[str, str]] = {
    "qwen2": {
        **GATED,
        "feed_forward": "mlp",
        r"feed_forward\.w[123]": "mlp.gate_proj mlp.up_proj mlp.down_proj",
        r"feed_forward\.mul": "mlp.mul",
        r"feed_forward\.w1\.activation\.silu": "mlp.act_fn.silu",
        r".*_norm\.norm": "input_layernorm.norm post_attention_layernorm.norm",
    },
    "gpt2": {
        "attention": "attn",
        r"attention\.wo": "attn.c_proj",
        r"attention\.flash_attention": "attn.flash_attention",
        "feed_forward": "mlp",
        r"feed_forward\.w1": "mlp.c_fc",
        r"feed_forward\.w1\.matmul": "mlp.c_fc.matmul",
        r"feed_forward\.w2": "mlp.c_proj",
        r"feed_forward\.w3": "",
        r"feed_forward\.mul": "",
        "attention_norm": "ln_1",
        "ffn_norm": "ln_2",
    },
    "mixtral": {
        **GATED,
        "feed_forward": "block_sparse_moe",
        r"feed_forward\.experts\.[02]\.w1": (
            "block_sparse_moe.experts.0.w1 block_sparse_moe.experts.2.w1"
        ),
    },
    "qwen2_moe": {
        **GATED,
        "feed_forward": "mlp",
        r"feed_forward\.shared_expert\.mul": "mlp.shared_expert.mul",
    },
    "opt": {
        "attention": "self_attn",
        r"attention\.flash_attention": "self_attn.flash_attention",
        "feed_forward": "activation_fn fc1 fc2",
        r"feed_forward\.w[12]": "fc1 fc2",
        r"feed_forward\.w1\.activation\.relu": "activation_fn.relu",
        "attention_norm": "self_attn_layer_norm",
        "ffn_norm": "final_layer_norm",
    },
    "bert": {
        "attention": "attention",
        r"attention\.wq": "attention.self.query",
        r"attention\.flash_attention": "attention.self.flash_attention",
        "feed_forward": "intermediate output",
        r"feed_forward\.w1": "intermediate.dense",
        r"feed_forward\.w1\.activation\.gelu": "intermediate.intermediate_act_fn.gelu",
        "attention_norm": "attention.output.LayerNorm",
        "ffn_norm": "output.LayerNorm",
    },
    "t5": {
        "attention": "layer.0.SelfAttention",
        r"attention\.softmax": "layer.0.SelfAttention.softmax",
        "cross_attention": "layer.1.EncDecAttention",
        "feed_forward": "layer.2.DenseReluDense",
        r"feed_forward\.w1": "layer.2.DenseReluDense.wi",
        "attention_norm": "layer.0.layer_norm",
        "ffn_norm": "layer.2.layer_norm",
    },
}


@functools.cache
def train_plainly(name: str) -> Any:
    return train(MODELS[name]())


def index(swaps: dict[str, Any], recompute: dict[str, Any] | None = None) -> dict[str, Any]:
    entries = [
        {"op_name": name, "backward_prefetch": 3, "layers": layers}
        for name, layers in swaps.items()
    ]
    document: dict[str, Any] = {"swap_config": {"swap": True, "op_swap": entries}}
    return {**document, "recompute_config": {"select_recompute": recompute or False}}


# ---- layers and names ---------------------------------------------------------------------------


@pytest.mark.promise("B16")
@pytest.mark.parametrize("name", MODELS)
def test_layers_when_a_common_model_then_found_in_order(name: str) -> None:
    model = MODELS[name]()
    for number, path in enumerate(LAYERS[name]):
        swapkit.configure(model, index({".*norm.*|attention|layer": [number]}))
        assert all(row.where.startswith(f"{path}.") for row in swapkit.choices(model))
        assert len(swapkit.choices(model)) > 0


@pytest.mark.promise("B16")
@pytest.mark.parametrize(
    ("name", "pattern"), [(name, pattern) for name, parts in PARTS.items() for pattern in parts]
)
def test_pattern_when_usual_then_the_part_that_it_means(name: str, pattern: str) -> None:
    model, last = MODELS[name](), len(LAYERS[name]) - 1
    configuration = swapkit.configure(model, index({pattern: [last]}))
    expected = {f"{LAYERS[name][last]}.{path}" for path in PARTS[name][pattern].split()}
    assert {row.where for row in swapkit.choices(model)} == expected
    assert configuration.unmatched == ([] if expected else [pattern])


@pytest.mark.promise("B16")
@pytest.mark.promise("B17")
@pytest.mark.parametrize("name", MODELS)
def test_model_when_configured_then_trains_to_the_same_bits(name: str) -> None:
    attention = r".*\.flash_attention" if name != "t5" else r"attention\.softmax"
    for document in (
        {"recompute_config": {"recompute": True}},
        index({"attention": True, "feed_forward": True}),
        index({attention: True}, {"feed_forward": [0]}),
        index({"feed_forward": [1]}, {attention: True, r".*norm.*\.norm": [0]}),
    ):
        model = MODELS[name]()
        swapkit.configure(model, document)
        with watch_sent() as sent, count_recomputed() as recomputed:
            assert_same_training(train(model), train_plainly(name))
        swaps = document.get("swap_config", {}).get("swap", False)
        assert bool(sent) == swaps
        assert bool(recomputed[0]) == bool(
            not swaps or document["recompute_config"]["select_recompute"]
        )
        never = [row.where for row in swapkit.choices(model) if row.operators == 0]
        assert never == []


@pytest.mark.promise("B2")
@pytest.mark.parametrize("name", ["qwen2", "mixtral", "gpt2"])
def test_product_when_recomputed_then_again_in_backward(name: str) -> None:
    first = r"feed_forward\.experts\..*\.w1" if name == "mixtral" else r"feed_forward\.w1"
    model = MODELS[name]()
    swapkit.configure(model, {"recompute_config": {"select_recompute": [rf"{first}\.matmul"]}})
    with count_recomputed() as recomputed:
        assert_same_training(train(model), train_plainly(name))
    ran = sum(row.operators or 0 for row in swapkit.choices(model))
    assert recomputed == [ran]
    assert ran > 0


# ---- a user's own model -------------------------------------------------------------------------


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.outside = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.attend(x))  # type: ignore[no-any-return]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inside(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.w2 = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.feed_forward = Mixer(), FeedForward()
        self.first, self.ffn_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.first(x))
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """A pipeline stage with some of a model's layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({str(index): Block() for index in range(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk.values():
            x = block(x)
        return x.square().mean()


def make_stage() -> Stage:
    torch.manual_seed(0)
    return Stage()


def stage_loss(model: Any, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    loss: torch.Tensor = model(torch.randn(*TOKENS, HIDDEN))
    return loss


@pytest.mark.promise("B2")
@pytest.mark.promise("B16")
def test_own_model_when_layers_names_and_ids_are_given_then_meant() -> None:
    expected = train(make_stage(), loss_of=stage_loss)
    model = make_stage()
    document = {
        "recompute_config": {
            "recompute": [5],
            "select_recompute": {"feed_forward": [6], r"attention\.flash_attention": [6]},
        },
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": "attention", "backward_prefetch": 2, "layers": [5, 6]}],
        },
    }
    swapkit.configure(
        model,
        document,
        num_layers=8,
        layers=r"trunk\.\d",
        layer_ids=[5, 6],
        names={"attention": "mixer", "attention_norm": "first"},
    )
    rows = {(row.where, row.what.split()[0], row.holds) for row in swapkit.choices(model)}
    assert rows == {
        ("trunk.0", "recompute", True),
        ("trunk.0.mixer", "swap", False),
        ("trunk.1.feed_forward", "recompute", True),
        ("trunk.1.mixer.flash_attention", "recompute", True),
        ("trunk.1.mixer", "swap", True),
    }
    with watch_sent() as sent, count_calls(model) as calls:
        assert_same_training(train(model, loss_of=stage_loss), expected)
    assert {one.name.split(".mixer")[0] for one in sent} == {"trunk.1"}
    assert calls["trunk.0.mixer"] == calls["trunk.1.feed_forward.w1"] == 2 * 2
    assert calls["trunk.1.mixer"] == 2


@pytest.mark.promise("B2")
def test_own_model_when_its_activation_is_a_function_then_the_default_names_it() -> None:
    model = make_stage()
    configuration = swapkit.configure(
        model, {"recompute_config": {"select_recompute": True}}, layers=r"trunk\.\d"
    )
    assert configuration.unmatched == []
    with count_recomputed() as recomputed:
        train(model, loss_of=stage_loss)
    assert recomputed == [2 * 2 * 2]


@pytest.mark.promise("B2")
def test_own_model_when_an_operator_has_a_name_of_the_users_then_meant() -> None:
    model = make_stage()
    names = {"attention": "mixer", "attention.core": "mixer.scaled_dot_product_attention"}
    swapkit.configure(model, index({r"attention\.core": [1]}), layers=r"trunk\.\d", names=names)
    train(model, loss_of=stage_loss)
    (row,) = swapkit.choices(model)
    assert (row.where, row.operators) == ("trunk.1.mixer.core", 2)
