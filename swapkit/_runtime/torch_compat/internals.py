"""The one door to torch's private names.

Every name that torch does not document, and that swapkit needs, stands here under swapkit's own
name for it, with what it does. `tests/unit/_runtime/torch_compat/test_internals.py` looks at each
of them in the torch at hand, and at the rest of swapkit, which must not use others.

C++ has its own: `shim/cpp/` includes torch's headers, and declares what these lack.
"""

from __future__ import annotations

import sys
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

# `torch.inference_mode`, without a frame of Python that could keep its guard.
from torch._C import _InferenceMode as InferenceMode
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as count_modes
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
from torch.fx.node import _side_effectful_functions as side_effects
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import _has_any_global_hook as has_global_hook
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store as Store  # noqa: PLC0414 - re-exported

__all__ = [
    "AROUND_MODULE_CALL",
    "CXX11_ABI",
    "ENGINE_CALL",
    "MODULE_CALL",
    "MODULE_HOOK_TABLES",
    "NO_TASK",
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
    "all_operator_names",
    "backward_class_of",
    "base_of",
    "buffers_of",
    "count_modes",
    "cuda_allocator",
    "cuda_custom_allocator",
    "current_node",
    "default_store",
    "destroy_library",
    "disabled_dispatch",
    "engine",
    "fix_weak_storage",
    "free_weak_storage",
    "graph_task",
    "has_compiled",
    "has_global_hook",
    "has_kernel",
    "has_kernel_for",
    "higher_order_operators",
    "hooks_disabled_message",
    "innermost_transform",
    "is_cow",
    "is_key_excluded",
    "is_tracing",
    "is_zero_tensor",
    "keeps_graph",
    "mode_at",
    "mode_of_kind",
    "module_hooks",
    "nodes_made",
    "observe_cuda_out_of_memory",
    "optimizer_post_hooks",
    "optimizer_pre_hooks",
    "overload_of",
    "parameters_of",
    "pop_hooks",
    "push_hooks",
    "pytree",
    "schema_of",
    "set_backward_class",
    "set_code_exec_strategy",
    "set_deterministic",
    "set_key_excluded",
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
_autograd: Any = torch._C._autograd
push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = (
    _autograd._push_saved_tensors_default_hooks
)
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# The pair on top of this thread's stack, None without one. True: where hooks are disabled, too.
top_hooks: Callable[[bool], tuple[Any, Any] | None] = _autograd._top_saved_tensors_default_hooks
# Why hooks are disabled; None: they are not.
hooks_disabled_message: Callable[[], str | None] = (
    _autograd._saved_tensors_hooks_get_disabled_error_message
)
# Whether the backward pass under way keeps its graph (`retain_graph`).
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
engine: Any = torch.autograd.Variable._execution_engine
# Where torch calls the engine, in `torch.autograd`, by this name.
ENGINE_CALL = "_engine_run_backward"

# ---- tensors and storages -----------------------------------------------------------------------

# The number of a storage object, which the shim takes: `StorageImpl *`.
storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# The same of a tensor's storage.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
# A storage from what `UntypedStorage._weak_ref` gave; None: it is gone.
storage_from_weak: Callable[[int], torch.UntypedStorage | None] = (
    torch.UntypedStorage._new_with_weak_ptr
)
free_weak_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
# For `storage_from_weak`; to be freed by `free_weak_storage`.
weak_storage: Callable[[torch.UntypedStorage], int] = methodcaller("_weak_ref")
# Give a storage that only a weak reference holds its object in Python, or that goes with it.
fix_weak_storage: Callable[[torch.UntypedStorage], None] = methodcaller("_fix_weakref")
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
is_cow: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# ---- modules ------------------------------------------------------------------------------------

# By attribute: `modules()`, `parameters()` and `buffers()` make names, which takes much longer.
submodules_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter(
    "_modules"
)
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter(
    "_parameters"
)
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
# Torch asks in the first whether there are hooks, and calls those of a module in a function inside
# of it; the second calls the first, and has few locals.
MODULE_CALL = torch.nn.Module._call_impl.__code__
AROUND_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__
# In `module_hooks`: those called before and after each forward.
MODULE_HOOK_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks")

step_pre_hooks_of: Callable[[torch.optim.Optimizer], dict[int, Callable[..., Any]]] = attrgetter(
    "_optimizer_step_pre_hooks"
)

# ---- operators ----------------------------------------------------------------------------------

schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
overload_of: Callable[[OpOverload], str] = attrgetter("_overloadname")
higher_order_operators: dict[str, HigherOrderOperator] = torch._ops._higher_order_ops
disabled_dispatch: Any = torch._C._disabled_torch_dispatch_impl

# ---- the build, the compiler, devices -----------------------------------------------------------

C: Any = torch._C  # for those that exchange functions in it, or ask which ones this torch has
CXX11_ABI = int(torch._C._GLIBCXX_USE_CXX11_ABI)
cuda_allocator: Any = torch.cuda.memory._CUDAAllocator


def has_compiled() -> bool:
    """Return whether the compiler has met any function."""
    loaded = sys.modules.get("torch._dynamo.convert_frame")
    return loaded is not None and loaded.FRAME_COUNTER > 0


def cuda_custom_allocator(alloc: int, free: int) -> Any:  # noqa: ANN401 - torch's C type
    """Return torch's pluggable allocator around two C functions; only in builds for CUDA."""
    return C._cuda_customAllocator(alloc, free)


def observe_cuda_out_of_memory(observer: Callable[..., None]) -> None:
    """Let an observer hear of each request that torch's CUDA allocator could not meet."""
    C._cuda_attach_out_of_memory_observer(observer)


def destroy_library(library: torch.library.Library) -> None:
    """Take a library's registrations back."""
    library._destroy()  # type: ignore[no-untyped-call]


def backward_class_of(function: type[torch.autograd.Function]) -> Any:  # noqa: ANN401
    """Return the class of the nodes that a function puts into graphs."""
    return function._backward_cls


def set_backward_class(function: Any, backward: Any) -> None:  # noqa: ANN401
    """Let a function put nodes of another class into graphs."""
    function._backward_cls = backward
    backward._forward_cls = function


def default_store() -> Store:
    """Return the store of the default process group."""
    from torch.distributed import distributed_c10d  # not in every build

    return distributed_c10d._get_default_store()
