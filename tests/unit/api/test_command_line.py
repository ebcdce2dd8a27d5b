"""Flags that are had: choices for the layers of a model, and a session with their limit."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument
from swapkit.ir.codec import write_planned
from tests.unit.ir.values import PLAN, TRACE
from tests.unit.scoped import copied

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.api.command_line import Arguments

SIDE = 32
attend = nn.functional.scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(attend(x[None], x[None], x[None])[0])
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(SIDE)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.LayerNorm(SIDE)
        self.mlp = nn.Sequential(nn.Linear(SIDE, SIDE), nn.SiLU(), nn.Linear(SIDE, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def parse(text: str) -> Arguments:
    parser = swapkit.add_arguments(argparse.ArgumentParser())
    return swapkit.from_arguments(parser.parse_args(text.split()))


def make_model() -> Model:
    torch.manual_seed(5)
    return Model()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 8 * SIDE).view(1, 8, SIDE)).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            ["layers.0: recompute", "layers.1: recompute"],
        ),
        (
            "--recompute-granularity selective",
            [f"layers.{i}.self_attn.attention: recompute" for i in range(4)],
        ),
        (
            "--recompute-activation-function --recompute-activation-function-num-layers 1",
            [],
        ),
        (
            "--recompute-norm --recompute-norm-num-layers 1",
            [
                "layers.0.input_layernorm: recompute",
                "layers.0.post_attention_layernorm: recompute",
            ],
        ),
        (
            "--swap-attention --swap-modules self_attention,mlp",
            [
                line
                for i in range(4)
                for line in (f"layers.{i}.self_attn: swap to host", f"layers.{i}.mlp: swap to host")
            ],
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
            "--swap-layer-input",
            ["layers.0: recompute", "layers.0: recompute (swap its inputs)"],
        ),
    ],
)
def test_flags_when_applied_then_these_choices_and_the_same_gradients(
    text: str, expected: list[str]
) -> None:
    model = make_model()
    plain = gradients(model)
    assert parse(text).choose(model) is model
    assert [f"{row.where}: {row.what}" for row in swapkit.choices(model)] == expected
    assert all(row.by == "flags" for row in swapkit.choices(model))
    assert all(map(torch.equal, gradients(model), plain))


def test_selective_recompute_when_trained_then_attention_runs_again() -> None:
    model = parse("--recompute-granularity selective").choose(make_model())
    swapper = get_runtime().current_swapper()
    before = swapper.counters().recomputed
    gradients(model)
    assert swapper.counters().recomputed - before == 4


def test_layer_input_when_swapped_then_it_moves_and_nothing_else() -> None:
    full = "--recompute-granularity full --recompute-method block --recompute-num-layers 4"
    model = parse(f"{full} --swap-layer-input").choose(make_model())
    before = copied()
    gradients(model)
    assert copied() - before == 4 * 8 * SIDE * 4 - 8 * SIDE * 4 + 8 * SIDE * 4


def test_stage_when_flags_count_by_stage_then_its_number_holds() -> None:
    asked = parse("--recompute-module-list 1,3")
    first, second = asked.choose(make_model()), asked.choose(make_model(), stage=1)
    assert len(swapkit.choices(first)) == 1
    assert len(swapkit.choices(second)) == 3


def test_chunks_when_counted_by_stage_then_in_turns_else_each_by_itself() -> None:
    text = "--recompute-granularity full --recompute-method block --recompute-num-layers 3"
    for flag, numbers in (("", [3, 3]), ("--enable-recompute-layers-per-pp-rank", [2, 1])):
        asked = parse(f"{text} {flag}")
        chunks = [asked.choose(make_model(), chunk=chunk, chunks=2) for chunk in range(2)]
        assert [len(swapkit.choices(model)) for model in chunks] == numbers
    with pytest.raises(InvalidArgument, match="chunk=2: expected a number from 0 to 1"):
        parse("").choose(make_model(), chunk=2, chunks=2)


@pytest.mark.promise("A9")
def test_budget_when_the_size_is_fixed_then_the_message_says_to_try_another() -> None:
    session = parse("--adaptive-recompute-device-size 1024").budget(make_model())
    assert session.limit_bytes == 1 << 30
    with session:
        assert "Try 1025 (MiB)" in session.hints(3 * 2**20)[0]  # more than what did not suffice


@pytest.mark.promise("A8")
@pytest.mark.parametrize("size", [-1, 0, 1, 10**9])
def test_budget_when_the_threshold_is_searched_then_the_limit_is_the_devices(size: int) -> None:
    asked = parse(f"--adaptive-recompute-device-swap --adaptive-recompute-device-size {size}")
    whole = parse("").budget(make_model()).limit_bytes
    assert asked.budget(make_model()).limit_bytes == whole
    session = asked.budget(make_model(), limit="64MiB")
    assert session.limit_bytes == 64 << 20


def test_budget_when_it_is_refused_then_nothing_is_chosen() -> None:
    model, optimizer = make_model(), torch.optim.SGD(make_model().parameters())
    asked = parse("--adaptive-memory-optimization --recompute-norm --swap-optimizer")
    with pytest.raises(InvalidArgument, match="search_steps=0"):
        asked.budget(model, optimizer, search_steps=0)
    assert len(swapkit.choices(model)) == 0
    assert not optimizer._optimizer_step_pre_hooks


def test_budget_when_a_saved_plan_is_given_then_who_plans_again_is_no_rescue(
    tmp_path: Path,
) -> None:
    write_planned(tmp_path / "plan.json", TRACE, PLAN)
    asked = parse("--recompute-norm")
    assert asked.budget(make_model())._config.policy == "rescue"
    config = asked.budget(make_model(), plan=tmp_path / "plan.json")._config
    assert (config.policy, config.saved_plan) == ("auto", (TRACE, PLAN))


def test_budget_when_choices_were_made_before_then_they_are_made_once() -> None:
    model = make_model()
    asked = parse("--recompute-norm")
    asked.choose(model)
    asked.budget(model)
    assert len(swapkit.choices(model)) == 8


def test_budget_when_optimizer_states_are_to_be_swapped_then_they_are() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with parse("--swap-optimizer").budget(model, optimizer):
        gradients(model)
        before = copied()
        optimizer.step()
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        assert copied() - before >= nbytes  # two moments of each, but for small ones


def test_model_when_it_has_no_layers_then_an_error() -> None:
    with pytest.raises(InvalidArgument, match="has no list of layers"):
        parse("--recompute-granularity full").choose(nn.Linear(2, 2))
    plain = nn.Linear(2, 2)
    assert parse("").choose(plain) is plain
