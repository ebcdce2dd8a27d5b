"""The settings of SmartSwap: read from anything, checked, and what they mean here."""

from __future__ import annotations

import enum
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.config.smart_swap import (
    SmartSwapConfig,
    SwapPolicyConfig,
    SwapPolicyPref,
    read_smart_swap,
)
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
SAVING = SwapPolicyPref.BETTER_MEMORY_SAVING


@pytest.mark.promise("C9")
def test_config_when_nothing_is_said_then_the_original_defaults() -> None:
    config = read_smart_swap()
    assert config == SmartSwapConfig()
    assert (config.warmup_step, config.stable_step, config.op_diff_thresh) == (2, 3, 0.05)
    assert (config.target_mode, config.reduction_memory, config.target_memory) == (
        False,
        3 * GIB,
        40 * GIB,
    )
    assert (config.tensor_size_filter, config.redundant_memory) == (20 << 20, 2 * GIB)
    assert (config.D2H_bandwidth, config.H2D_bandwidth) == (25600, 25600)
    assert config.policy_v2
    assert config.policy_pref is SwapPolicyPref.BETTER_PERFORMANCE
    assert (config.swap_bucket_size, config.num_attn_layers_per_stage) == (-1, 1)


@pytest.mark.promise("C9")
def test_config_when_a_file_then_read_as_yaml_or_json(tmp_path: Path) -> None:
    values = {"target_mode": True, "target_memory": "10GiB", "policy_pref": "BETTER_MEMORY_SAVING"}
    expected = SmartSwapConfig(target_mode=True, target_memory=10 * GIB, policy_pref=SAVING)
    (tmp_path / "swap.json").write_text(json.dumps(values))
    (tmp_path / "swap.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in values.items())
    )
    (tmp_path / "empty.yml").write_text("# nothing\n")
    assert read_smart_swap(tmp_path / "swap.json") == expected
    assert read_smart_swap(str(tmp_path / "swap.yaml")) == expected
    assert read_smart_swap(tmp_path / "empty.yml") == SmartSwapConfig()


@pytest.mark.promise("C9")
def test_config_when_an_object_of_the_originals_then_its_attributes() -> None:
    class Original(enum.Enum):
        BETTER_MEMORY_SAVING = "other"

    source = SimpleNamespace(
        rank=3, bandwidth_arg=1, tensor_freq_thresh=8, policy_pref=Original.BETTER_MEMORY_SAVING
    )
    config = read_smart_swap(source)
    assert config == SmartSwapConfig(policy_pref=SAVING)
    assert read_smart_swap(config) is config


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"target_memry": 1},
            "SmartSwap has no field target_memry; its fields are D2H_bandwidth, ",
        ),
        ({"warmup_step": 0}, "warmup_step=0: expected a whole number of at least 1"),
        ({"warmup_step": 2.5}, "warmup_step=2.5: expected a whole number"),
        ({"warmup_step": True}, "warmup_step=True: expected a whole number"),
        ({"stable_step": 2}, "stable_step=2: both count from the first step"),
        ({"op_diff_thresh": 1.5}, "op_diff_thresh=1.5: expected a number from 0 to 1"),
        ({"D2H_bandwidth": 0}, "D2H_bandwidth=0: expected a number of at least 1"),
        ({"target_mode": 1}, "target_mode=1: expected a bool"),
        ({"output_root_path": 5}, "output_root_path=5: expected a str"),
        (
            {"policy_pref": "FASTEST"},
            "policy_pref='FASTEST': expected BETTER_PERFORMANCE or BETTER_M",
        ),
        ({"policy_pref": 2}, "policy_pref=2: expected BETTER_PERFORMANCE or"),
        ({"reduction_memory": "3 bananas"}, "reduction_memory='3 bananas' is not understood"),
        ({"reduction_memory": -1}, "reduction_memory=-1: expected a whole number of at least 0"),
        ({"swap_bucket_size": 1.5}, "swap_bucket_size=1.5: expected a whole number"),
        (
            {"num_attn_layers_per_stage": 0},
            "num_attn_layers_per_stage=0: expected a whole number of",
        ),
        ({"print_level": 3}, "print_level=3: expected a whole number from 0 to 2"),
        ({"size_coverage_weight": float("nan")}, "size_coverage_weight=nan: expected a number"),
    ],
)
def test_config_when_a_value_is_wrong_then_the_error_names_it(
    values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_smart_swap(values)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("absent.yaml", None, "cannot read it: No such file"),
        ("config.py", "target_mode = True", r"expected a \.yaml, \.yml or \.json file"),
        ("list.json", "[1]", "expected a mapping of fields to values"),
        ("broken.json", "{", "is not valid YAML"),
        ("broken.yaml", "a: [", "is not valid YAML"),
    ],
)
def test_file_when_it_is_no_configuration_then_invalid_argument(
    tmp_path: Path, name: str, text: str | None, complaint: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgument, match=complaint):
        read_smart_swap(tmp_path / name)


@pytest.mark.promise("C10")
@pytest.mark.parametrize(("size", "most"), [(-1, None), (-7, None), (0, 0), (4096, 4096)])
def test_bucket_when_negative_then_everything_else_so_many_bytes(
    size: int, most: int | None
) -> None:
    assert SmartSwapConfig(swap_bucket_size=size).bucket_bytes == most


@pytest.mark.promise("C10")
def test_preference_when_memory_saving_then_optimizer_states_move_too() -> None:
    assert not SmartSwapConfig().moves_optimizer
    assert SmartSwapConfig(policy_pref=SAVING).moves_optimizer
    assert SmartSwapConfig(policy_v2=False).moves_optimizer  # version 1 takes whatever fits


@pytest.mark.promise("C10")
def test_stages_when_something_is_said_of_them_then_they_count() -> None:
    assert not SmartSwapConfig().has_stages
    assert SmartSwapConfig(swap_bucket_size=0).has_stages
    assert SmartSwapConfig(num_attn_layers_per_stage=2).has_stages
    assert not SmartSwapConfig(swap_bucket_size=0, policy_v2=False).has_stages


@pytest.mark.promise("C10")
def test_filter_when_only_stages_are_set_up_then_it_leaves_nothing_out() -> None:
    assert SmartSwapConfig(swap_bucket_size=1).stage_least_bytes == 0
    assert SmartSwapConfig(tensor_size_filter=4).stage_least_bytes == 4
    explicit = read_smart_swap({"tensor_size_filter": "20MiB"})  # the default, but on purpose
    assert explicit.stage_least_bytes == 20 << 20


@pytest.mark.promise("C10")
def test_bucket_when_given_as_minus_one_then_stages_swap_all_that_they_can() -> None:
    given = read_smart_swap({"swap_bucket_size": -1})
    assert given.has_stages
    assert given.bucket_bytes is None
    assert not read_smart_swap({"print_level": 1}).has_stages


@pytest.mark.promise("C9")
def test_aims_when_asked_for_then_less_or_down_to() -> None:
    assert (SmartSwapConfig().reduction_bytes, SmartSwapConfig().limit_bytes) == (0, None)
    assert SmartSwapConfig(policy_v2=False).reduction_bytes == 3 * GIB
    by_reduction = SmartSwapConfig(reduction_memory="4GiB")  # type: ignore[arg-type]
    assert (by_reduction.reduction_bytes, by_reduction.limit_bytes) == (4 * GIB, None)
    by_target = SmartSwapConfig(target_mode=True, target_memory=20 * GIB, policy_v2=False)
    assert (by_target.reduction_bytes, by_target.limit_bytes) == (0, 20 * GIB)
    assert SmartSwapConfig(target_memory=20 * GIB).limit_bytes is None


@pytest.mark.promise("C9")
def test_sizes_when_not_said_then_swapkits_own() -> None:
    assert SmartSwapConfig().least_bytes == 0
    assert SmartSwapConfig(tensor_size_filter=4096).least_bytes == 4096


@pytest.mark.promise("C1")
@pytest.mark.parametrize(("warmup", "stable", "steps"), [(2, 3, None), (2, 10, 8), (5, 6, None)])
def test_search_when_it_leaves_something_to_choose_then_so_many_steps(
    warmup: int, stable: int, steps: int | None
) -> None:
    config = SmartSwapConfig(warmup_step=warmup, stable_step=stable)
    assert config.search_steps == steps


def test_settings_when_an_object_is_made_then_it_has_all_fields_with_their_defaults() -> None:
    config = SwapPolicyConfig()
    wanted = {"warmup_step": 2, "policy_v2": True, "print_rank": 0}
    assert {name: vars(config)[name] for name in wanted} == wanted
    assert len({config, SwapPolicyConfig()}) == 2
    config.warmup_step = 1
    assert read_smart_swap(config).warmup_step == 1
    assert read_smart_swap(config).named == {"warmup_step"}
