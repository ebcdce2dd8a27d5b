"""Flags: on any parser, of the original kinds, and what they say is to be done with which part."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from swapkit.config.flags import FLAGS, TUNES, WITHOUT_COUNTERPART, add_arguments, from_arguments
from swapkit.config.settings import LayerPart, Settings
from swapkit.errors import InvalidArgument


def settings_of(line: str, **attributes: Any) -> Settings:
    parser = add_arguments(argparse.ArgumentParser())
    return from_arguments(
        argparse.Namespace(**vars(parser.parse_args(line.split())), **attributes), variables={}
    )


def parts_of(line: str, **attributes: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        (part.action, part.role, part.first, part.layers)
        for part in settings_of(line, **attributes).document
    )


def test_parser_when_given_then_the_same_is_returned_with_a_group_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    assert "memory:" in parser.format_help()
    assert all(f"--{name}" in parser.format_help() for name in FLAGS)


def test_parser_when_it_has_a_flag_already_then_that_stays() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recompute-num-layers", type=int, default=7)
    assert add_arguments(parser).parse_args([]).recompute_num_layers == 7


def test_settings_when_no_flag_is_given_then_nothing_is_asked_for() -> None:
    assert settings_of("") == Settings()
    assert from_arguments(argparse.Namespace(), variables={}) == Settings()


def test_settings_when_the_environment_speaks_then_it_is_in_them() -> None:
    variables = {"MIN_SWAP_TENSOR_SIZE": "4096", "MEMORY_FRAGMENTATION": "1"}
    settings = from_arguments(argparse.Namespace(), variables=variables)
    assert (settings.min_swap_bytes, settings.memory_fragmentation) == (4096, True)


@pytest.mark.promise("A9")
def test_hint_when_a_size_was_chosen_by_hand_then_it_names_the_next() -> None:
    settings = settings_of("--adaptive-recompute-device-size 4096")
    assert settings.is_fixed_limit
    hint = settings.advise((5 << 30) + 1)
    assert "device-size gives 4.00 GiB. Try 5121 (MiB)" in hint


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--recompute-granularity full", [("recompute", "layer", 0, None)]),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            [("recompute", "layer", 0, 3)],
        ),
        ("--recompute-granularity selective", [("recompute", "core_attention", 0, None)]),
        ("--recompute-activation-function", [("recompute", "activation_function", 0, None)]),
        (
            "--recompute-activation-function --recompute-activation-function-num-layers 4 "
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            [("recompute", "layer", 0, 3), ("recompute", "activation_function", 3, 4)],
        ),
        (
            "--recompute-norm --recompute-norm-num-layers 2",
            [("recompute", "input_norm", 0, 2), ("recompute", "post_attention_norm", 0, 2)],
        ),
        (
            "--swap-attention",
            [
                ("swap", "input_norm", 0, None),
                ("swap", "self_attention", 0, None),
                ("swap", "post_attention_norm", 0, None),
            ],
        ),
        (
            "--swap-attention --swap-modules self_attention --recompute-method block "
            "--recompute-num-layers 3",
            [("recompute", "mlp", 0, 3), ("swap", "self_attention", 0, 3)],
        ),
        (
            "--swap-attention --swap-modules my_block --recompute-num-layers 3",
            [("recompute", "mlp", 0, 3), ("swap", "my_block", 0, None)],
        ),
        (
            "--swap-layer-input --recompute-granularity full --recompute-method block "
            "--recompute-num-layers 3",
            [("recompute", "layer", 0, 3), ("swap", "layer_input", 0, 3)],
        ),
        (
            "--recompute-module-list 2,1,0 --recompute-type 0",
            [("recompute", "mlp", 0, (2, 1, 0))],
        ),
        ("--recompute-module-list [2,1]", [("recompute", "layer", 0, (2, 1))]),
    ],
)
def test_document_when_flags_choose_parts_then_these(line: str, parts: list[Any]) -> None:
    assert parts_of(line) == tuple(parts)


def test_document_when_uniform_then_all_layers_in_groups() -> None:
    line = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    assert settings_of(line).document == (LayerPart(action="recompute", role="layer", group=2),)


def test_layers_when_counted_by_rank_then_noted() -> None:
    assert settings_of("--enable-recompute-layers-per-pp-rank --recompute-norm").counts_per_stage


@pytest.mark.parametrize("flag", sorted(TUNES))
def test_flag_when_it_tunes_a_feature_that_is_off_then_warned(flag: str) -> None:
    value = "" if flag.startswith("enable") else "1"
    (switch, *_) = switches = TUNES[flag]
    with pytest.warns(UserWarning, match=f"--{flag} has no effect without --{switch}") as caught:
        assert settings_of(f"--{flag} {value}").document == ()
    assert str(caught[-1].message).endswith(f"--{' or --'.join(switches)}")


@pytest.mark.parametrize("name", sorted(WITHOUT_COUNTERPART))
def test_flag_when_it_has_no_counterpart_then_a_warning_says_what_to_use(name: str) -> None:
    values = {"num-layer-list": "4,4", "compress-dense": "level1", "compress-activation": "0"}
    with pytest.warns(UserWarning, match="has no effect") as caught:
        assert settings_of(f"--{name} {values.get(name, '')}") == Settings()
    assert [str(each.message) for each in caught] == [
        f"--{name} has no effect: {WITHOUT_COUNTERPART[name]}"
    ]


def test_counts_when_the_model_has_fewer_layers_then_invalid_argument() -> None:
    line = "--recompute-norm --recompute-norm-num-layers 5"
    assert settings_of(line, num_layers=5).document
    with pytest.raises(InvalidArgument, match=r"num-layers=5: .* at most 4, the model"):
        settings_of(line, num_layers=4)


def test_module_list_when_a_list_already_then_taken() -> None:
    args = argparse.Namespace(recompute_module_list=[1, 2])
    (part,) = from_arguments(args, variables={}).document
    assert part.layers == (1, 2)
