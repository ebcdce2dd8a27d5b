"""`configure` takes documents of any form, refuses bad ones as a whole, and can be taken back."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.user_choices.wrapping import PartForward
from swapkit.api import configuration as configuration_module
from swapkit.errors import (
    InvalidArgument,
    InvalidConfiguration,
    InvalidPattern,
    WrongKey,
    WrongStage,
    WrongType,
)

if TYPE_CHECKING:
    from pathlib import Path

SIDE = 32


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.w2, self.act = nn.Linear(SIDE, SIDE), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.feed_forward = nn.LayerNorm(SIDE), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.norm1(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def make_model(config: Any = None) -> Model:
    torch.manual_seed(0)
    return Model(config)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
    return list(torch.autograd.grad(model(x), [x, *model.parameters()]))


def recompute(**config: Any) -> dict[str, Any]:
    return {"recompute_config": config}


def swap(**config: Any) -> dict[str, Any]:
    return {"swap_config": {"swap": True, **config}}


def op_swap(**entry: Any) -> dict[str, Any]:
    return swap(
        op_swap=[{"op_name": "feed_forward", "backward_prefetch": 2, "layers": [0], **entry}]
    )


def wheres(model: nn.Module) -> list[str]:
    return [row.where for row in swapkit.choices(model)]


# ---- forms of a document ------------------------------------------------------------------------

DOCUMENT = {
    **recompute(recompute=[1], select_recompute={r"feed_forward\.mul": [2]}),
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 3, "layers": [0]}]},
}
TEXT = r"""
run_mode: 'train'
context: {memory_optimize_level: "O0"}
model:
  model_config: {type: LlamaConfig, num_layers: 4}
recompute_config:
  recompute: [1]
  select_recompute:
    'feed_forward\.mul': [2]
swap_config:
  swap: True
  layer_swap:
    - backward_prefetch: 3
      layers: [0]
"""


@dataclass
class Recompute:
    recompute: list[int] = field(default_factory=lambda: [1])
    select_recompute: Any = field(default_factory=lambda: {r"feed_forward\.mul": [2]})


@dataclass
class Document:
    recompute_config: Recompute = field(default_factory=Recompute)
    swap_config: Any = field(default_factory=lambda: DOCUMENT["swap_config"])


@pytest.mark.promise("B1")
@pytest.mark.promise("B9")
def test_document_when_path_text_mapping_or_dataclass_then_the_same_choices(tmp_path: Path) -> None:
    yaml, js = tmp_path / "train.yaml", tmp_path / "train.json"
    yaml.write_text(TEXT, encoding="utf-8")
    js.write_text(json.dumps(DOCUMENT), encoding="utf-8")
    tables = set()
    for form in (yaml, str(yaml), js, TEXT, DOCUMENT, Document()):
        model = make_model()
        configuration = swapkit.configure(model, form)
        tables.add((str(swapkit.choices(model)), str(configuration)))
    ((table, log),) = tables
    assert table.splitlines()[1:] == [
        "layers.0                   swap to host, prefetch 3  configuration  yes",
        "layers.1                   recompute                 configuration  yes",
        "layers.2.feed_forward.mul  recompute                 configuration  "
        "yes, 0 operators so far",
    ]
    assert "Set layer swap at layer 0 and value is: 3" in log.splitlines()


# ---- bad input ----------------------------------------------------------------------------------

BAD_DOCUMENTS: list[tuple[Any, type[Exception], str]] = [
    (3, WrongType, "got 3; pass a path, a mapping"),
    ("/nowhere.yaml", FileNotFoundError, "/nowhere.yaml"),
    ("a: [\nb", InvalidConfiguration, "is not valid YAML"),
    ({"recompute": True}, WrongKey, r"'recompute'.* belong under .*recompute_config"),
    ({"recompute_config": 5}, WrongType, "'recompute_config' must be a mapping .* int: 5"),
    (recompute(bogus=1), WrongKey, "unexpected key: bogus. It takes .*'recompute'"),
    (recompute(recompute="yes"), InvalidConfiguration, "recompute: 'yes'. Give True or False"),
    (recompute(recompute=[-1]), InvalidConfiguration, r"recompute=\[-1\]: .*4 layers"),
    (recompute(recompute=[1, 2]), InvalidConfiguration, r"recompute \(\[1, 2\]\) > pp\(1\)"),
    (recompute(recompute=[[1], [2]]), WrongStage, r"recompute=\[\[1\], \[2\]\]: row 1"),
    (recompute(mp_comm_recompute=1), WrongType, "'mp_comm_recompute' must be a bool.* It is 1"),
    (recompute(select_recompute=["("]), InvalidPattern, r"pattern '\('"),
    (
        recompute(select_recompute={1: True}),
        WrongType,
        "select_recompute: the pattern 1 is not a string",
    ),
    (recompute(select_recompute={"a": "x"}), InvalidConfiguration, r"select_recompute\(a\): 'x'"),
    ({"swap_config": {"swap": 1}}, WrongType, "'swap' must be a bool.* It is 1"),
    (swap(default_prefetch=0), InvalidConfiguration, "default_prefetch must be int .* and 0"),
    (op_swap(backward_prefetch=True), WrongType, "got 'True' with type 'bool'"),
    (swap(layer_swap=3), InvalidConfiguration, "layer_swap must be a list or dict.* 3"),
    (
        swap(layer_swap=[{"layers": [0]}]),
        WrongKey,
        r"layer_swap\[0\].*'backward_prefetch' is missing",
    ),
    (op_swap(backward_prefetch=0), InvalidConfiguration, r"op_swap\(feed_forward\).* get 0"),
    (op_swap(backward_prefetch="Auto"), InvalidConfiguration, "must be positive, but get Auto"),
    (op_swap(layers="all"), InvalidConfiguration, "op_swap: feed_forward configuration: 'all'"),
    (op_swap(op_name=5), InvalidConfiguration, "'op_name': 5.*must be a string"),
    (op_swap(op_name="("), InvalidPattern, r"pattern '\('"),
    ({**op_swap(), **recompute(recompute=[[1]])}, InvalidConfiguration, r"recompute .*\[\[1\]\]"),
    ({"model": {"model_config": {"num_layers": "8"}}}, WrongType, "num_layers='8'"),
    (
        {"model": {"model_config": {"num_layers": 8}}},
        InvalidArgument,
        "4 layers, but num_layers is 8",
    ),
]


@pytest.mark.promise("B1")
@pytest.mark.promise("B10")
@pytest.mark.parametrize(("document", "error", "text"), BAD_DOCUMENTS)
def test_document_when_wrong_then_named_and_nothing_is_changed(
    document: Any, error: type[Exception], text: str
) -> None:
    model = make_model()
    swapkit.configure(model, recompute(recompute=[2]))
    with pytest.raises(error, match=text):
        swapkit.configure(model, document)
    assert wheres(model) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"num_layers": 5}, "num_layers is 5.* layer_ids=.* layers="),
        ({"num_layers": "4"}, "num_layers='4': expected a whole number"),
        ({"pipeline_stage": 3}, r"`num_layers` \(4\) % \(pp \(3\)"),
        ({"pp_interleave_num": 2.0}, r"pp_interleave_num=2\.0"),
        ({"offset": "a"}, "offset='a': expected a whole number"),
        ({"offset": [1]}, r"sum of `offset` \(1\)"),
        ({"layers": 5}, "layers=5: expected a pattern for paths, or modules"),
        ({"layers": "nothing"}, "pattern 'nothing' matches no submodule"),
        ({"layers": "layers"}, "matches only layers, which have no forward"),
        ({"layers": [1]}, "submodules of Model; int is not one"),
        ({"layers": [nn.Linear(1, 1)]}, "submodules of Model; Linear is not one"),
        ({"layers": r"layers\.0(\.norm1)?"}, r"layers\.0\.norm1 is inside layers\.0, which"),
        ({"layer_ids": [0]}, r"layer_ids=\[0\]: expected 4 numbers, one for each layer, got 1"),
        ({"layer_ids": [0, 1, 2, 4]}, r"layer_ids=.*from 0 to 3; num_layers is 4"),
        ({"layer_ids": [0, 1, 2, 2]}, "layer_ids=.*distinct whole numbers"),
        ({"layer_ids": [0, 1, 2, -1]}, "layer_ids=.*from 0 to 3"),
        ({"layer_ids": "0123"}, "layer_ids='0123'"),
        ({"layer_ids": 4}, "layer_ids=4"),
        ({"names": ["a"]}, r"names=\['a'\]: expected a mapping of names"),
        ({"names": {"a": 5}}, "names={'a': 5}"),
        ({"names": {"a": "nothing"}}, r"names\['a'\]: a layer has no part 'nothing'"),
        ({"tensor_parallel_group": 5}, "tensor_parallel_group=5"),
    ],
)
def test_model_side_when_wrong_then_named_and_nothing_is_changed(
    inputs: dict[str, Any], text: str
) -> None:
    model = make_model()
    swapkit.configure(model, recompute(recompute=[2]))
    with pytest.raises(InvalidArgument, match=text):
        swapkit.configure(model, recompute(recompute=True), **inputs)
    assert wheres(model) == ["layers.0", "layers.1"]


def test_layers_when_given_twice_then_refused() -> None:
    model = make_model()
    with pytest.raises(InvalidArgument, match=r"layers\.1 is given twice"):
        swapkit.configure(model, {}, layers=[model.layers[1]] * 2)


def test_model_when_it_is_none_then_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"configure: expected a torch\.nn\.Module, got 3"):
        swapkit.configure(3, {})  # type: ignore[arg-type]


# ---- the model's side ---------------------------------------------------------------------------


@dataclass
class Config:
    offset: Any = 0
    pipeline_stage: int = 1
    pp_interleave_num: int = 1


@pytest.mark.promise("B1")
def test_stages_when_said_by_several_then_the_call_then_the_document_then_the_model() -> None:
    config = Config(offset=[1, -1], pipeline_stage=2)
    document = recompute(recompute=[1, 1])
    model = make_model(config)
    swapkit.configure(model, document)
    assert wheres(model) == ["layers.0", "layers.3"]
    document = {**document, "model": {"model_config": {"offset": [-1, 1]}}}
    swapkit.configure(model, document)
    assert wheres(model) == ["layers.0", "layers.1"]
    swapkit.configure(model, document, offset=0)
    assert wheres(model) == ["layers.0", "layers.2"]


def test_stage_when_it_has_no_layers_then_nothing_to_choose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = recompute(recompute=True, select_recompute=["bogus"])
    configuration = swapkit.configure(make_model(), document, num_layers=8, layers=[], layer_ids=[])
    assert configuration.unmatched == []
    assert "Formative layer_recompute: [[8]]" in configuration.log_lines
    assert caplog.records == [each for each in caplog.records if "empty" in each.getMessage()]


# ---- what it says -------------------------------------------------------------------------------


@pytest.mark.promise("B5")
def test_log_when_configured_then_as_printed_with_single_blanks_and_backslashes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "swapkit.settings")
    document = {**op_swap(op_name=r"feed_forward\.mul"), **recompute(select_recompute=[1])}
    configuration = swapkit.configure(make_model(), document)
    logged = [each.getMessage() for each in caplog.records if each.levelname == "INFO"]
    assert logged == configuration.log_lines == str(configuration).splitlines()
    assert "Set op_swap at layer 0: feed_forward.mul, value=2" in logged
    (line,) = [line for line in logged if "Formative select_recompute:" in line]
    assert line.endswith(r"{'feed_forward\.mul': [1], 'feed_forward\.w1\.activation\.silu': [1]}")


def test_slicing_when_there_is_no_group_then_warned(caplog: pytest.LogCaptureFixture) -> None:
    document = recompute(recompute=True, recompute_slice_activation=True)
    model = make_model()
    swapkit.configure(model, document)
    assert any("no ranks to slice over" in text for text in caplog.messages)
    expected = gradients(make_model())
    assert all(map(torch.equal, gradients(model), expected))


def test_operators_when_they_never_run_then_shown_as_none() -> None:
    model = make_model()
    swapkit.configure(model, recompute(select_recompute=[r"feed_forward\.w1\.bias_add"]))
    gradients(model)
    assert [row.operators for row in swapkit.choices(model)] == [0] * 4


# ---- taking it back -----------------------------------------------------------------------------


def is_untouched(model: nn.Module) -> bool:
    modules = list(model.modules())
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules]
    return not any("forward" in each.__dict__ for each in modules) and not any(hooks)


EVERYTHING = {
    **recompute(recompute=[0], select_recompute={r"feed_forward\.mul": [1]}),
    **swap(
        layer_swap=[{"backward_prefetch": 2, "layers": [2]}],
        op_swap=[{"op_name": r"feed_forward\.w3\.matmul", "backward_prefetch": 2, "layers": [3]}],
    ),
}


@pytest.mark.promise("B16")
def test_configuration_when_removed_then_the_model_is_as_it_was() -> None:
    model, plain = make_model(), gradients(make_model())
    configuration = swapkit.configure(model, EVERYTHING)
    assert all(map(torch.equal, gradients(model), plain))
    assert not is_untouched(model)
    for _ in range(2):  # a second time changes nothing
        configuration.remove()
        assert wheres(model) == []
        assert is_untouched(model)
    assert all(map(torch.equal, gradients(model), plain))
    assert get_runtime().shim.marks_count() == 0
    assert not get_runtime().tracker._users


def test_configuration_when_removed_between_forward_and_backward_then_the_graph_keeps_working() -> (
    None
):
    model, plain = make_model(), gradients(make_model())
    configuration = swapkit.configure(model, EVERYTHING)
    x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
    loss = model(x)
    configuration.remove()
    assert is_untouched(model)
    found = torch.autograd.grad(loss, [x, *model.parameters()])
    assert all(map(torch.equal, found, plain))


@pytest.mark.promise("B16")
def test_configuration_when_made_again_then_replaces_the_former_and_no_others() -> None:
    model = make_model()
    swapkit.offload(model, r"layers\.3")
    first = swapkit.configure(model, recompute(recompute=True))
    swapkit.configure(model, recompute(recompute=[1]))
    assert wheres(model) == ["layers.0", "layers.3"]
    first.remove()  # takes back nothing of the second
    assert wheres(model) == ["layers.0", "layers.3"]
    swapkit.configure(model, {})
    assert wheres(model) == ["layers.3"]
    assert isinstance(model.layers[3].forward, PartForward)


def test_configuration_when_patterns_overlap_then_one_row_for_each_thing() -> None:
    model = make_model()
    swapkit.configure(model, recompute(select_recompute=[r"feed_forward\.mul", r".*\.mul"]))
    assert wheres(model) == [f"layers.{layer}.feed_forward.mul" for layer in range(4)]
    swapkit.configure(model, op_swap(op_name=[r"feed_forward\.mul", r".*\.mul"]))
    assert wheres(model) == ["layers.0.feed_forward.mul"]


@pytest.mark.promise("F8")
@pytest.mark.parametrize("context", [{"memory_optimize_level": "O0"}, "memory_optimize_level=O0"])
def test_context_when_it_has_what_changes_nothing_then_said_once(
    context: object, caplog: pytest.LogCaptureFixture
) -> None:
    configuration_module._warn_once.cache_clear()
    for _ in range(2):
        swapkit.configure(make_model(), {"context": context, **DOCUMENT})
    said = [text for text in caplog.messages if "has no effect" in text]
    assert len(said) == 1
    assert said[0].startswith("context: memory_optimize_level=O0 has no effect: ")
