"""Weights leave when memory runs out: those of a model that fits, or is built inside a session."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.saved import weights
from swapkit._runtime.torch_compat.internals import has_compiled
from tests.integration.test_weights import SEALED, InBackward, digest_of, keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, LAYERS = 128, 12
PART = WIDTH * WIDTH * 4  # the bytes of a weight
WHOLE = LAYERS * PART


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve torch on the CPU. Other tests of this process may have compiled code."""
    monkeypatch.setattr(weights, "has_compiled", lambda: False)
    swapkit.install(device="cpu")
    yield
    gc.collect()
    swapkit.uninstall()


def layers(count: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        model = layers()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()  # type: ignore[operator]
    return model


def loaded(*, assign: bool) -> nn.Sequential:
    model = layers()
    for number in range(LAYERS):
        state = {f"{number}.{key}": value for key, value in layers(1)[0].state_dict().items()}
        model.load_state_dict(state, strict=False, assign=assign)
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "made": layers,
    "meta": on_meta,
    "loaded": lambda: loaded(assign=False),
    "assigned": lambda: loaded(assign=True),
    "copied": lambda: copy.deepcopy(layers()),
    "cast": lambda: layers().double().float(),
    "average": lambda: torch.optim.swa_utils.AveragedModel(layers()),
}


def train(model: nn.Module, rows: int = 8, steps: int = 3) -> list[str]:
    """Return the bits of each step's loss, and of the weights."""
    optimizer = InBackward([each for each in model.parameters() if each.requires_grad])
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(rows, WIDTH)).square().mean()
        loss.backward()
        found.append(digest_of(loss))
        optimizer.step()
    return [*found, *(digest_of(each) for each in model.parameters())]


@pytest.mark.parametrize("policy", ["auto", "rescue"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_model_when_built_inside_of_a_session_and_too_large_then_it_trains_to_the_same_bits(
    builder: str, policy: str
) -> None:
    expected = train(BUILDERS[builder]())
    keys = {keys_of(each) for each in layers(1).parameters()}
    gc.collect()
    limit = int(WHOLE * (1.3 if builder == "cast" else 0.6))
    with swapkit.budget(limit, policy=policy) as session:
        model = BUILDERS[builder]()
        assert train(model) == expected
        assert "weights: " in session.explain()
        assert session.stats.peak_bytes <= limit
    assert {keys_of(each) for each in model.parameters()} == keys


@torch.no_grad()
def test_weights_when_they_get_other_memory_in_a_session_then_that_leaves_too() -> None:
    def run(model: nn.Sequential) -> list[str]:
        found = []
        for layer in model:
            layer.weight.data = layer.weight.data * 2  # type: ignore[operator,assignment]
            found.append(digest_of(model(torch.ones(8, WIDTH))))
        return found

    expected = run(layers())
    gc.collect()
    limit = int(WHOLE * 0.6)
    with swapkit.budget(limit, policy="rescue") as session:
        assert run(layers()) == expected
        assert session.stats.peak_bytes <= limit


class Frozen(nn.Module):
    """Multiplies by a frozen weight, of which its graph holds a view until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def test_weights_when_made_after_others_have_left_then_they_may_leave_at_once() -> None:
    # If an operator had used them first, they could not: the graph holds views of them.
    with swapkit.budget(6 * PART) as session:
        model = nn.Sequential(*[Frozen() for _ in range(15)])
        assert "stay" not in session.explain()
        x = torch.ones(8, WIDTH, requires_grad=True)
        model(x).sum().backward()
        assert session.stats.peak_bytes <= 6 * PART


def test_session_when_a_former_one_left_weights_on_the_host_then_it_trains_the_model_too() -> None:
    swapkit.uninstall()
    swapkit.install(device="cpu", limit=8 * PART)  # as much as the device has
    found = []
    model: nn.Module | None = None
    for _ in range(3):
        with swapkit.budget(6 * PART, model) as session:
            if model is None:
                torch.manual_seed(0)
                model = nn.Sequential(*[Frozen() for _ in range(15)])
            x = torch.ones(8, WIDTH, requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None
            found.append(digest_of(x.grad))
            assert "stay" not in session.explain()
            assert session.stats.peak_bytes <= 6 * PART
    assert found == found[:1] * 3


@pytest.mark.parametrize("policy", ["auto", "swap", "rescue"])
def test_step_when_it_does_not_fit_beside_a_model_that_does_then_weights_leave_in_its_middle(
    policy: str,
) -> None:
    rows = 3 * WIDTH
    expected = train(layers(), rows, 6)
    limit = WHOLE + 8 * PART  # backward needs 15 parts besides weights, or what others left
    model = layers()
    weight = model[0].get_parameter("weight")
    with swapkit.budget(limit, model, policy=policy) as session:
        address = model[1].get_parameter("weight").data_ptr()  # so that it stays
        assert "weights: " not in session.explain()
        assert train(model, rows, 6) == expected
        assert "weights: " in session.explain()
        with pytest.raises(RuntimeError, match=SEALED):
            weight.data_ptr()
        assert model[1].get_parameter("weight").data_ptr() == address
        assert session.stats.peak_bytes <= limit
    assert weight.data_ptr()


HOLDERS: dict[str, Callable[[nn.Linear], object]] = {
    "kept": swapkit.keep,
    "address": lambda layer: layer.weight.data_ptr(),
    "numpy": lambda layer: layer.weight.numpy(),
    "dlpack": lambda layer: np.from_dlpack(layer.weight),
    "view": lambda layer: layer.weight.detach(),
    "storage": lambda layer: layer.weight.untyped_storage(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_weight_when_other_code_holds_its_memory_then_it_stays_and_others_leave(
    holder: str,
) -> None:
    model = layers().requires_grad_(requires_grad=False)
    weight, other = (model[number].get_parameter("weight") for number in (1, 2))
    address = weight.untyped_storage().data_ptr()
    with swapkit.budget(2 * WHOLE, model, policy="rescue") as session:
        held = HOLDERS[holder](model[1])  # type: ignore[arg-type]
        torch.empty(3 * WHOLE // 2, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=SEALED):
            other.data_ptr()
        assert weight.data_ptr() == address
        assert "64.00 KiB stay: others view them" in session.explain()
    del held


def test_weights_when_a_device_graph_was_captured_then_they_stay() -> None:
    model = layers()
    with swapkit.budget(2 * WHOLE, model, policy="rescue"):
        with pytest.raises((TypeError, AttributeError)):  # there is no GPU
            torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * WHOLE // 2, dtype=torch.uint8)
        assert model[0].get_parameter("weight").data_ptr()


def test_session_when_the_model_was_compiled_before_then_it_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "has_compiled", has_compiled)
    graphs = []

    def compile_graph(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = layers()
    compiled = torch.compile(model, backend=compile_graph)
    compiled(torch.ones(8, WIDTH))
    assert has_compiled()
    with swapkit.budget(2 * WHOLE, model, policy="rescue"):
        compiled(torch.ones(8, WIDTH))
    assert len(graphs) == 1


def test_construction_when_it_fails_then_what_was_built_before_is_whole() -> None:
    expected = train(layers())
    with swapkit.budget(int(WHOLE * 0.6), policy="rescue") as session:
        model = layers()
        with pytest.raises(torch.OutOfMemoryError):
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, LAYERS * WIDTH))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**model.state_dict(), "0.weight": torch.zeros(1)})
        assert train(model) == expected
        assert session.stats.peak_bytes <= WHOLE * 0.6
