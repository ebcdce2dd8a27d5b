"""Every name of the originals' interface: provided, accepted, or refused with advice."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import swapkit
from swapkit.compat import mindspeed
from swapkit.compat.mindspeed.import_hook import NAMES_WITHOUT_COUNTERPART, PROVIDED
from swapkit.config import environment, flags
from swapkit.config.allocator_settings import parse_allocator_settings
from swapkit.config.mindformers import documents
from swapkit.config.smart_swap import SmartSwapConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = Path(environment.__file__).parent
MEMORY = "mindspeed.core.memory"
SWAP_CPP = f"{MEMORY}.smart_swap.swap_cpp_adaptor"
# Statement, and the attributes that what it imports last has.
PROVIDED_BY = [
    (f"from {MEMORY}.adaptive_memory.adaptive_memory_function import adapt_mem_func_wrapper", ""),
    (
        f"from {MEMORY}.adaptive_memory.adaptive_memory_opt import addup_allowed_mem_adapt_module",
        "",
    ),
    (
        f"from {MEMORY}.adaptive_recomputing.adaptive_recompute import "
        "allowed_recomputing_module_wrapper",
        "",
    ),
    (f"from {MEMORY}.smart_swap.swap_manager import SwapManager", ""),
    (
        f"from {MEMORY}.smart_swap.swap_policy_config import swap_policy_config",
        "policy_v2 policy_pref swap_bucket_size num_attn_layers_per_stage warmup_step stable_step "
        "op_diff_thresh target_mode reduction_memory target_memory redundant_memory adjust_memory "
        "tensor_size_filter tensor_size_thresh D2H_bandwidth H2D_bandwidth free_stage_delay "
        "swap_in_free_stage_delay size_coverage_weight adjust_size_coverage_weight "
        "adjust_step_duration enable_custom_record_stream save_policy save_profiler_data "
        "output_root_path print_level print_rank",
    ),
    (
        f"from {MEMORY}.smart_swap.swap_policy_config import SwapPolicyPref",
        "BETTER_PERFORMANCE BETTER_MEMORY_SAVING",
    ),
    (f"from {SWAP_CPP} import SwapPolicy", "get_candidates set_candidates get_profiler_data"),
    (
        f"from {SWAP_CPP} import SwapPolicyCandidate",
        "set_device_to_host_stage set_device_to_host_free_stage set_host_to_device_stage "
        "set_host_to_device_free_stage get_device_to_host_stage get_host_to_device_stage",
    ),
    (
        f"from {SWAP_CPP} import ProfilerDataOneStep",
        "get_next_op_info get_prev_op_info get_next_stage get_prev_stage get_first_op_info "
        "get_last_op_info get_all_op_info",
    ),
    *(
        (f"from mindspeed.{line}.memory.{path} import {name}", attributes)
        for line in ("fsdp", "lite")
        for path, name, attributes in (
            (
                "swap_activation.tensor_swap_manager",
                "TensorSwapContext",
                "set_custom_check_fn layer_nums",
            ),
            ("swap_activation.swap_activation", "swap_activation_modules", ""),
            ("recompute.recompute", "recompute_modules", ""),
            ("swap_optimizer", "AdamWSwap", "step state_dict"),
        )
    ),
]
REFUSED = [
    (f"from {SWAP_CPP} import NPUSwapManager", "C\\+\\+ header .*BeginHook.*swapkit.op"),
    ("from swapkit.compat.mindspeed import NPUSwapManager", "C\\+\\+ header"),
    (f"from {SWAP_CPP} import SwapConfig", "swapkit.budget"),
    (f"from {SWAP_CPP} import get_smart_swap_cpp", "swapkit has no such extension"),
    (f"import {MEMORY}.smart_swap.swap_engine", "policy='swap'"),
    (f"import {MEMORY}.adaptive_recomputing.swap_manager", "which rescues"),
    (f"import {MEMORY}.memory_fragmentation.memory_recorder", "swapkit.install"),
    (
        "from mindspeed.fsdp.memory.swap_activation.tensor_swap_manager import AsyncSwapHandler",
        "TensorSwapContext",
    ),
]
FLAGS = [
    "adaptive-recompute-device-swap",
    "adaptive-recompute-device-size",
    "adaptive-recompute-profiling-step",
    "adaptive-memory-optimization",
    "smart-swap",
    "swap-attention",
    "swap-modules",
    "swap-layer-input",
    "swap-optimizer",
    "swap-optimizer-times",
    "virtual-optimizer",
    "memory-fragmentation",
    "recompute-activation-function",
    "recompute-activation-function-num-layers",
    "recompute-norm",
    "recompute-norm-num-layers",
    "enable-recompute-layers-per-pp-rank",
    "recompute-in-bubble",
    "recompute-in-advance",
    "moe-adaptive-recompute-activation",
    "moe-adaptive-recompute-activation-scale",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "automated-pipeline",
    "save-memory-ratio",
    "num-layer-list",
    "recompute-module-list",
    "recompute-type",
    "compress-dense",
    "compress-activation",
    "compress-optimizer",
    "reuse-fp32-param",
]
READ_VARIABLES = {
    "MIN_SWAP_TENSOR_SIZE": "2048",
    "SWAP_SIZE_MULTIPLE": "2",
    "MEMORY_FRAGMENTATION": "1",
    "SWAP_LOG_LEVEL": "1",
    "SWAP_LOG_RANK": "0",
}
OTHER_VARIABLES = [
    "ADAPTIVE_RECOMPUTING",
    "CPU_BINDING_NUM",
    "CPU_AFFINITY_CONF",
    "vmmDefragment",
    "reuseLimit",
    "fragLimit",
    "reAlloc",
    "defragLevel",
    "autoGC",
    "gc_thresh",
    "TORCH_EXTENSIONS_DIR",
    "LD_LIBRARY_PATH",
    "ENABLE_LAZY_INLINE_NO_PIPELINE",
    "MS_MEMORY_STATISTIC",
    "GLOG_v",
]
ALLOCATOR_KEYS = [
    "max_split_size_mb:64",
    "garbage_collection_threshold:0.8",
    "expandable_segments:True",
    "default_lc_threshold:1024",
    "open_memory_optimize:1",
]
DOCUMENT = """
context: {memory_optimize_level: O1}
recompute_config:
  recompute: True
  select_recompute: False
  select_comm_recompute: False
  parallel_optimizer_comm_recompute: False
  mp_comm_recompute: True
  recompute_slice_activation: False
swap_config:
  swap: True
  default_prefetch: 2
  layer_swap: [{backward_prefetch: 3, layers: [0]}]
  op_swap: [{op_name: '.*', backward_prefetch: 1, layers: True}]
"""


@pytest.fixture(autouse=True)
def _provided() -> Iterator[None]:
    mindspeed.install()
    yield
    mindspeed.uninstall()


@pytest.mark.parametrize(("statement", "attributes"), PROVIDED_BY)
def test_python_name_when_imported_as_in_the_original_then_provided(
    statement: str, attributes: str
) -> None:
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    name = statement.rpartition(" ")[2]
    assert [each for each in attributes.split() if not hasattr(namespace[name], each)] == []
    assert getattr(mindspeed, name) is namespace[name]


@pytest.mark.parametrize(("statement", "advice"), REFUSED)
def test_name_when_swapkit_does_not_provide_it_then_one_error_says_what_to_use(
    statement: str, advice: str
) -> None:
    with pytest.raises(ImportError, match=rf"(?s){advice}"):
        exec(statement, {})


def test_names_when_listed_then_none_is_provided_and_refused() -> None:
    assert PROVIDED.keys().isdisjoint(NAMES_WITHOUT_COUNTERPART)
    for owner, attribute in PROVIDED.values():
        assert hasattr(importlib.import_module(owner), attribute)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        mindspeed.NoSuchName  # noqa: B018 - reads it


def test_flags_when_listed_then_all_are_accepted() -> None:
    parser = swapkit.add_arguments(argparse.ArgumentParser())
    parsed = vars(parser.parse_args([]))
    assert [flag for flag in FLAGS if flag.replace("-", "_") not in parsed] == []
    assert set(flags.WITHOUT_COUNTERPART) <= set(FLAGS)


def test_variables_when_set_then_read_or_reported_as_without_effect() -> None:
    usual = environment.read_environment({})
    for name, value in READ_VARIABLES.items():
        if name != "SWAP_LOG_RANK":
            assert environment.read_environment({name: value}) != usual, name
    assert environment.read_environment({"SWAP_LOG_RANK": "0"}).log_rank == 0
    sources = "".join(each.read_text() for each in CONFIG.rglob("*.py"))
    assert [name for name in OTHER_VARIABLES if name not in sources] == []
    for text in ALLOCATOR_KEYS:
        parse_allocator_settings(text)


def test_document_when_it_has_all_keys_of_the_original_then_read() -> None:
    read = documents.read_document(DOCUMENT)
    assert read is not None


def test_policy_fields_when_listed_then_all_of_the_configuration() -> None:
    listed = next(each for statement, each in PROVIDED_BY if statement.endswith("_config"))
    fields = set(SmartSwapConfig.__dataclass_fields__) - {"named"}
    assert set(listed.split()) == fields
