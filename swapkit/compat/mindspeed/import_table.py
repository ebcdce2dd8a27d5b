"""Where swapkit provides MindSpeed's names, and what replaces those that it does not provide.

Source:
    MindSpeed, branches `core_r0.8.0` and `master`: the paths and the names.
"""

from __future__ import annotations

ROOT = "mindspeed"
_MEMORY = f"{ROOT}.core.memory"
_OURS = "swapkit.compat.mindspeed"
_CONFIG = "swapkit.config.smart_swap"

# MindSpeed's module -> name -> (module, name) that provides it.
MODULES: dict[str, dict[str, tuple[str, str]]] = {
    f"{_MEMORY}.adaptive_memory.adaptive_memory_function": {
        "adapt_mem_func_wrapper": ("swapkit", "adapt_mem_func_wrapper"),
    },
    f"{_MEMORY}.adaptive_memory.adaptive_memory_opt": {
        "addup_allowed_mem_adapt_module": (f"{_OURS}.layer_classes", "accept_module_class"),
    },
    f"{_MEMORY}.adaptive_recomputing.adaptive_recompute": {
        "allowed_recomputing_module_wrapper": (f"{_OURS}.layer_classes", "accept_module_class"),
    },
    f"{_MEMORY}.smart_swap.swap_policy_config": {
        "SwapPolicyConfig": (_CONFIG, "SwapPolicyConfig"),
        "SwapPolicyPref": (_CONFIG, "SwapPolicyPref"),
        "swap_policy_config": (_CONFIG, "swap_policy_config"),
    },
    f"{_MEMORY}.smart_swap.swap_manager": {
        "SwapManager": (f"{_OURS}.swap_manager", "start_swap_manager"),
    },
    f"{_MEMORY}.smart_swap.swap_cpp_adaptor": {
        "ProfilerDataOneStep": (f"{_OURS}.step_profile", "ProfilerDataOneStep"),
        "ProfilerOpInfo": (f"{_OURS}.step_profile", "ProfilerOpInfo"),
        "SwapPolicy": (f"{_OURS}.swap_policy", "SwapPolicy"),
        "SwapPolicyCandidate": (f"{_OURS}.swap_policy", "SwapPolicyCandidate"),
        "SwapStage": (f"{_OURS}.swap_stages", "SwapStage"),
        "SwapStageType": (f"{_OURS}.swap_stages", "SwapStageType"),
        "TensorInfoDetail": (f"{_OURS}.step_profile", "TensorInfoDetail"),
    },
}
for _package in (f"{ROOT}.fsdp.memory", f"{ROOT}.lite.memory"):
    _adamw = {"AdamWSwap": (f"{_OURS}.swapped_adamw", "AdamWSwap")}
    MODULES |= {
        f"{_package}.recompute.recompute": {
            "recompute_modules": (f"{_OURS}.chosen_modules", "recompute_modules"),
        },
        f"{_package}.swap_activation.swap_activation": {
            "swap_activation_modules": (f"{_OURS}.chosen_modules", "swap_activation_modules"),
        },
        f"{_package}.swap_activation.tensor_swap_manager": {
            "TensorSwapContext": (f"{_OURS}.swap_context", "TensorSwapContext"),
        },
        f"{_package}.swap_optimizer": _adamw,
        f"{_package}.swap_optimizer.swap_optimizer": _adamw,
    }
# All provided names, as attributes of `swapkit.compat.mindspeed`.
PROVIDED = {name: where for names in MODULES.values() for name, where in names.items()}

BUDGET = "with swapkit.budget(limit, model, optimizer):"
_TRAIN = f"train inside `{BUDGET}`"
_TRACE = "read `session.trace` of `swapkit.budget`"
# Commonly imported modules that have no replacement here, each with an alternative.
WITHOUT_COUNTERPART = {
    f"{ROOT}.megatron_adaptor": "swapkit does not patch frameworks: call swapkit.install()",
    f"{_MEMORY}.adaptive_recomputing.swap_manager": f"{_TRAIN}, which rescues",
    f"{_MEMORY}.adaptive_recomputing.pluggable_allocator_adpator": "call swapkit.install()",
    f"{_MEMORY}.smart_swap.swap_engine": f"{_TRAIN} with policy='swap'",
    f"{_MEMORY}.memory_fragmentation.memory_recorder": (
        "swapkit's pool has no recorder: call swapkit.install(lifetimes=True)"
    ),
    f"{_MEMORY}.swap_attention.prefetch": "use swapkit.offload(model, pattern)",
    f"{ROOT}.core.optimizer.swap_optimizer.swap_optimizer": "use swapkit.offload(optimizer)",
}
# Names that have no replacement, each with an alternative.
NAMES_WITHOUT_COUNTERPART = {
    "NPUSwapManager": (
        "this is a C++ class: swapkit's C++ header has its hooks (BeginHook, TensorHook, PostHook, "
        "EndHook) for custom operators. In Python, operators that torch dispatches need no hooks; "
        "announce other kernels by swapkit.op"
    ),
    "AsyncSwapHandler": "use TensorSwapContext or `with swapkit.offload():`",
    "PolicyResult": f"{_TRAIN}; `session.save_plan(path)` writes the plan",
    "ProfilerSwapInfo": f"{_TRAIN}; `session.stats` counts its copies",
    "SwapConfig": f"{_TRAIN}; its arguments and swap_policy_config replace this state",
    "SwapEngine": f"{_TRAIN} with policy='swap', or an object with plan(trace, machine)",
    "SwapOptimizerOperate": "use swapkit.offload(optimizer)",
    "get_smart_swap_cpp": f"{_TRAIN}; swapkit has no such extension",
    "ProfilerLayerInfo": _TRACE,
    "record_tensor_ptr_with_types": "swapkit identifies states and buffers without help",
}


def advise(path: str, name: str = "") -> str:
    """Return a sentence with an alternative to a module, or to a name in it."""
    instead = NAMES_WITHOUT_COUNTERPART.get(name)
    if instead is None:
        instead = WITHOUT_COUNTERPART.get(path, _TRAIN)
    return f"{instead[0].upper()}{instead[1:]}. {_OURS}.MODULES lists the names that it has."
