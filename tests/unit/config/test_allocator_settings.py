"""The grammar of torch's allocator variables: which goes first, what is accepted and refused."""

from __future__ import annotations

import pytest

from swapkit.config.allocator_settings import (
    IGNORED_KEYS,
    AllocatorSettings,
    parse_allocator_settings,
    read_allocator_settings,
)
from swapkit.errors import InvalidArgument

MIB = 1 << 20


def test_settings_when_nothing_is_set_then_the_defaults() -> None:
    assert read_allocator_settings(variables={}) == AllocatorSettings()
    assert read_allocator_settings("cuda", {"PYTORCH_ALLOC_CONF": ""}) == AllocatorSettings()
    assert AllocatorSettings().expandable_segments
    assert AllocatorSettings().max_split_bytes == 0


@pytest.mark.promise("A16")
def test_settings_when_all_are_given_then_read_whatever_the_blanks() -> None:
    text = (
        " max_split_size_mb : 64,garbage_collection_threshold:0.75 ,expandable_segments:False,"
        "default_lc_threshold:128.5,open_memory_optimize:1,"
    )
    assert parse_allocator_settings(text) == AllocatorSettings(
        max_split_bytes=64 * MIB,
        garbage_collection_threshold=0.75,
        expandable_segments=False,
        short_lived_bytes=128.5,
        optimizes_lifetimes=True,
    )


@pytest.mark.parametrize(
    ("text", "on"), [("true", True), ("1", True), ("false", False), ("0", False)]
)
def test_lifetimes_when_any_spelling_then_read(text: str, *, on: bool) -> None:
    assert parse_allocator_settings(f"open_memory_optimize:{text}").optimizes_lifetimes is on


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("device_type", "names", "first"),
    [
        ("cuda", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"], "PYTORCH_ALLOC_CONF"),
        ("cuda", ["PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"], "PYTORCH_CUDA_ALLOC_CONF"),
        ("npu", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"], "PYTORCH_NPU_ALLOC_CONF"),
        ("npu", ["PYTORCH_CUDA_ALLOC_CONF"], "PYTORCH_CUDA_ALLOC_CONF"),
        ("cpu", ["PYTORCH_NPU_ALLOC_CONF"], "PYTORCH_NPU_ALLOC_CONF"),
    ],
)
def test_variables_when_several_are_set_then_only_the_first_counts(
    device_type: str, names: list[str], first: str
) -> None:
    variables = dict.fromkeys(names, "max_split_size_mb:30") | {first: "expandable_segments:False"}
    assert read_allocator_settings(device_type, variables) == AllocatorSettings(
        expandable_segments=False
    )


@pytest.mark.parametrize("key", sorted(IGNORED_KEYS))
def test_key_when_it_is_torchs_and_not_ours_then_ignored(key: str) -> None:
    assert parse_allocator_settings(f"{key}:1") == AllocatorSettings()


def test_key_when_its_value_is_a_list_then_ignored_as_a_whole() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:21,backend:native"
    assert parse_allocator_settings(text) == AllocatorSettings(max_split_bytes=21 * MIB)


def test_fraction_when_given_then_a_warning_says_where_it_goes() -> None:
    with pytest.warns(UserWarning, match=r"per_process_memory_fraction .*swapkit\.install\(limit="):
        settings = parse_allocator_settings("per_process_memory_fraction:0.5")
    assert settings == AllocatorSettings()


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bogus:1", "unknown key 'bogus'; keys with an effect: default_lc_threshold, "),
        (
            "max_split_size_mb:20",
            "max_split_size_mb:20: expected a whole number ab",
        ),
        ("max_split_size_mb:21.5", "max_split_size_mb:21.5: expected a whole number"),
        ("max_split_size_mb:abc", "max_split_size_mb:abc: expected a whole number"),
        ("garbage_collection_threshold:0", "expected a number above 0 and below 1"),
        ("garbage_collection_threshold:1.0", "expected a number above 0 and below 1"),
        ("garbage_collection_threshold:nan", "expected a number above 0 and below 1"),
        (
            "expandable_segments:true",
            "expandable_segments:true: expected True or F",
        ),
        ("default_lc_threshold:-1", "expected a number of bytes"),
        ("open_memory_optimize:True", "expected true, 1, false or 0"),
        ("max_split_size_mb", "'max_split_size_mb' is not a key with a value; expected key:value"),
        ("max_split_size_mb:", "is not a key with a value"),
        ("max_split_size_mb:30,,backend:native", "',' is not a key with a value"),
        ("backend:[native", "; expected key:value,key:value"),
        ("backend]:native", "; expected key:value,key:value"),
    ],
)
def test_settings_when_wrong_then_the_error_names_variable_key_and_what_is_accepted(
    text: str, complaint: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_allocator_settings("npu", {"PYTORCH_NPU_ALLOC_CONF": text})
    assert str(caught.value).startswith("PYTORCH_NPU_ALLOC_CONF: ")
    assert complaint in str(caught.value)
