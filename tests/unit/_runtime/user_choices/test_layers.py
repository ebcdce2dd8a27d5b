"""The layers of a model are found, and their parts have the names that a configuration uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swapkit._runtime.user_choices.layers import ModulePart, find_layers, name_layers
from swapkit.config.mindformers.patterns import find
from swapkit.errors import InvalidArgument


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 8), nn.Linear(4, 8)
        self.down_proj, self.act_fn = nn.Linear(8, 4), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)  # type: ignore[no-any-return]


class Core(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.ln_1 = Attention(), Gated(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.self_attn(self.ln_1(x)))  # type: ignore[no-any-return]


class Separate(nn.Module):
    """A layer whose feed forward is no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.fc1, self.fc2 = Attention(), nn.Linear(4, 8), nn.Linear(8, 4)
        self.activation_fn = nn.ReLU()


class Shares(nn.Module):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4))
        self.second = nn.Sequential(self.first[0])


def model_of(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def layers(count: int, kind: Any = Layer) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = layers(8, Gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


FOUND: dict[str, tuple[nn.Module, list[str]]] = {
    "one layer": (model_of(layers=layers(1)), ["layers.0"]),
    "experts inside of layers": (model_of(h=layers(2, Expert)), ["h.0", "h.1"]),
    "two stacks": (
        model_of(encoder=model_of(block=layers(1)), decoder=model_of(block=layers(2))),
        ["encoder.block.0", "decoder.block.0", "decoder.block.1"],
    ),
    "other lists of other files": (
        model_of(blocks=layers(2), towers=layers(1, lambda: nn.TransformerEncoderLayer(4, 2, 8))),
        ["blocks.0", "blocks.1"],
    ),
    "a backbone and a head": (
        nn.Sequential(Backbone(), nn.Sequential(nn.Linear(4, 4))),
        ["0.layers.0", "0.layers.1"],
    ),
    "a list in a sequence": (nn.Sequential(layers(1)), ["0.0"]),
    "stages of blocks": (nn.Sequential(*(nn.Sequential(Layer(), Layer(), Layer()) for _ in "ab")),
                         ["0", "1"]),
    "a dict": (model_of(h=nn.ModuleDict({"a": Layer(), "b": Layer()})), ["h.a", "h.b"]),
}  # fmt: skip


@pytest.mark.promise("B16")
@pytest.mark.parametrize("name", FOUND)
def test_layers_when_a_model_has_lists_then_those_of_the_largest(name: str) -> None:
    model, paths = FOUND[name]
    assert list(find_layers(model)) == paths


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)])]
)
def test_layers_when_there_is_no_list_then_told_to_say_where(model: nn.Module) -> None:
    with pytest.raises(InvalidArgument, match=r"no list of layers .* pass their paths as lay"):
        find_layers(model)


def name(layer: nn.Module, **names: str) -> ModulePart:
    (part,) = name_layers([layer], names)
    return part


def meant(part: ModulePart, pattern: str) -> list[str]:
    return [str(match) for match in find(pattern, part)]


@pytest.mark.promise("B2")
@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("attention", ["attention"]),
        ("self_attn", ["self_attn"]),
        ("attention|self_attn", ["attention"]),  # each part once
        (r"attention\.flash_attention", ["attention.flash_attention"]),
        (r"attention\.core\.flash_attention", ["attention.core.flash_attention"]),
        (r"feed_forward\.w[123]", ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]),
        (r"feed_forward\.mul", ["feed_forward.mul"]),
        (r"feed_forward\.w1\.activation\.silu", ["feed_forward.w1.activation.silu"]),
        (r"feed_forward\.w1\.matmul", ["feed_forward.w1.matmul"]),
        (r".*\.norm", ["attention_norm.norm"]),
        ("add", ["add"]),
        (r"feed_forward.mul", []),  # a bare dot separates nothing
        ("w1", []),
    ],
)
def test_pattern_when_a_common_layer_then_by_the_usual_names(
    pattern: str, matches: list[str]
) -> None:
    assert meant(name(Layer()), pattern) == matches


def test_attention_when_its_operator_is_deeper_then_that_module_runs_it() -> None:
    layer = Layer()
    found = name(layer).find("attention")
    assert found is not None
    assert found.modules == (layer.self_attn,)
    assert found.operator("flash_attention").module is layer.self_attn.core


def test_feed_forward_when_it_is_no_module_then_all_its_modules_together() -> None:
    layer = Separate()
    part = name(layer)
    found = {
        path: part.find(f"feed_forward{path}") for path in ("", ".w1", ".w2", ".w1.activation")
    }
    modules = {path: one.modules for path, one in found.items() if one is not None}
    assert modules == {
        "": (layer.fc1, layer.activation_fn, layer.fc2),
        ".w1": (layer.fc1,),
        ".w2": (layer.fc2,),
        ".w1.activation": (layer.activation_fn,),
    }


def test_part_when_used_in_two_places_then_one() -> None:
    part = name(Shares())
    assert part.find("first.0") is part.find("second.0")
    assert meant(part, r"first\.0|second\.0") == []
    assert len(meant(part, r".*\.0")) == 1


# ---- names of the user's ------------------------------------------------------------------------


@pytest.mark.promise("B16")
def test_names_when_given_then_they_hold_against_the_usual_ones() -> None:
    layer = Layer()
    part = name(layer, attention="mlp", **{"attention.first": "mlp.gate_proj"})
    found = part.find("attention.first")
    assert found is not None
    assert found.modules == (layer.mlp.gate_proj,)


def test_names_when_they_build_upon_the_usual_ones_then_known() -> None:
    part = name(Layer(), **{"attention.kernel": "self_attn.core.scaled_dot_product_attention"})
    found = part.find("attention")
    assert found is not None
    assert found.operator("kernel").pattern == "scaled_dot_product_attention"


def test_names_when_only_some_layers_have_the_part_then_named_there() -> None:
    parts = name_layers([Layer(), Separate()], {"attention": "mixer"})
    assert [part.find("attention") is part.find("mixer") for part in parts] == [False, True]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            {"attention": "nothing"},
            r"names\['attention'\]: a layer has no part 'nothing'; its parts",
        ),
        ({"attention": "mlp.gone.x"}, "a layer has no part 'mlp.gone.x'"),
        ({"gone.x": "mlp"}, r"names\['gone.x'\]: a layer has no part 'gone'; name it first"),
        ({"mlp": "self_attn"}, "a part with this name already exists"),
        ({"mlp.mul": "mlp.silu"}, "an operator with this name already exists"),
    ],
)
def test_names_when_wrong_then_named(names: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        name_layers([Layer(), Layer()], names)
