"""What flags come to: the limit on a device, and which parts of which layers are meant."""

from __future__ import annotations

import re

import pytest

from swapkit.config.settings import ROLES, LayerPart, Settings

GIB = 1 << 30


def test_limit_when_resolved_then_at_most_the_device() -> None:
    assert Settings().resolve_limit(8 * GIB) == 8 * GIB
    assert Settings(limit_bytes=4 * GIB).resolve_limit(8 * GIB) == 4 * GIB
    assert Settings(limit_bytes=9 * GIB).resolve_limit(8 * GIB) == 8 * GIB


def test_part_when_asked_about_a_layer_then_those_from_first_on() -> None:
    assert [LayerPart(action="swap", role="mlp").has_layer(i) for i in (0, 99)] == [True, True]
    some = LayerPart(action="swap", role="mlp", first=2, layers=3)
    assert [i for i in range(8) if some.has_layer(i)] == [2, 3, 4]
    staged = LayerPart(action="swap", role="mlp", layers=(2, 0))
    assert [[i for i in range(4) if staged.has_layer(i, stage=s)] for s in range(3)] == [
        [0, 1],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("role", "paths"),
    [
        ("self_attention", ["self_attention", "self_attn", "attn"]),
        ("input_norm", ["input_layernorm", "ln_1"]),
        ("post_attention_norm", ["post_attention_layernorm", "pre_mlp_layernorm", "ln_2"]),
        ("mlp", ["mlp", "feed_forward"]),
        ("activation_function", ["mlp.act_fn", "mlp.act", "mlp.experts.0.act_fn"]),
        ("core_attention", ["self_attention.core_attention"]),
        ("a.b", ["a.b"]),
    ],
)
def test_pattern_when_matched_then_modules_of_megatron_and_transformers(
    role: str, paths: list[str]
) -> None:
    pattern = re.compile(LayerPart(action="swap", role=role).pattern)
    assert all(pattern.fullmatch(path) for path in paths)
    assert not pattern.fullmatch("a_b")
    assert all(re.compile(each) for each in ROLES.values())
