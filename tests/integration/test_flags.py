"""Flags and environment, one row for each value: what it comes to, and what is said."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from swapkit._native.backend import Backend
from swapkit._native.pool import Pool
from swapkit.config.flags import add_arguments, from_arguments
from swapkit.config.smart_swap import SmartSwapConfig, SwapPolicyPref
from swapkit.errors import InvalidArgument
from tests.support import run_python

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.config.settings import Settings

MIB, GIB = 1 << 20, 1 << 30
DEVICE_BYTES = 8 * GIB
SWAP, SIZE = "--adaptive-recompute-device-swap", "--adaptive-recompute-device-size"
STEPS = f"{SWAP} --train-iters 1000 --adaptive-recompute-profiling-step"
MEMORY, FULL = "--adaptive-memory-optimization", "--recompute-granularity full"
ATTENTION, ACTIVATION = "--swap-attention", "--recompute-activation-function"
FRAGMENTS = "MEMORY_FRAGMENTATION=1"

# Promise, flags and variables, what comes of it (text: the error), and the warnings.
ROWS: list[tuple[str, str, dict[str, Any] | str, list[str]]] = [
    ("A7", "", {"policy": None}, []),
    ("A7", SWAP, {"policy": "recompute"}, []),
    ("A8", SWAP, {"limit": DEVICE_BYTES, "is_fixed_limit": False}, []),
    ("A8", f"{SWAP} {SIZE} -1", {"limit": DEVICE_BYTES, "policy": "recompute"}, []),
    ("A8", f"{SWAP} {SIZE} 0", {"limit": DEVICE_BYTES, "policy": "recompute"}, []),
    ("A8", f"{SWAP} {SIZE} 1000000000", {"limit": DEVICE_BYTES}, []),
    ("A8", f"{SWAP} {SIZE} 1024", {"limit": GIB, "is_fixed_limit": False}, []),
    ("A5", f"{SWAP} {SIZE} 1024", {"searches_threshold": True, "search_steps": None}, []),
    ("A5", f"{SIZE} 1024", {"searches_threshold": False, "profile_steps": 10}, []),
    ("A8", f"{SIZE} 0", {"policy": None}, []),
    ("A9", f"{SIZE} 1024", {"policy": "recompute", "limit": GIB, "is_fixed_limit": True}, []),
    ("A10", SWAP, {"profile_steps": 10}, []),
    ("A10", f"{STEPS} 10", {"profile_steps": 10}, []),
    ("A10", f"{STEPS} 5", {"profile_steps": 5}, []),
    ("A10", f"{STEPS} 100", {"profile_steps": 100}, []),
    ("A10", f"{STEPS} 0", {"profile_steps": 10}, ["step=0: expected more than 0; using 10"]),
    ("A10", f"{STEPS} -3", {"profile_steps": 10}, ["step=-3: expected more than 0; using 10"]),
    ("A10", f"{STEPS} 4", {"profile_steps": 4}, ["step=4: at least 5 are recommended"]),
    (
        "A10",
        f"{STEPS} 101",
        {"profile_steps": 101},
        ["step=101: measuring 101 of the 1000 training st"],
    ),
    ("A10", f"{STEPS} 2000", {"profile_steps": 2000}, ["step=2000: measuring 2000 of the 1000"]),
    ("A13", f"{SWAP} {FULL}", f"{SWAP} and {FULL} exclude each other", []),
    (
        "A13",
        f"{SWAP} --recompute-granularity selective",
        f"{SWAP} and --recompute-granularity s",
        [],
    ),
    ("A13", f"{SWAP} --recompute-method block", f"{SWAP} and --recompute-method block excl", []),
    ("A13", f"{SWAP} {ACTIVATION}", f"{SWAP} and {ACTIVATION} exclude each other", []),
    ("A13", f"{SWAP} {ATTENTION}", f"{SWAP} and {ATTENTION} exclude each other", []),
    ("A13", f"{SWAP} --recompute-in-bubble", f"{SWAP} and --recompute-in-bubble exclude", []),
    ("A13", f"{SWAP} --recompute-in-advance", f"{SWAP} and --recompute-in-advance exclude", []),
    ("A13", f"{SIZE} 1024 {ATTENTION}", f"{SIZE} and {ATTENTION} exclude each other", []),
    ("A13", f"{SWAP} --memory-fragmentation", f"{SWAP} and --memory-fragmentation exclude", []),
    ("A13", f"{FRAGMENTS} {SWAP}", f"{SWAP} and {FRAGMENTS} exclude each other", []),
    ("A13", f"{SWAP} --smart-swap", f"{SWAP} and --smart-swap exclude each other", []),
    ("A13", f"{SIZE} 0 {ATTENTION}", {"policy": None}, []),
    ("A14", "MIN_SWAP_TENSOR_SIZE=1048576", {"min_swap_bytes": MIB}, []),
    ("A14", "MIN_SWAP_TENSOR_SIZE=1MiB", {"min_swap_bytes": MIB}, []),
    (
        "A14",
        "MIN_SWAP_TENSOR_SIZE=512",
        {"min_swap_bytes": 1024},
        ["MIN_SWAP_TENSOR_SIZE='512': expected"],
    ),
    (
        "A14",
        "MIN_SWAP_TENSOR_SIZE=abc",
        {"min_swap_bytes": 1024},
        ["'abc': expected a number of at l"],
    ),
    ("A15", "SWAP_SIZE_MULTIPLE=3", {"policy": None}, []),  # a session reads it itself
    (
        "A15",
        "SWAP_SIZE_MULTIPLE=0",
        {"policy": None},
        ["SWAP_SIZE_MULTIPLE='0': expected a number"],
    ),
    ("A15", "SWAP_SIZE_MULTIPLE=two", {"policy": None}, ["SWAP_SIZE_MULTIPLE='two': expected a n"]),
    ("C9", "--smart-swap", {"policy": "swap", "smart_swap": SmartSwapConfig()}, []),
    ("C9", "--smart-swap", {"limit": DEVICE_BYTES, "profile_steps": 2, "search_steps": None}, []),
    ("C7", "--smart-swap --smart-swap-config {folder}/target.json", {"limit": GIB}, []),
    (
        "C1",
        "--smart-swap --smart-swap-config {folder}/steps.json",
        {"profile_steps": 4, "search_steps": 6},
        [],
    ),
    ("C9", "--smart-swap --smart-swap-config {folder}/absent.yaml", "cannot read it", []),
    (
        "C9",
        "--smart-swap --smart-swap-config {folder}/bad.json",
        "SmartSwap has no field no_such",
        [],
    ),
    ("C9", "--smart-swap-config {folder}/ok.json", {"smart_swap": None}, ["without --smart-swap"]),
    (
        "C10",
        "--smart-swap --smart-swap-config {folder}/ok.json",
        {
            "smart_swap": SmartSwapConfig(policy_pref=SwapPolicyPref.BETTER_MEMORY_SAVING),
            "swap_optimizer": True,
        },
        [],
    ),
    ("C10", "--smart-swap", {"swap_optimizer": False}, []),
    ("D5", MEMORY, {"policy": "auto", "limit": DEVICE_BYTES, "profile_steps": None}, []),
    ("D8", MEMORY, {"bind_cpus": True}, []),
    ("D8", "--smart-swap CPU_BINDING_NUM=1", {"bind_cpus": False}, []),
    ("D6", f"{MEMORY} {FULL}", f"{MEMORY} and {FULL} exclude each other: the first plans", []),
    ("D6", f"{MEMORY} {SWAP}", f"{SWAP} and {MEMORY} exclude each other: only one", []),
    ("D6", f"{MEMORY} {ATTENTION}", f"{MEMORY} and {ATTENTION} exclude each other", []),
    ("D6", f"{MEMORY} --recompute-in-bubble", f"{MEMORY} and --recompute-in-bubble", []),
    ("D6", f"{MEMORY} --memory-fragmentation", f"{MEMORY} and --memory-fragmentation", []),
    ("D6", f"{FRAGMENTS} {MEMORY}", f"{MEMORY} and {FRAGMENTS} exclude each other", []),
    ("D6", f"{MEMORY} --smart-swap", f"{MEMORY} and --smart-swap exclude each other", []),
    ("D6", f"{MEMORY} {ACTIVATION}", {"policy": "auto", "parts": 1}, []),  # here it is fine
    ("E5", FRAGMENTS, {"memory_fragmentation": True}, []),
    ("E5", "--memory-fragmentation", {"memory_fragmentation": True}, []),
    ("E5", "MEMORY_FRAGMENTATION=0", {"memory_fragmentation": False}, []),
    (
        "E5",
        "MEMORY_FRAGMENTATION=on",
        {"memory_fragmentation": False},
        ["'on': expected a number fr"],
    ),
    ("parity", "ADAPTIVE_RECOMPUTING=1 CPU_AFFINITY_CONF=1 reuseLimit=2", {"policy": None}, []),
    ("parity", ATTENTION, {"parts": 3}, []),
    ("parity", f"{ATTENTION} --swap-modules a,,b", "--swap-modules='a,,b': expected names", []),
    ("parity", "--swap-layer-input", {"parts": 0}, ["--swap-layer-input has no effect without"]),
    ("parity", "--swap-optimizer", {"swap_optimizer": True}, []),
    (
        "parity",
        "--swap-optimizer --swap-optimizer-times 4",
        {"swap_optimizer": True},
        ["-times has"],
    ),
    ("parity", "--swap-optimizer --swap-optimizer-times -1", "times=-1: expected at least 0", []),
    ("parity", "--virtual-optimizer all", {"swap_optimizer": True}, []),
    ("parity", "--virtual-optimizer 4 2", {"swap_optimizer": True}, ["between steps, of any size"]),
    ("parity", "--virtual-optimizer 0", "--virtual-optimizer: expected 'all' or numbers", []),
    ("parity", FULL, {"parts": 1}, []),
    (
        "parity",
        f"{FULL} --recompute-num-layers 0",
        "--recompute-num-layers=0: expected at leas",
        [],
    ),
    ("parity", "--recompute-num-layers 2", {"parts": 0}, ["--recompute-num-layers has no effect"]),
    ("parity", "--recompute-method block", {"parts": 0}, ["--recompute-method has no effect with"]),
    (
        "parity",
        "--recompute-granularity selective --recompute-method block",
        "--recompute-granularity selective and --recompute-method block exclude each other",
        [],
    ),
    (
        "parity",
        "--recompute-granularity selective --recompute-num-layers 2",
        {"parts": 1},
        ["--recompute-num-layers has no effect without"],
    ),
    ("parity", f"{ACTIVATION}-num-layers -1", f"{ACTIVATION}-num-layers=-1: expected at lea", []),
    ("parity", f"{ACTIVATION}-num-layers 1", {"parts": 0}, [f"has no effect without {ACTIVATION}"]),
    ("parity", "--recompute-module-list 1,x", "--recompute-module-list='1,x': expected a nu", []),
    (
        "parity",
        "--recompute-module-list 1 --recompute-type 3",
        "--recompute-type=3: expected 0 (mlp), 1 (attention), 2 (layer)",
        [],
    ),
    ("parity", "--compress-optimizer", {"policy": None}, ["--compress-optimizer has no effect: s"]),
]


def promised(row: tuple[Any, ...]) -> Any:
    marks = [] if row[0] == "parity" else [pytest.mark.promise(row[0])]
    return pytest.param(*row[1:], marks=marks, id=f"{row[0]} {row[1]}")


def ask(line: str) -> Settings:
    """Return what flags, and variables as NAME=VALUE before them, come to."""
    words = line.split()
    variables = dict(word.split("=") for word in words if not word.startswith("-") and "=" in word)
    parser = add_arguments(argparse.ArgumentParser())
    parser.add_argument("--train-iters", type=int)
    flags = [word for word in words if word.partition("=")[0] not in variables]
    return from_arguments(parser.parse_args(flags), variables=variables)


def look_up(settings: Settings, name: str) -> object:
    if name == "limit":
        return settings.resolve_limit(DEVICE_BYTES)
    return len(settings.document) if name == "parts" else getattr(settings, name)


@pytest.mark.parametrize(("line", "outcome", "said"), [promised(row) for row in ROWS])
def test_flags_when_given_then_the_effective_values_and_what_is_said(
    line: str, outcome: dict[str, Any] | str, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "ok.json").write_text('{"policy_pref": "BETTER_MEMORY_SAVING"}')
    (tmp_path / "bad.json").write_text('{"no_such": 1}')
    (tmp_path / "target.json").write_text('{"target_mode": true, "target_memory": "1GiB"}')
    (tmp_path / "steps.json").write_text('{"warmup_step": 4, "stable_step": 10}')
    line = line.format(folder=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(outcome, str):
            with pytest.raises(InvalidArgument) as raised:
                ask(line)
            assert outcome in str(raised.value)
        else:
            settings = ask(line)
            assert {name: look_up(settings, name) for name in outcome} == outcome
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(said)
    assert all(part in text for part, text in zip(said, texts, strict=True))


@pytest.mark.parametrize("line", [f"{SIZE} many", f"{SWAP}=yes", "--recompute-method some"])
def test_flags_when_of_another_kind_then_the_parser_refuses(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ask(line)
    assert line.split(maxsplit=1)[0].partition("=")[0] in capsys.readouterr().err


# ---- the allocator's settings, in a process of their own -----------------------------------------

SHOW = """
import swapkit, torch
swapkit.install()
torch.ones(8 << 20).sum()
stats = swapkit.memory_stats()
print(stats["max_split_size"], stats["expandable_segments"])
"""
WHOLE = "expandable_segments:False"


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "-1 1"),
        ({"PYTORCH_NPU_ALLOC_CONF": WHOLE}, "-1 0"),
        ({"PYTORCH_NPU_ALLOC_CONF": f"max_split_size_mb:64,{WHOLE}"}, f"{64 * MIB} 0"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "-1 1"),  # no need in ranges
        ({"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_NPU_ALLOC_CONF": WHOLE}, "-1 1"),
    ],
)
def test_allocator_when_the_environment_speaks_then_memory_stats_show_it(
    variables: dict[str, str], shown: str
) -> None:
    assert run_python(SHOW, timeout_s=60, **variables).strip() == shown


@pytest.mark.promise("A16")
def test_allocator_when_the_threshold_is_passed_then_memory_goes_back_before_the_limit() -> None:
    printed = run_python(
        """
        import swapkit, torch
        swapkit.install("256MiB")
        def fill(nbytes): return torch.empty(nbytes, dtype=torch.uint8)
        first, second = fill(100 << 20), fill(60 << 20)
        del first
        third = fill(101 << 20)
        stats = swapkit.memory_stats()
        print(stats["num_garbage_collections"], stats["num_alloc_retries"])
        """,
        PYTORCH_ALLOC_CONF="garbage_collection_threshold:0.5",
    )
    assert printed.split() == ["1", "0"]


@pytest.mark.promise("A16")
def test_allocator_when_a_key_is_unknown_then_install_refuses_and_works_once_it_is_mended() -> None:
    printed = run_python(
        """
        import os, swapkit, torch
        try:
            swapkit.install()
        except swapkit.SwapkitError as error:
            print(error)
        os.environ["PYTORCH_NPU_ALLOC_CONF"] = ""
        swapkit.install()
        print(torch.ones(4).sum().item(), swapkit.memory_stats()["expandable_segments"])
        """,
        PYTORCH_NPU_ALLOC_CONF="no_such_key:1",
    )
    first, second = printed.splitlines()
    assert first.startswith("PYTORCH_NPU_ALLOC_CONF: unknown key 'no_such_key'; keys: ")
    assert second == "4.0 1"


@pytest.mark.promise("A16")
def test_training_when_segments_are_whole_then_the_same_numbers_inside_the_budget() -> None:
    program = """
        import swapkit, torch
        swapkit.install()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(65536, 64)  # 16 MiB
        with swapkit.budget("128MiB", model, optimizer) as session:
            for _ in range(2):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        stats = session.stats
        assert 0 < stats.swapped_out_bytes and stats.peak_bytes <= stats.budget_bytes
        print(loss.item().hex())
        """
    ranges = run_python(program)
    assert run_python(program, PYTORCH_ALLOC_CONF=f"{WHOLE},max_split_size_mb:24") == ranges


# ---- a share of the device -----------------------------------------------------------------------


@pytest.mark.promise("E7")
def test_limit_when_a_share_of_the_device_then_respected_and_more_fails() -> None:
    printed = run_python(
        """
        import swapkit, torch
        swapkit.install(0.94)
        whole = swapkit.memory_stats()["budget_bytes"] / 0.94
        try:
            torch.empty(int(whole * 0.95), dtype=torch.uint8)
        except torch.OutOfMemoryError:
            print("refused")
        swapkit.install(64 << 20)
        kept = torch.empty(32 << 20, dtype=torch.uint8)
        try:
            torch.empty(40 << 20, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            print(swapkit.memory_stats()["reserved_bytes.all.peak"] <= 64 << 20)
        """
    )
    assert printed.split() == ["refused", "True"]


@pytest.mark.promise("A16")
@pytest.mark.parametrize("whole", [False, True])
def test_split_limit_when_a_large_block_is_free_then_whole_segments_keep_it(*, whole: bool) -> None:
    with Backend.cpu(capacity_bytes=256 * MIB) as backend:
        pool = Pool(backend, whole_segments=whole, max_split_bytes=32 * MIB)
        with pool:
            large = pool.take(40 * MIB)
            pool.give(large)
            small = pool.take(4 * MIB)
            assert (small == large) is not whole
            assert pool.stats()["max_split_size"] == (32 * MIB if whole else -1)
            pool.give(small)
