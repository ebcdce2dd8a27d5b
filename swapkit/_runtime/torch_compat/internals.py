"""Torch's private names, with `compilers.py`: each gets a name of swapkit's own, and its use.

`tests/unit/_runtime/torch_compat/test_internals.py` checks each name in the installed torch, and
checks that the rest of swapkit uses no other private names. C++ does the same in `shim/cpp/`: it
includes torch's headers, and declares the missing names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction as NoFunctionModes
from torch._C import DispatchKey
from torch._C import _current_autograd_node as current_node
from torch._C import _current_graph_task_id as graph_task
from torch._C import _DisableFuncTorch as NoTransforms
from torch._C import _DisableTorchDispatch as NoDispatchModes
from torch._C import _dispatch_get_all_op_names as all_operator_names
from torch._C import _dispatch_has_kernel as has_kernel
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for
from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_key_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as set_key_excluded
from torch._C import _get_dispatch_mode as mode_of_kind
from torch._C import _get_dispatch_stack_at as mode_at
from torch._C import _get_tracing_state as tracing_state

# `torch.inference_mode`, without a Python frame that could keep its guard alive.
from torch._C import _InferenceMode as InferenceMode
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as count_modes
from torch._C import _pop_torch_dispatch_stack as pop_mode
from torch._C import _push_on_torch_dispatch_stack as push_mode
from torch._C import _set_deterministic_algorithms as set_deterministic
from torch._C import _SetExcludeDispatchKeyGuard as ExcludeKey
from torch._C import _storage_Use_Count as storage_use_count
from torch._C import _TorchDispatchModeKey as ModeKind
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._C._functorch import peek_interpreter_stack as innermost_transform
from torch._library import simple_registry
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.node import _side_effectful_functions as side_effects
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # noqa: PLC0414 - re-exported

__all__ = [
    "ADDING_CALLS",
    "ANY_HOOK_CHECK",
    "AROUND_MODULE_CALL",
    "CHANGING_CALLS",
    "CXX11_ABI",
    "DISABLE_CALL",
    "ENABLE_CALL",
    "ENGINE_CALL",
    "MODULE_CALL",
    "MODULE_HOOK_TABLES",
    "MOVING_CALL",
    "NO_TASK",
    "OPTIMIZER_HOOK_TABLES",
    "C",
    "DispatchKey",
    "ExcludeKey",
    "FakeTensor",
    "FrameAction",
    "FrameStrategy",
    "HigherOrderOperator",
    "InferenceMode",
    "ModeKind",
    "NoDispatchModes",
    "NoFunctionModes",
    "NoTransforms",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "abort_groups",
    "add_hook",
    "all_operator_names",
    "autograd",
    "backward_class_of",
    "base_of",
    "buffers_of",
    "connect_again",
    "count_collectives",
    "count_modes",
    "cuda_allocator",
    "current_node",
    "default_store",
    "destroy_library",
    "disabled_dispatch",
    "engine",
    "file_writer",
    "fix_weak_storage",
    "forget_removed_hooks",
    "free_weak_storage",
    "fsdp_groups_of",
    "fsdp_state_of",
    "get_shard",
    "graph_task",
    "group_stores",
    "has_backward_hook",
    "has_compiled",
    "has_kernel",
    "has_kernel_for",
    "has_python_key",
    "has_storage",
    "higher_order_operators",
    "hooks_disabled_message",
    "innermost_transform",
    "is_cow",
    "is_dual_level_open",
    "is_fsdp_idle",
    "is_key_excluded",
    "is_tracing",
    "is_zero_tensor",
    "keeps_graph",
    "keys_to_fall_through",
    "mode_at",
    "mode_of_kind",
    "module_hooks",
    "nodes_made",
    "npu_functions",
    "observe_cuda_out_of_memory",
    "optimizer_hooks",
    "overload_of",
    "parameters_of",
    "pop_hooks",
    "pop_mode",
    "push_hooks",
    "push_mode",
    "pytree",
    "schema_of",
    "set_backward_class",
    "set_code_exec_strategy",
    "set_deterministic",
    "set_key_excluded",
    "set_shard",
    "side_effects",
    "simple_registry",
    "step_pre_hooks_of",
    "storage_address",
    "storage_from_weak",
    "storage_id",
    "storage_use_count",
    "submodules_of",
    "top_hooks",
    "tracing_state",
    "version_of",
    "weak_storage",
]

# ---- autograd -----------------------------------------------------------------------------------

NO_TASK = -1  # `graph_task()` outside of a backward pass
autograd: Any = torch._C._autograd
push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = (
    autograd._push_saved_tensors_default_hooks
)
pop_hooks: Callable[[], None] = autograd._pop_saved_tensors_default_hooks
# The pair on top of this thread's stack; None: no pair. True: also where hooks are disabled.
top_hooks: Callable[[bool], tuple[Any, Any] | None] = autograd._top_saved_tensors_default_hooks
# Why hooks are disabled; None: they are not.
hooks_disabled_message: Callable[[], str | None] = (
    autograd._saved_tensors_hooks_get_disabled_error_message
)
# Whether the current backward pass keeps its graph (`retain_graph`).
keeps_graph: Callable[[], bool] = autograd._get_current_graph_task_keep_graph
nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
engine: Any = torch.autograd.Variable._execution_engine
# The function in `torch.autograd` that calls the engine.
ENGINE_CALL = "_engine_run_backward"
# Those in `autograd` that disable the thread's hooks and enable them.
DISABLE_CALL, ENABLE_CALL = "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"

# ---- tensors and storages -----------------------------------------------------------------------

# The address of a storage object, for the shim: `StorageImpl *`.
storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# The same address, from a tensor.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
# A storage from a weak pointer (`weak_storage`); None: it was freed.
storage_from_weak: Callable[[int], torch.UntypedStorage | None] = (
    torch.UntypedStorage._new_with_weak_ptr
)
free_weak_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
# A weak pointer for `storage_from_weak`; free it with `free_weak_storage`.
weak_storage: Callable[[torch.UntypedStorage], int] = methodcaller("_weak_ref")
# Make the Python object of a storage own the storage. Needed for an object from a weak reference:
# else the storage may be freed while the object lives.
fix_weak_storage: Callable[[torch.UntypedStorage], None] = methodcaller("_fix_weakref")
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
# The class that writes the records of `torch.save`.
file_writer: Callable[[], Any] = partial(getattr, torch._C, "PyTorchFileWriter")
is_cow: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# The part of a DTensor on this rank, itself a tensor.
get_shard: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")


def set_shard(whole: Any, shard: object) -> None:  # noqa: ANN401 - a DTensor
    """Replace the part of a DTensor on this rank, behind which its mesh and placements stay."""
    whole._local_tensor = shard


# ---- modules ------------------------------------------------------------------------------------

# Attributes, because `modules()`, `parameters()` and `buffers()` also build names, which is slow.
submodules_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter(
    "_modules"
)
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter(
    "_parameters"
)
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
# Torch checks in the first for hooks, and calls a module's hooks in a nested function; the second
# calls the first, and has few locals.
MODULE_CALL = torch.nn.Module._call_impl.__code__
AROUND_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__
# The methods of modules that add one tensor; that moves all of them, as to a device; and those that
# replace any number of them.
ADDING_CALLS = ("register_parameter", "register_buffer")
MOVING_CALL = "_apply"
CHANGING_CALLS = (MOVING_CALL, "_load_from_state_dict", "__setstate__")
# In `module_hooks`: the hooks called before and after each forward.
MODULE_HOOK_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks")
ANY_HOOK_CHECK = "_has_any_global_hook"  # only called before a call of a compiled module


def is_dual_level_open() -> bool:
    """Return whether forward-mode derivatives are computed here."""
    return bool(forward_ad._current_level >= 0)


def has_backward_hook() -> bool:
    """Return whether there is a global hook of modules' backward passes."""
    return bool(module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks)


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a call of a module, or of one inside, calls a hook that is not swapkit's."""
    everywhere = (module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks)
    if any(_is_foreign(hook) for table in everywhere for hook in list(table.values())):
        return True
    return any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(__name__.partition(".")[0] + ".")


def add_hook(table: dict[int, Callable[..., Any]], number: int, hook: Callable[..., Any]) -> None:
    """Add a global hook to a table of torch's; a forward hook is called also if forward raises."""
    if table is module_hooks._global_forward_hooks:
        module_hooks._global_forward_hooks_always_called[number] = True
    table[number] = hook


def forget_removed_hooks() -> None:
    """Clear torch's notes on global hooks that are in no table any more."""
    for numbers in (
        module_hooks._global_forward_hooks_always_called,
        module_hooks._global_forward_hooks_with_kwargs,
    ):
        for number in list(numbers):
            if number not in module_hooks._global_forward_hooks:  # torch adds to this table first
                numbers.pop(number, None)


# In `optimizer_hooks`: the hooks called before and after each step.
OPTIMIZER_HOOK_TABLES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

step_pre_hooks_of: Callable[[torch.optim.Optimizer], dict[int, Callable[..., Any]]] = attrgetter(
    "_optimizer_step_pre_hooks"
)

# ---- operators ----------------------------------------------------------------------------------

schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
overload_of: Callable[[OpOverload], str] = attrgetter("_overloadname")
higher_order_operators: dict[str, HigherOrderOperator] = torch._ops._higher_order_ops
# Keys that new operators of that kind do not handle.
keys_to_fall_through: list[DispatchKey] = vars(torch._ops)[
    "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS"
]
disabled_dispatch: Any = torch._C._disabled_torch_dispatch_impl


def has_python_key() -> bool:
    """Return whether operators of this thread pass the dispatch modes on torch's stack."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.Python))


# ---- the build, the compiler, devices -----------------------------------------------------------


def has_compiled() -> bool:
    """Return whether Dynamo has compiled code in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["ok"] > 0


C: Any = torch._C  # for code that replaces functions in it, or checks which ones exist
KEY_GUARD = "_ForceDispatchKeyGuard"  # in `C`: Dynamo's, up to torch 2.14
RESTORE_KEYS = "_dynamo_restore_local_dispatch_key_set"  # likewise, since 2.15
CXX11_ABI = int(torch._C._GLIBCXX_USE_CXX11_ABI)
cuda_allocator: Any = torch.cuda.memory._CUDAAllocator


def npu_functions() -> Any:  # noqa: ANN401 - torch_npu's C module
    """Return the C module of torch_npu, which must be loaded."""
    return sys.modules["torch_npu"]._C


def observe_cuda_out_of_memory(observer: Callable[..., None]) -> None:
    """Call an observer for each request that torch's CUDA allocator could not meet."""
    C._cuda_attach_out_of_memory_observer(observer)


def destroy_library(library: torch.library.Library) -> None:
    """Remove a library's registrations."""
    library._destroy()  # type: ignore[no-untyped-call]


def backward_class_of(function: type[torch.autograd.Function]) -> Any:  # noqa: ANN401
    """Return the class of the graph nodes of an `autograd.Function`."""
    return function._backward_cls


def set_backward_class(function: Any, backward: Any) -> None:  # noqa: ANN401
    """Set the class of the graph nodes of an `autograd.Function`."""
    function._backward_cls = backward
    backward._forward_cls = function


def work_class() -> Any:  # noqa: ANN401 - torch's Work
    """Return the class of collectives under way; None: this build of torch has none."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed import distributed_c10d

    return distributed_c10d.Work


# What FSDP2 knows of a module; several modules may share it.
fsdp_state_of: Callable[[Any], Any] = methodcaller("_get_fsdp_state")


def fsdp_groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - FSDPState
    """Return the groups of parameters that FSDP2 gathers together: in torch 2.10, at most one."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_fsdp_idle(group: Any) -> bool:  # noqa: ANN401 - FSDPParamGroup
    """Return whether no forward or backward of a group's modules runs."""
    is_idle: bool = group._training_state.name == "IDLE"
    return is_idle


def count_collectives(group: Any, device: torch.device) -> int:  # noqa: ANN401 - ProcessGroup
    """Return how many collectives this rank has begun in a group on a type of device.

    Raises:
        RuntimeError: the backend does not count.
    """
    backend = group._get_backend(device)
    count: int = backend._get_sequence_number_for_group()
    return count


def default_store() -> Store:
    """Return the store of the default process group."""
    from torch.distributed import distributed_c10d  # not in every build

    return distributed_c10d._get_default_store()


def connect_again(store: Store) -> Store:
    """Return a connection of its own to a store: each one serves one request at a time."""
    own: Store = store.clone()  # type: ignore[attr-defined]
    return own


def group_stores() -> list[tuple[Any, Store, str]]:
    """Return each process group of this process, the store of its backends, and a prefix of keys.

    The prefix is that of gloo's helper group, in which ranks compare their collectives before they
    begin them (`TORCH_DISTRIBUTED_DEBUG=DETAIL`).
    """
    from torch.distributed import distributed_c10d

    world, helper = distributed_c10d._world, distributed_c10d.PG_WRAPPER_STORE_PREFIX
    return [
        (group, store, f"{helper}:{world.pg_names[group]}/")
        for group, (_, store) in world.pg_map.items()
    ]


def abort_groups() -> None:
    """Abort every process group, newest first, where its backend can: NCCL can, gloo cannot.

    As torch's `_abort_process_group`, which also forgets the groups: the user's code could neither
    ask for its rank nor destroy them.
    """
    from torch.distributed import distributed_c10d

    names = distributed_c10d._world.pg_names
    groups = sorted(names, key=lambda group: int(names[group]) if names[group].isdecimal() else 0)
    nccl = None
    if groups and distributed_c10d.is_nccl_available():
        with suppress(RuntimeError):  # the group has no backend for that device
            backend = groups[0]._get_backend(torch.device("cuda"))
            nccl = backend if isinstance(backend, distributed_c10d.ProcessGroupNCCL) else None
    if nccl is not None:
        nccl._group_start()  # else the aborts of several communicators can wait for each other
    try:
        for group in reversed(groups):
            group.abort()
    finally:
        if nccl is not None:
            nccl._group_end()
