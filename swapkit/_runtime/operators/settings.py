"""Torch settings that affect the bits of an operator's results, restored for recomputation.

A program may change them for part of its forward, with `torch.backends.mkldnn.flags` or
`sdpa_kernel`. Without a restore, recomputation would use the settings in force during backward.
"""

from __future__ import annotations

import contextlib
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.torch_compat.internals import C, DispatchKey, set_deterministic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The dispatch key that tracks versions and views.
VERSIONS = DispatchKey.ADInplaceOrView
_PRECISIONS = [
    (backend, operators)
    for backend in ("generic", "cuda", "mkldnn")
    for operators in (("all",) if backend == "generic" else ("all", "matmul", "conv", "rnn"))
]
_SWITCHES = {
    "_get_float32_matmul_precision": "_set_float32_matmul_precision",  # also sets precisions
    "get_num_threads": "set_num_threads",  # of this thread
    "get_default_dtype": "_set_default_dtype",
    "_get_deterministic_fill_uninitialized_memory": "_set_deterministic_fill_uninitialized_memory",
    "_get_nnpack_enabled": "_set_nnpack_enabled",
    "_get_mkldnn_enabled": "_set_mkldnn_enabled",
    "_get_mkldnn_deterministic": "_set_mkldnn_deterministic",
    "_get_cudnn_enabled": "_set_cudnn_enabled",
    "_get_cudnn_benchmark": "_set_cudnn_benchmark",
    "_get_cudnn_deterministic": "_set_cudnn_deterministic",
    "_get_cudnn_depthwise_kernel": "_set_cudnn_depthwise_kernel",
    "_get_linalg_preferred_backend": "_set_linalg_preferred_backend",
    "_get_blas_preferred_backend": "_set_blas_preferred_backend",
    "_get_cublas_allow_fp16_accumulation": "_set_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction": (
        "_set_cublas_allow_fp16_reduced_precision_reduction"
    ),
    "_get_cublas_allow_bf16_reduced_precision_reduction": (
        "_set_cublas_allow_bf16_reduced_precision_reduction"
    ),
    "_get_cpu_allow_fp16_reduced_precision_reduction": (
        "_set_cpu_allow_fp16_reduced_precision_reduction"
    ),
    "_get_cublaslt_prefer_grouped_gemm": "_set_cublaslt_prefer_grouped_gemm",
    "_get_native_aot_enabled": "_set_native_aot_enabled",  # which kernels operators have
    "_get_native_aot_unconditional_masked": "_set_native_aot_unconditional_masked",
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_fa3_sdp_enabled": "_set_sdp_use_fa3",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
    "_get_sdp_priority_order": "_set_sdp_priority_order",
    "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
}


# From bytes: a literal becomes 0 if Python compiles this file while denormals are flushed.
_DENORMAL: float = struct.unpack("<d", b"\1" + bytes(7))[0]


class _Setting(NamedTuple):
    get: Callable[[], Any]
    put: Callable[..., Any]  # takes the parts of a tuple as arguments


def _get_deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(is_on: bool, warns_only: bool) -> None:  # noqa: FBT001 - as it is read
    set_deterministic(is_on, warn_only=warns_only)


def _flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to zero.

    Torch has a setter but no getter. Python's floats follow the processor's mode.
    """
    return _DENORMAL == 0.0


def _find() -> list[_Setting]:
    """Return the settings of this torch version; one that also sets others comes first."""
    functions = vars(C)
    found = [
        _Setting(functions[get], functions[put])
        for get, put in _SWITCHES.items()
        if get in functions and put in functions
    ]
    found.append(_Setting(_get_deterministic, _set_deterministic))
    found.append(_Setting(_flushes_denormals, torch.set_flush_denormal))
    get = functions.get("_get_fp32_precision_getter")
    put = functions.get("_set_fp32_precision_setter")
    if get is not None and put is not None:
        found += [_Setting(partial(get, *each), partial(put, *each)) for each in _PRECISIONS]
    return found


_all = _find()
_getters = [setting.get for setting in _all]


def _read() -> list[Any]:
    try:
        return [get() for get in _getters]
    except RuntimeError:  # precisions that were set one by one have no common name
        return [_read_one(setting) for setting in _all]


def _read_one(setting: _Setting) -> Any:  # noqa: ANN401 - any type
    try:
        return setting.get()
    except RuntimeError:
        return None


def _change(then: list[Any]) -> None:
    for setting, wanted in zip(_all, then, strict=True):
        if wanted is not None and _read_one(setting) != wanted:
            setting.put(*wanted if isinstance(wanted, tuple) else (wanted,))


class ThreadSettings:
    """The settings at one point in time."""

    def __init__(self, then: list[Any]) -> None:
        """Store the settings. `then`: the values, as read by `_read`."""
        self._then = then

    @classmethod
    def note(cls) -> ThreadSettings:
        """Return the current settings; the same object as long as they are unchanged."""
        now, latest = _read(), _latest[0]
        if latest._then != now:  # noqa: SLF001 - own class
            latest = _latest[0] = cls(now)
        return latest

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Apply these settings again; restore the current ones at exit."""
        now = _read()
        if now == self._then:
            yield
            return
        _change(self._then)
        try:
            yield
        finally:
            _change(now)


_latest = [ThreadSettings(_read())]  # as last read by any thread
