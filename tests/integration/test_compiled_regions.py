"""Blocks that a user compiled stay compiled where swapkit sees operators."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import ConvertFrame
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import swapkit
from swapkit._runtime.model import hook_bypass
from swapkit._runtime.torch_compat.dispatch_modes import DispatchMode
from tests.programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 32
BLOCKS = 3

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    swapkit.install()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted:
    """A backend that counts the calls of what it has compiled."""

    def __init__(self) -> None:
        self.forwards = 0

    def backend(self, graph: Any, inputs: Any) -> Any:
        """Compile as `aot_eager` does."""

        def compile_forward(graph: Any, _inputs: Any) -> Any:
            def run(*arguments: Any) -> Any:
                self.forwards += 1
                return graph.forward(*arguments)

            return make_boxed_func(run)

        def compile_backward(graph: Any, _inputs: Any) -> Any:
            return make_boxed_func(graph.forward)

        make = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
        return make(graph, inputs)


class Block(nn.Module):
    """A module of the user's: `Module.compile` compiles none of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + down


class Layer(nn.Module):
    """A compiled block, and an operator that is not compiled."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.inner = Block()
        self.inner.compile(backend=counted.backend)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self.last(self.inner(x))
        return last


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before torch 2.13 no thread bypasses hooks")
def test_module_inside_a_compiled_one_when_a_thread_may_bypass_hooks_then_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)
    with swapkit.offload():
        nn.Identity()(torch.ones(1))
        assert type(module_hooks._global_forward_hooks) is not OrderedDict
        explained = torch._dynamo.explain(Block())(torch.randn(8, WIDTH))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def save_addmm(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    is_addmm = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_addmm else CheckpointPolicy.PREFER_RECOMPUTE


def train(wrap: Callable[[nn.Module], Callable[..., Any]]) -> tuple[int, list[torch.Tensor]]:
    """Return how often compiled code ran forward in a step, and the gradients."""
    counted = Counted()
    torch.manual_seed(0)
    layers = [Layer(counted) for _ in range(BLOCKS)]
    run = [wrap(layer) for layer in layers]
    x = torch.randn(8, WIDTH, requires_grad=True)
    for step in range(2):  # it is compiled in the first one
        out = x + step
        counted.forwards = 0
        for layer in run:
            out = layer(out)
        out.sum().backward()
    return counted.forwards, [each.grad for layer in layers for each in layer.parameters()]  # type: ignore[misc]


def wrap_as_torch(layer: nn.Module) -> Callable[..., Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_addmm)
    return functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize(
    "terms",
    [{"save": ["addmm"]}, {"offload": ["addmm"]}, {"policy": save_addmm}, {"check_values": True}],
    ids=["save", "offload", "policy", "check_values"],
)
def test_blocks_when_a_region_selects_operators_then_compiled_calls_are_torchs(
    terms: dict[str, Any],
) -> None:
    plain, gradients = train(lambda layer: layer)
    by_torch, _ = train(wrap_as_torch)
    assert (plain, by_torch) == (BLOCKS, 2 * BLOCKS)
    forwards, found = train(lambda layer: swapkit.checkpoint(layer, **terms))
    # Captured ones run once: here what is compiled runs operators of torch.
    assert forwards == (plain if "save" in terms else by_torch)
    assert_same_bits(found, gradients)


def test_modes_when_swapkit_has_them_then_all_know_the_compiler() -> None:
    kinds = [TorchDispatchMode]
    for kind in kinds:
        kinds += kind.__subclasses__()
    ours = [kind for kind in kinds if kind.__module__.startswith("swapkit.")]
    assert len(ours) > 5
    assert [kind for kind in ours if not issubclass(kind, DispatchMode)] == []


def test_memory_when_short_between_two_graphs_then_nothing_of_ours_is_compiled() -> None:
    def train(x: torch.Tensor, weight: torch.Tensor) -> None:
        hidden = (x @ weight).tanh()
        rows = ((hidden.exp() @ weight).sin() * hidden).nonzero().shape[0]  # ends a graph
        (hidden.exp().sin() * rows).sum().backward()

    def note(converter: ConvertFrame, frame: Any, *args: Any, **terms: Any) -> Any:
        files.append(frame.f_code.co_filename)
        return called(converter, frame, *args, **terms)

    files: list[str] = []
    called = ConvertFrame.__call__
    compiled = torch.compile(train, backend="aot_eager")
    x, weight = torch.randn(4096, 64, requires_grad=True), torch.randn(64, 64)
    with mock.patch.object(ConvertFrame, "__call__", note):
        with swapkit.budget("13MiB", policy="rescue") as session:
            compiled(x, weight)
            assert session.stats.swapped_out_bytes
        with (
            swapkit.budget("4MiB", policy="rescue"),
            pytest.raises(torch.OutOfMemoryError, match="Largest holders"),
        ):
            compiled(x, weight)
    assert __file__ in files
    assert not [each for each in files if "swapkit/_" in each]
