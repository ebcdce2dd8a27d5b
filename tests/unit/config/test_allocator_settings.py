"""The grammar of torch's allocator variables: which goes first, what is accepted and refused."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from swapkit.config.allocator_settings import (
    KEYS,
    ROUNDUP_INTERVALS,
    AllocatorSettings,
    format_keys,
    parse_allocator_settings,
    read_allocator_settings,
    report_settings,
)
from swapkit.errors import InvalidArgument

MIB = 1 << 20
DOCUMENT = Path(__file__).parents[3] / "docs" / "environment.md"


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


# Key, values that are accepted, values that are not, and the settings of the first.
FLAG = (("True", "False"), ("true", "1", "", "[True]"))
WHOLE = (("0", "4096"), ("-1", "1.5", "x"))
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "max_split_size_mb": (("64", "21"), ("20", "0", "64.5", "x"), {"max_split_bytes": 64 * MIB}),
    "garbage_collection_threshold": (
        ("0.75", "0.01"),
        ("0", "1", "1.5", "-1", "nan", "x"),
        {"garbage_collection_threshold": 0.75},
    ),
    "expandable_segments": (("False", "True"), FLAG[1], {"expandable_segments": False}),
    "roundup_power2_divisions": (
        (
            "[256:1,512:2,>:4]",
            "1",
            "8",
            "[1:0]",
            "[64:8,256:4,1024:4,>:1]",
            "[>:2]",
            "[4:2,]",
            "[]",
        ),
        (
            "0",
            "3",
            "x",
            "[,4:2]",
            "[4:2,,8:1]",
            "[,]",
            "[3:1]",
            "[4:3]",
            "[4]",
            "[4:]",
            "[0:1]",
            "[x:1]",
            "-2",
        ),
        {"roundup_divisions": (1,) * 9 + (2,) + (4,) * 6},
    ),
    "per_process_memory_fraction": (
        ("0.5", "0", "1", "1.0"),
        ("1.1", "-0.1", "nan", "x"),
        {"memory_fraction": 0.5},
    ),
    "page_size": (("1g",), ("1G", "2m", "1", "x"), {"page_policy": "1g"}),
    "default_lc_threshold": (
        ("128.5", "0"),
        ("-1", "inf", "nan", "x"),
        {"short_lived_bytes": 128.5},
    ),
    "open_memory_optimize": (
        ("true", "1", "false", "0"),
        ("True", "2", "x"),
        {"optimizes_lifetimes": True},
    ),
    "max_non_split_rounding_mb": (("20", "100"), ("19", "-1", "x"), {}),
    "large_segment_size_mb": (("11", "64"), ("10", "x"), {}),
    "segment_size_mb": (("20", "512"), ("19", "513", "x"), {}),
    "base_addr_aligned_kb": (("0", "16"), ("17", "-1", "1.5", "x"), {}),
    "pinned_reserve_segment_size_mb": (*WHOLE, {}),
    "pinned_max_round_threshold_mb": (*WHOLE, {}),
    "pinned_max_cached_size_mb": (*WHOLE, {}),
    "backend": (("cudaMallocAsync", "native"), ("Native", "x"), {}),
    "pinned_num_register_threads": (("1", "128"), ("0", "3", "256", "x"), {}),
    **{
        key: (*FLAG, {})
        for key in (
            *("multi_stream_lazy_reclaim", "release_lock_on_npumalloc", "throw_on_npumalloc_oom"),
            *("pin_memory_expandable_segments", "pinned_mem_register", "pinned_free_catch_all"),
            *("pinned_use_background_threads", "release_lock_on_cudamalloc"),
            *("release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"),
            *("graph_capture_record_stream_reuse", "pinned_use_cuda_host_register"),
            "pinned_use_hip_host_register",
        )
    },
}
# Keys of torch's own, whose parser serves every device.
TORCHS = [
    *("max_split_size_mb", "garbage_collection_threshold", "expandable_segments"),
    *("roundup_power2_divisions", "max_non_split_rounding_mb", "large_segment_size_mb"),
    "pinned_use_background_threads",
]
# Torch accepts 20; MindSpeed and our pool do not.
STRICTER = {("max_split_size_mb", "20")}


def test_table_when_compared_then_it_has_all_keys() -> None:
    assert TABLE.keys() == KEYS.keys()


@pytest.mark.promise("A16")
@pytest.mark.parametrize("key", TABLE)
def test_key_when_its_value_is_valid_then_read(key: str) -> None:
    good, _, settings = TABLE[key]
    assert parse_allocator_settings(f"{key}:{good[0]}") == AllocatorSettings(**settings)
    for value in good:
        parse_allocator_settings(f"{key}:{value},max_split_size_mb:30")


@pytest.mark.promise("A16")
@pytest.mark.parametrize("key", TABLE)
def test_key_when_its_value_is_invalid_then_the_error_says_what_is_expected(key: str) -> None:
    for value in TABLE[key][1]:
        with pytest.raises(InvalidArgument) as caught:
            parse_allocator_settings(f"{key}:{value}", variable="PYTORCH_NPU_ALLOC_CONF")
        text = str(caught.value)
        assert text.startswith("PYTORCH_NPU_ALLOC_CONF: ")
        assert KEYS[key].accepted in text or "is not a key with a value" in text, value


@pytest.mark.parametrize("key", TORCHS)
def test_value_when_torch_reads_it_too_then_it_agrees(key: str) -> None:
    torchs = torch._C._accelerator_setAllocatorSettings
    is_old = torch.__version__.startswith("2.10.")
    if is_old and key == "large_segment_size_mb":
        pytest.skip("torch 2.10 does not have this key")
    try:
        for value in TABLE[key][0]:
            torchs(f"{key}:{value}")
        for value in TABLE[key][1]:
            if (key, value) in STRICTER or value in {"", "1.5", "64.5", "-1", "-2", "nan"}:
                continue  # torch reads the start of a number, and wraps negative ones
            with pytest.raises((RuntimeError, ValueError)):
                torchs(f"{key}:{value}")
    finally:
        large = "" if is_old else "large_segment_size_mb:20,"
        torchs(f"{large}max_non_split_rounding_mb:20,expandable_segments:False")


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("4", (4,) * 16),
        ("[1:2]", (2,) + (0,) * 15),
        ("[4:2]", (2, 2, 2) + (0,) * 13),
        ("[4:2,16:8]", (2, 2, 2, 0, 8) + (0,) * 11),
        ("[64:8,256:4,1024:4,>:1]", (8,) * 7 + (0, 4, 0, 4) + (1,) * 5),
        ("[>:2]", (0,) + (2,) * 15),
        ("[65536:2]", (2,) * 16),
        ("[>:4,256:2]", (2,) * 9 + (4,) * 7),
        ("[>:4,256:2,4:8]", (2, 2, 8) + (2,) * 6 + (4,) * 7),
        ("[256:2,>:4,1024:1]", (2,) * 9 + (4, 1) + (4,) * 5),
        ("[1024:1,4:8,>:2]", (1, 1, 8) + (2,) * 13),
        ("[32768:2,>:4]", (2,) * 16),
        ("[]", (0,) * 16),
    ],
)
def test_divisions_when_listed_then_by_interval_as_in_torch(
    text: str, divisions: tuple[int, ...]
) -> None:
    setting = f"roundup_power2_divisions:{text}"
    assert parse_allocator_settings(setting).roundup_divisions == divisions
    try:
        torch._C._accelerator_setAllocatorSettings(setting)
        assert torchs_divisions() == divisions
    finally:
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:1")


def torchs_divisions() -> tuple[int, ...]:
    """Return what torch has read, of each interval."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = library[
        "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    ]
    divisions_of = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(function)
    return tuple(divisions_of(MIB << interval) for interval in range(ROUNDUP_INTERVALS))


def test_keys_when_they_have_no_effect_then_one_line_each_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unused = [key for key, known in KEYS.items() if known.effect.startswith("none")]
    assert len(unused) == len(KEYS) - 6
    for key in unused:
        settings = parse_allocator_settings(f"{key}:{TABLE[key][0][0]}", variable=f"TEST_{key}")
        report_settings(settings)
        report_settings(settings)
        lines = [line for line in caplog.messages if line.startswith(f"TEST_{key}: ")]
        assert len(lines) == 1
        assert f"{key} has no effect: " in lines[0]
    caplog.clear()
    report_settings(
        parse_allocator_settings(
            "max_split_size_mb:30,page_size:1g,backend:native,open_memory_optimize:0", "npu"
        )
    )
    assert caplog.messages == []


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_page_size_when_the_device_is_no_npu_then_reported_as_without_effect(
    device_type: str,
) -> None:
    settings = read_allocator_settings(device_type, {"PYTORCH_NPU_ALLOC_CONF": "page_size:1g"})
    assert settings.without_effect == (
        "PYTORCH_NPU_ALLOC_CONF: page_size has no effect: devices of type "
        f"{device_type!r} do not have it, 'npu' ones do",
    )


def test_documentation_when_read_then_it_has_the_table_of_keys() -> None:
    assert format_keys() in DOCUMENT.read_text(), (
        "run python -m swapkit.config.allocator_settings for docs/environment.md"
    )


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bogus:1", "unknown key 'bogus'; keys: max_split_size_mb, "),
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
