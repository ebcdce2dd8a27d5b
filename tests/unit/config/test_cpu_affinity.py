"""CPU_AFFINITY_CONF and CPU_BINDING_NUM are read as torch_npu and MindSpeed read them."""

from __future__ import annotations

import pytest

from swapkit.config.environment import NO_AFFINITY, CpuAffinity, read_cpu_affinity, read_environment


@pytest.mark.promise("D8")
@pytest.mark.parametrize(
    ("text", "mode", "ranges"),
    [
        ("0", 0, {}),
        ("1", 1, {}),
        ("mode:2", 2, {}),
        ("1,lazy_bind:0", 1, {}),
        ("2,npu_affine:1,force:1", 2, {}),
        ("1,npu0:0-2", 1, {0: {0, 1, 2}}),
        ("mode:1,npu0:5,npu0:8-9,npu11:3-3", 1, {0: {5, 8, 9}, 11: {3}}),
        ("1,", 1, {}),
        ("1,force", 1, {}),
        (" 1 , npu1:0-1 ", 1, {1: {0, 1}}),
        ("lazy_bind:1", 0, {}),
    ],
)
def test_conf_when_valid_then_its_mode_and_ranges(
    text: str, mode: int, ranges: dict[int, set[int]]
) -> None:
    read = read_cpu_affinity({"CPU_AFFINITY_CONF": text})
    assert read == CpuAffinity(mode=mode, ranges={i: frozenset(r) for i, r in ranges.items()})
    assert read.is_asked == (mode > 0)
    assert read.is_refused == (mode == 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode:on", "mode:on: expected a number"),
        ("3", "3: expected a number from 0 to 2"),
        ("mode:12", "mode:12: expected a number from 0 to 2"),
        ("on", "ignoring 'on': expected npuN:FIRST-LAST"),
        ("1,lazybind", "ignoring 'lazybind'"),
        ("1,npu0", "ignoring 'npu0'"),
        ("1,npu0:3-1", "ignoring 'npu0:3-1'"),
        ("1,npu:0-3", "ignoring 'npu:0-3'"),
        ("1,npu0:all", "ignoring 'npu0:all'"),
        ("1,gpu0:0-3", "ignoring 'gpu0:0-3'"),
        ("npu0:0-3", "is off: begin it with the mode"),
        ("1,npu0:-1", "ignoring 'npu0:-1'"),
    ],
)
def test_conf_when_a_part_is_invalid_then_a_warning_and_the_rest(text: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        read = read_cpu_affinity({"CPU_AFFINITY_CONF": text})
    assert read.ranges == ({0: {0, 1, 2, 3}} if text == "npu0:0-3" else {})
    assert read.mode == (1 if text.startswith("1") else 0)
    assert read.is_asked == text.startswith("1")


@pytest.mark.promise("D8")
def test_binding_num_when_a_number_then_that_many_cpus() -> None:
    read = read_environment({"CPU_BINDING_NUM": "12"}).cpu_affinity
    assert read == CpuAffinity(cpus_per_device=12)
    assert read.is_asked
    assert not read.is_refused


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", "²"])
def test_binding_num_when_it_is_no_number_then_a_warning_and_no_binding(text: str) -> None:
    with pytest.warns(UserWarning, match="CPU_BINDING_NUM="):
        assert read_cpu_affinity({"CPU_BINDING_NUM": text}) == NO_AFFINITY
    assert not NO_AFFINITY.is_asked
    assert not NO_AFFINITY.is_refused


def test_conf_when_off_then_it_beats_the_number() -> None:
    read = read_cpu_affinity({"CPU_AFFINITY_CONF": "0", "CPU_BINDING_NUM": "4"})
    assert not read.is_asked
    assert read.is_refused
