"""Models of `transformers` that fill a cache of keys and values while they train, recomputed."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

import swapkit
from swapkit._runtime.recompute.arguments import find_caches

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

TOKENS = torch.arange(24).view(2, 12)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    assert config.use_cache  # as transformers has it
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM) -> list[torch.Tensor]:
    """Return the loss, the gradients and what is in the cache afterwards."""
    model.zero_grad()
    out: CausalLMOutputWithPast = model(TOKENS, labels=TOKENS)
    assert out.loss is not None
    out.loss.backward()
    cache: Any = out.past_key_values
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    grads = [parameter.grad for parameter in model.parameters()]
    return [each.detach().clone() for each in (out.loss, *grads, *states) if each is not None]


@pytest.mark.parametrize("pattern", [r"model\.layers\.\d+", r"model\.layers\.\d+\.self_attn"])
@pytest.mark.parametrize("options", [{}, {"save": ["mm"]}, {"check_values": True}])
def test_layers_when_recomputed_then_the_cache_is_filled_once(
    pattern: str, options: dict[str, Any]
) -> None:
    expected = train(make_model())
    model = swapkit.checkpoint(make_model(), pattern, **options)
    for _ in range(2):
        found = train(model)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_layers_when_configured_then_the_cache_is_filled_once() -> None:
    expected = train(make_model())
    model = make_model()
    swapkit.configure(model, {"recompute_config": {"recompute": True}})
    assert all(map(torch.equal, train(model), expected))


def test_states_when_a_region_ended_then_only_what_it_changed_is_kept() -> None:
    cache: Any = DynamicCache()
    for layer in range(2):
        cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), layer)
    states = find_caches((1, cache), {"x": 2})
    assert states is not None
    former = [weakref.ref(layer.keys) for layer in cache.layers]
    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 1)
    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 2)
    states.end()
    args, kwargs = states.replace((1, cache), {"x": 2})
    assert (args[0], kwargs) == (1, {"x": 2})
    assert [layer.keys.shape[-2] for layer in args[1].layers] == [2, 2]
    assert [layer.keys.shape[-2] for layer in cache.layers] == [2, 5, 3]
    del args
    cache.layers[0].keys = None
    gc.collect()
    assert [reference() is None for reference in former] == [True, False]


def test_call_when_it_has_no_cache_then_nothing_is_looked_after() -> None:
    assert find_caches((1, "a"), {"x": torch.ones(1)}) is None
