"""Settings that decide about bits: what is computed again has those of its forward."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packaging.version import Version
from torch.nn.functional import conv2d

import swapkit
from swapkit._runtime.operators import settings
from swapkit._runtime.operators.settings import ThreadSettings
from swapkit.registry import Recompute
from tests.programs import assert_same_bits
from tests.support.operators import Calls, choose, recomputed, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from tests.support.operators import Body

onednn: Any = torch.backends.mkldnn
# `torch.backends` has them as attributes; a value that is not what they are at first.
CHANGES: list[tuple[Any, str, object]] = [
    (onednn.matmul, "fp32_precision", "bf16"),
    (onednn.conv, "fp32_precision", "bf16"),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", (False, False)),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
]


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    before = settings._read()
    yield
    settings._change(before)


# Torch's pairs of a getter and a setter that are no settings of operators, or that others cover.
NO_SETTINGS = {
    "_get_autograd_fallback_mode",  # what autograd does for operators without a derivative
    "_get_backcompat_broadcast_warn",
    "_get_backcompat_keepdim_warn",
    "_get_cublas_allow_tf32",  # the precisions of matmul and convolution cover these three
    "_get_cudnn_allow_tf32",
    "_get_onednn_allow_tf32",
    "_get_deterministic_algorithms",  # read by torch's public functions, with `warn_only`
    "_get_dispatch_mode",
    "_get_dtensor_allow_implicit_replication",
    "_get_fake_constant",  # of one tensor
    "_get_graph_exec_group",
    "_get_graph_executor_optimize",
    "_get_miopen_immediate",  # of ROCm, as the next one
    "_get_rocm_fa_preferred_backend",
    "_get_qengine",  # of quantized operators, which have no backward
    "_get_sm_carveout_experimental",  # how many multiprocessors matmul leaves free
    "_get_tensor_metadata",
    "_get_thread_name",
    "_get_torch_function_state",
    "_get_tracing_state",
    "_get_value_trace",
    "_get_warnAlways",
    "get_autocast_cpu_dtype",  # autocast is of the calls, not of the operators below it
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "get_autocast_ipu_dtype",
    "get_autocast_xla_dtype",
    "get_num_interop_threads",  # operators compute the same
}
# Settings that some tested releases lack, by the first that has them.
SINCE = {
    "cudnn_depthwise_kernel": "2.13",
    "fa3_sdp_enabled": "2.13",
    "sdp_use_fa3": "2.13",
    "cublaslt_prefer_grouped_gemm": "2.14",
    "native_aot_enabled": "2.15",
    "native_aot_unconditional_masked": "2.15",
}


def test_settings_when_torch_has_a_pair_to_get_and_set_one_then_it_is_known() -> None:
    """A release of torch that adds, renames or drops a setting is noticed here."""
    names = set(vars(torch._C))
    pairs = {
        name
        for prefix in ("_get_", "get_")
        for name in names
        if name.startswith(prefix) and name.replace("get_", "set_", 1) in names
    }
    assert not pairs - NO_SETTINGS - settings._SWITCHES.keys()
    functions = {*settings._SWITCHES, *settings._SWITCHES.values()}
    later = {each for each in SINCE if Version(torch.__version__) < Version(SINCE[each])}
    assert not functions - names - {f"_{verb}_{each}" for verb in ("get", "set") for each in later}
    assert {"_get_fp32_precision_getter", "_set_fp32_precision_setter"} <= names


def values() -> list[Any]:
    return [getattr(place, name) for place, name, _ in CHANGES]


def test_settings_when_changed_since_then_hold_again_and_afterwards_as_before() -> None:
    then, first = ThreadSettings.note(), values()
    for place, name, value in CHANGES:
        setattr(place, name, value)
    torch.backends.cuda.enable_math_sdp(False)
    changed = values()
    assert all(now != before for now, before in zip(changed, first, strict=True))
    with then.again():
        assert values() == first
        assert torch.backends.cuda.math_sdp_enabled()
    assert values() == changed
    assert not torch.backends.cuda.math_sdp_enabled()


def of_torch() -> list[object]:
    return [
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
        torch.tensor(1e-40, dtype=torch.float32).mul(1.0).item() == 0,  # tiny numbers are zero
        torch._C._get_sdp_priority_order(),
    ]


def test_settings_of_torch_when_changed_since_then_hold_again_and_afterwards_as_before() -> None:
    then, first = ThreadSettings.note(), of_torch()
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch.set_flush_denormal(True)
    torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
    changed = of_torch()
    assert all(now != before for now, before in zip(changed, first, strict=True))
    with then.again():
        assert of_torch() == first
    assert of_torch() == changed


def test_settings_when_compiled_while_tiny_numbers_are_zero_then_they_know_when_these_are_not() -> (
    None
):
    path = Path(settings.__file__)
    torch.set_flush_denormal(True)
    try:
        code = compile(path.read_text(encoding="utf-8"), path, "exec")
    finally:
        torch.set_flush_denormal(False)
    found: dict[str, Any] = {"__name__": settings.__name__}
    exec(code, found)
    assert found["_flushes_denormals"]() is False


def test_settings_when_the_run_fails_then_as_before_all_the_same() -> None:
    then = ThreadSettings.note()
    torch.set_float32_matmul_precision("medium")
    seen: list[str] = []

    def fail() -> None:
        with then.again():
            seen.append(torch.get_float32_matmul_precision())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["highest"]
    assert torch.get_float32_matmul_precision() == "medium"


def test_settings_when_unchanged_then_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    then = ThreadSettings.note()
    monkeypatch.setattr(settings, "_change", None)
    with then.again():
        pass


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return conv2d(x, w, padding=1).sin()


def sum_up(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x * w).sum() * w).sin()


def shrink(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * 1e-39) * (w * 1e38)


def divide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x * 100).long() / 7) * w + x


@contextlib.contextmanager
def put_here(put: Callable[[Any], object], there: object, usual: object) -> Iterator[None]:
    put(there)
    try:
        yield
    finally:
        put(usual)


@dataclass(frozen=True)
class Part:
    """What some setting that holds for it alone decides about."""

    body: Body
    setting: Callable[[], contextlib.AbstractContextManager[None]]
    shape: tuple[int, ...]

    def within(self, body: Body) -> Body:
        def run(*args: torch.Tensor) -> torch.Tensor:
            with self.setting():
                made: torch.Tensor = body(*args)
                return made

        return run

    def operators(self) -> nn.Module:
        return choose(Calls(self.within(self.body)), {".*": Recompute()})

    def region(self) -> nn.Module:
        return Calls(self.within(swapkit.checkpoint(self.body)))

    def region_run_twice(self) -> nn.Module:
        return Calls(self.within(swapkit.checkpoint(self.body, check_values=True)))


PARTS = {
    "onednn": Part(convolve, lambda: onednn.flags(enabled=False), (16, 16, 16, 16)),
    "threads": Part(sum_up, lambda: put_here(torch.set_num_threads, 1, 2), (1000, 1000)),
    "denormals": Part(shrink, lambda: put_here(torch.set_flush_denormal, True, False), (256, 256)),
    "default dtype": Part(
        divide, lambda: put_here(torch.set_default_dtype, torch.float64, torch.float32), (256, 256)
    ),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("how", [Part.operators, Part.region, Part.region_run_twice])
@pytest.mark.parametrize("name", PARTS)
def test_recomputation_when_settings_held_in_forward_only_then_same_bits(
    how: Callable[[Part], nn.Module], name: str
) -> None:
    part = PARTS[name]
    torch.set_num_threads(2)
    expected = train(Calls(part.within(part.body)), *part.shape)
    with pytest.raises(AssertionError):  # the setting decides
        assert_same_bits(train(Calls(part.body), *part.shape), expected)
    before = recomputed()
    assert_same_bits(train(how(part), *part.shape), expected)
    assert recomputed() > before


@pytest.mark.usefixtures("installation")
def test_operators_when_the_thread_has_its_count_in_backward_then_no_setting_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = PARTS["threads"]
    model = choose(Calls(part.body), {".*": Recompute()})
    train(model, *part.shape)  # which notes them, once
    monkeypatch.setattr(settings, "_read", None)
    before = recomputed()
    train(model, *part.shape)
    assert recomputed() > before
