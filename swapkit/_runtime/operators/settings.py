"""What the bits of an operator's results depend on: torch's settings, random states."""

from __future__ import annotations

import contextlib
import functools
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from swapkit._runtime.operators.names import Operator, is_random
from swapkit._runtime.torch_compat.internals import (
    C,
    DispatchKey,
    is_key_excluded,
    set_deterministic,
    set_key_excluded,
)

# ---- settings ------------------------------------------------------------------------------------
#
# Torch settings that affect the bits of an operator's results, restored for recomputation.
#
# A program may change them for part of its forward, with `torch.backends.mkldnn.flags` or
# `sdpa_kernel`. Without a restore, recomputation would use the settings in force during backward.

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

# ---- random states -------------------------------------------------------------------------------
#
# Restoring of random states, so that recomputed operators draw the same numbers.
#
# The generators of Python, numpy and torch are global to the process. For a repetition they are
# reset to their state in forward, then restored. A thread that draws meanwhile repeats numbers from
# forward, and draws them again later. So this is done only for operators during whose run a
# generator moved, even if only because another thread drew from it.

# Getter and setter of a generator's state.
_Access: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object]]"

_NO_GENERATOR = ("cpu", "meta")  # without a device generator
_TORCH = ("aten", "prims")  # operators with a tag that says whether they draw random numbers


def may_be_random(function: Operator) -> bool:
    """Return whether an operator draws, or may draw, random numbers."""
    return is_random(function) or _is_foreign(function)


def _is_foreign(function: Operator) -> bool:
    """Return whether an operator is not torch's own: it may run any Python code."""
    return function.namespace not in _TORCH


class RandomState:
    """The states of the generators of the CPU and of an operator's device.

    For a user's operator, also the states of Python's and numpy's global generators.
    """

    def __init__(self, function: Operator, arguments: Sequence[object]) -> None:
        self._is_foreign = _is_foreign(function)
        self._cpu = torch.get_rng_state()
        accesses = _global_generators() if self._is_foreign else []
        self._others = [(access, access[0]()) for access in accesses]
        devices = [getattr(each, "device", each) for each in arguments]
        self._device = next(
            (
                each
                for each in devices
                if isinstance(each, torch.device) and each.type not in _NO_GENERATOR
            ),
            None,
        )
        if self._device is not None:
            module = getattr(torch, self._device.type)
            self._on_device: torch.Tensor = module.get_rng_state(self._device)

    def has_moved(self) -> bool:
        """Return whether the operator, which has run by now, may have drawn random numbers.

        Operators of torch declare this. For a user's operator the states are compared, and of
        Python's and numpy's states only those that moved are kept.
        """
        if not self._is_foreign:
            return True
        self._others = [
            (access, state) for access, state in self._others if not _is_same(access[0](), state)
        ]
        return bool(self._others) or self._has_torch_moved()

    def _has_torch_moved(self) -> bool:
        if not torch.equal(torch.get_rng_state(), self._cpu):
            return True
        device = self._device
        if device is None:
            return False
        now = getattr(torch, device.type).get_rng_state(device)
        return not torch.equal(now, self._on_device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Apply these states again; restore the current ones at exit."""
        device = self._device
        devices = [] if device is None else [device]
        with (
            _without_vmap(),
            torch.random.fork_rng(devices, device_type=device.type if device else "cuda"),
        ):
            torch.set_rng_state(self._cpu)
            if device is not None:
                getattr(torch, device.type).set_rng_state(self._on_device, device)
            with _others_again(self._others):
                yield


def _global_generators() -> list[_Access]:
    found: list[_Access] = [(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        # The legacy form supports only MT19937, but the global generator may be of another kind.
        found.append((functools.partial(numpy.get_state, legacy=False), numpy.set_state))
    return found


def _is_same(one: Any, other: Any) -> bool:  # noqa: ANN401 - a state: dictionaries, arrays, numbers
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


@contextlib.contextmanager
def _others_again(others: Sequence[tuple[_Access, Any]]) -> Iterator[None]:
    before = [(set_state, get_state()) for (get_state, set_state), _ in others]
    for (_, set_state), state in others:
        set_state(state)
    try:
        yield
    finally:
        for set_state, state in before:
            set_state(state)


@contextlib.contextmanager
def _without_vmap() -> Iterator[None]:
    """Allow random operators where torch batches gradients: vmap mode refuses them."""
    key = "VmapMode"
    was_excluded = is_key_excluded(key)
    set_key_excluded(key, True)  # noqa: FBT003
    try:
        yield
    finally:
        set_key_excluded(key, was_excluded)
