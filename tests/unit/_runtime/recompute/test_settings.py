"""Settings that decide about bits: what is computed again has those of its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import conv2d

import swapkit
from swapkit._runtime.recompute import settings
from swapkit._runtime.recompute.settings import Settings
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


def values() -> list[Any]:
    return [getattr(place, name) for place, name, _ in CHANGES]


def test_settings_when_changed_since_then_hold_again_and_afterwards_as_before() -> None:
    then, first = Settings.note(), values()
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


def test_settings_when_the_run_fails_then_as_before_all_the_same() -> None:
    then = Settings.note()
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
    then = Settings.note()
    monkeypatch.setattr(settings, "_change", None)
    with then.again():
        pass


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return conv2d(x, w, padding=1).sin()


def without_onednn(body: Body) -> Body:
    def run(*args: torch.Tensor) -> torch.Tensor:
        with onednn.flags(enabled=False):
            made: torch.Tensor = body(*args)
            return made

    return run


MODELS: dict[str, Callable[[], nn.Module]] = {
    "region": lambda: Calls(without_onednn(swapkit.checkpoint(convolve))),
    "operators": lambda: choose(Calls(without_onednn(convolve)), {"convolution": Recompute()}),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_when_settings_held_in_forward_only_then_same_bits(name: str) -> None:
    shape = 16, 16, 16, 16
    expected = train(Calls(without_onednn(convolve)), *shape)
    with pytest.raises(AssertionError):  # the setting decides
        assert_same_bits(train(Calls(convolve), *shape), expected)
    before = recomputed()
    assert_same_bits(train(MODELS[name](), *shape), expected)
    assert recomputed() > before
