"""Documents: where they may come from, what of them is read, and what is wrong with a bad one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.config.mindformers.documents import (
    Document,
    RecomputeConfig,
    SwapConfig,
    read_document,
)
from swapkit.config.mindformers.selections import ModelInputs
from swapkit.errors import InvalidConfiguration, WrongKey, WrongType

if TYPE_CHECKING:
    from pathlib import Path

TEXT = r"""
context:
  memory_optimize_level: "O0"
model:
  model_config: {num_layers: 61, mtp_depth: 1, offset: [1, -1], pp_interleave_num: 2}
parallel_config:
  pipeline_stage: 2
parallel:
  pipeline_config:
    pipeline_interleave: True
recompute_config:
  recompute: [3, True]
  select_recompute:
    'feed_forward\.mul': [[1, 0]]
swap_config:
  swap: True
  default_prefetch: 10
"""
SECTIONS: dict[str, Any] = {
    "recompute_config": {
        "recompute": [3, True],
        "select_recompute": {r"feed_forward\.mul": [[1, 0]]},
    },
    "swap_config": {"swap": True, "default_prefetch": 10},
}


@dataclass
class Recompute:
    recompute: list[Any] = field(default_factory=lambda: [3, True])
    select_recompute: dict[str, Any] = field(
        default_factory=lambda: {r"feed_forward\.mul": [[1, 0]]}
    )


@dataclass
class Both:
    recompute_config: Any
    swap_config: Any


@pytest.mark.promise("B6")
@pytest.mark.promise("B7")
@pytest.mark.promise("B8")
def test_document_when_a_section_says_nothing_then_the_defaults() -> None:
    document = read_document({"recompute_config": None, "swap_config": {}})
    assert document == Document(recompute=RecomputeConfig(), swap=SwapConfig())
    recompute = document.recompute
    assert recompute.recompute is recompute.select_recompute is recompute.select_comm_recompute
    assert recompute.recompute is False
    assert recompute.parallel_optimizer_comm_recompute is False
    assert recompute.mp_comm_recompute is True
    assert recompute.recompute_slice_activation is False
    assert (document.swap.swap, document.swap.default_prefetch) == (False, 1)
    assert document.swap.layer_swap is document.swap.op_swap is None
    assert [str(line) for line in document.log_lines] == [
        "WARNING - The input config recompute_config is empty.",
        "WARNING - The input config swap_config is empty.",
    ]


def test_document_when_read_from_a_file_then_sections_and_what_it_says_of_the_model(
    tmp_path: Path,
) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text(TEXT, encoding="utf-8")
    for source in (path, str(path), TEXT):
        document = read_document(source)
        assert document.recompute == RecomputeConfig(**SECTIONS["recompute_config"])
        assert document.swap == SwapConfig(**SECTIONS["swap_config"])
        assert document.log_lines == ()
        assert document.inputs == ModelInputs(
            num_layers=62,
            offset=[1, -1],
            pp_interleave_num=2,
            pipeline_stage=2,
            pipeline_interleave=True,
        )


def test_document_when_of_other_kinds_then_the_same() -> None:
    wanted = read_document(SECTIONS)
    swap = SwapConfig(**SECTIONS["swap_config"])
    assert read_document(json.dumps(SECTIONS)) == wanted
    assert read_document(Both(Recompute(), SECTIONS["swap_config"])) == wanted
    assert read_document(Both(SECTIONS["recompute_config"], swap)) == wanted
    assert read_document(wanted) is wanted
    assert read_document(swap).swap is swap
    assert read_document(wanted.recompute).recompute is wanted.recompute


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ({"recompute_config": {"bogus": 1}}, WrongKey, "'recompute_config' gets .* key: bogus"),
        ({"swap_config": {"bogus": 1}}, WrongKey, "'swap_config' gets an unexpected key: bogus"),
        ({"recompute": True}, WrongKey, r"keys \['recompute'\] belong under 'recompute_config'"),
        ({"recompute_config": True}, WrongType, "'recompute_config' must be a mapping .* bool: T"),
        ({"swap_config": [1]}, WrongType, r"'swap_config' must be a mapping .* list: \[1\]"),
        ({"swap_config": {"swap": 1}}, WrongType, "The 'swap' must be a bool, but got int. It is"),
        ({"recompute_config": {"mp_comm_recompute": "yes"}}, WrongType, "'mp_comm_recompute' must"),
        ({"model": {"model_config": {"num_layers": "4"}}}, WrongType, "num_layers='4': expected a"),
        (
            {"parallel": {"pipeline_config": {"pipeline_interleave": 1}}},
            WrongType,
            "'pipeline_interleave' must be a bool",
        ),
        (
            {"recompute_cfg": {}},
            WrongKey,
            "'recompute_cfg'; the section is named 'recompute_config'",
        ),
        ([1], WrongType, r"A configuration document is a mapping of sections, but got \[1\]"),
        (Both, WrongType, "A configuration document is a mapping"),
        ("- a\n- b\n", WrongType, "A configuration document is a mapping"),
        ("a: [\n", InvalidConfiguration, "The document is not valid YAML"),
    ],
)
def test_document_when_bad_then_error_names_key_and_value(
    source: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_document(source)


def test_document_when_its_file_is_no_yaml_then_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text("a: [", encoding="utf-8")
    with pytest.raises(InvalidConfiguration, match=r"memory\.yaml is not valid YAML"):
        read_document(path)
    with pytest.raises(FileNotFoundError, match="missing"):
        read_document(tmp_path / "missing.yaml")
