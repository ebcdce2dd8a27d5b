"""Torch's settings that decide which bits an operator makes, for what is computed again.

A program may change them for a part of its forward, as `torch.backends.mkldnn.flags` or
`sdpa_kernel` do; in backward they would be as they are then.
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

# Who counts versions and views.
VERSIONS = DispatchKey.ADInplaceOrView
_PRECISIONS = [
    (backend, operators)
    for backend in ("generic", "cuda", "mkldnn")
    for operators in (("all",) if backend == "generic" else ("all", "matmul", "conv", "rnn"))
]
_SWITCHES = {
    "_get_float32_matmul_precision": "_set_float32_matmul_precision",  # sets precisions, too
    "get_num_threads": "set_num_threads",  # this thread's
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
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_fa3_sdp_enabled": "_set_sdp_use_fa3",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
    "_get_sdp_priority_order": "_set_sdp_priority_order",
    "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
}


# From bytes: decimals would become zero where this is compiled while such numbers are flushed.
_DENORMAL: float = struct.unpack("<d", b"\1" + bytes(7))[0]


class _Setting(NamedTuple):
    get: Callable[[], Any]
    put: Callable[..., Any]  # parts of a value one by one


def _get_deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(is_on: bool, warns_only: bool) -> None:  # noqa: FBT001 - as it is read
    set_deterministic(is_on, warn_only=warns_only)


def _flushes_denormals() -> bool:
    """Return whether this thread takes numbers below the normal ones for zero.

    Torch can set that, not tell; Python's numbers are the processor's.
    """
    return _DENORMAL == 0.0


def _find() -> list[_Setting]:
    """Return those that this torch has; where one sets others as well, it comes first."""
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
    except RuntimeError:  # precisions that were set one by one have no name together
        return [_read_one(setting) for setting in _all]


def _read_one(setting: _Setting) -> Any:  # noqa: ANN401 - of whatever kind it is
    try:
        return setting.get()
    except RuntimeError:
        return None


def _change(then: list[Any]) -> None:
    for setting, wanted in zip(_all, then, strict=True):
        if wanted is not None and _read_one(setting) != wanted:
            setting.put(*wanted if isinstance(wanted, tuple) else (wanted,))


class ThreadSettings:
    """The settings of one moment."""

    def __init__(self, then: list[Any]) -> None:
        """Remember them. `then`: as they were read."""
        self._then = then

    @classmethod
    def note(cls) -> ThreadSettings:
        """Return the settings of this moment; they are one object for as long as they stay."""
        now, latest = _read(), _latest[0]
        if latest._then != now:  # noqa: SLF001 - of this kind
            latest = _latest[0] = cls(now)
        return latest

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let them hold again, and afterwards those that would have held."""
        now = _read()
        if now == self._then:
            yield
            return
        _change(self._then)
        try:
            yield
        finally:
            _change(now)


_latest = [ThreadSettings(_read())]  # as some thread has read them last
