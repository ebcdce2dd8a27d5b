"""Models that are compiled as a whole: their saved tensors move while their graphs run."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

import swapkit
from swapkit.testing import planning_at_once
from tests.support.sessions import Block, Plain, Training, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, ROWS = 64, 256
STEPS, LAST = 24, 4

pytestmark = [
    pytest.mark.usefixtures("installation", "steady_machine"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # No pool of threads that outlives this, and graphs that may be kept.
    with (
        torch._inductor.config.patch(compile_threads=1),
        torch._functorch.config.patch(donated_buffer=False),
    ):
        yield
    torch._dynamo.reset()


class Whole(nn.Module):
    """Blocks, and a graph break between two of them."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self.breaks and index == 2:
                torch._dynamo.graph_break()
            x = block(x)
        return x


def compile_as(kind: str, backend: str) -> Callable[[], Training]:
    def make() -> Training:
        training = make_training(lambda: Whole(breaks=kind == "graph break"))
        whole: Any = training.model
        for module in whole.blocks if kind == "blocks" else [whole]:
            module.compile(backend=backend)
        return training

    return make


def count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "aot_eager") for kind in ("whole", "blocks", "graph break")),
        *(
            pytest.param(kind, "inductor", marks=pytest.mark.slow)
            for kind in ("whole", "blocks", "graph break")
        ),
    ],
)
def test_session_when_the_model_is_compiled_then_a_plan_is_followed_within_the_budget(
    kind: str, backend: str, share: float
) -> None:
    make = compile_as(kind, backend)
    plain: Plain = train_plainly(make, STEPS)
    training, graphs = make(), count_graphs()
    budget_bytes = plain.budget(share)
    with (
        planning_at_once(),
        swapkit.budget(budget_bytes, training.model, training.optimizer) as session,
    ):
        for step in range(STEPS):
            if step == STEPS - LAST:
                rescues = session.stats.oom_rescues
            training.step()
        assert session.stats.peak_bytes <= budget_bytes
        assert session.stage == "stable"
        assert session.plan is not None
        assert session.plan.decisions
        assert session.stats.oom_rescues == rescues
    assert training.outcome() == plain.outcome
    assert count_graphs() == graphs, "the session compiled anew"


# ---- programs ------------------------------------------------------------------------------------


def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = nn.functional.gelu(x @ weight)
    return x


def with_output_saved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).tanh()
    return torch.cat((y.sin(), y))


def with_pieces(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second, third = (x @ weight.repeat(1, 3)).chunk(3, -1)
    return (first.view(-1, 8, 8) * second.view(-1, 8, 8)).tanh().flatten(1) + third.sin()


def with_dropout(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(layers(x, weight), 0.5) @ weight


def in_bfloat16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layers(x, weight).float()


def once(function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> None:
    function(x, weight).sum().backward()


def twice_through_one_graph(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> None:
    loss = function(x, weight).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_graphs(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> None:
    first, second = function(x, weight).sum(), function(x * 2, weight).sum()
    first.backward()
    second.backward()


def other_sizes(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> None:
    for rows in (ROWS, ROWS // 2, ROWS - 56):
        function(x[:rows], weight).sum().backward()


def after_an_error(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> None:
    with pytest.raises(KeyError):
        raise KeyError(function(x, weight).sum())
    function(x, weight).sum().backward()


def on_two_threads(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> None:
    losses: list[torch.Tensor] = []
    function(x, weight).sum().backward()  # compiles

    def train() -> None:
        with swapkit.offload(min_bytes=1):
            losses.append(function(x, weight).sum())

    threads = [threading.Thread(target=train) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for loss in losses:
        loss.backward()


RUNS = (once, twice_through_one_graph, two_graphs, other_sizes, after_an_error, on_two_threads)
FUNCTIONS = (layers, with_output_saved, with_pieces, with_dropout, in_bfloat16)


def list_programs() -> list[Any]:
    """Each function and each run in the quick tests; their product, and inductor, in the slow."""
    found = []
    for backend in ("aot_eager", "inductor"):
        for function in FUNCTIONS:
            for run in RUNS:
                if function is with_dropout and run is on_two_threads:
                    continue  # the threads share random numbers in any order
                is_quick = backend == "aot_eager" and (function is layers or run is once)
                marks = [] if is_quick else [pytest.mark.slow]
                found.append(pytest.param(backend, function, run, marks=marks))
    return found


@pytest.mark.parametrize(("backend", "function", "run"), list_programs())
def test_gradients_when_tensors_of_a_compiled_graph_move_then_the_same_bits(
    backend: str, function: Callable[..., torch.Tensor], run: Callable[..., None]
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)

    def train() -> torch.Tensor:
        weight.grad = None
        torch.manual_seed(2)
        run(torch.compile(function, backend=backend), x, weight)
        assert weight.grad is not None
        return weight.grad.clone()

    plain = train()
    with swapkit.offload(min_bytes=1):
        assert torch.equal(train(), plain)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(train(), plain)
    assert torch.equal(train(), plain)  # without hooks


def test_graph_when_it_is_dropped_then_so_is_what_it_has_saved() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    compiled = torch.compile(layers, backend="aot_eager")
    once(compiled, x, weight)
    gc.collect()
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    with swapkit.offload(min_bytes=1):
        result = compiled(x, weight)
        assert swapkit.memory_stats()["allocated_bytes.all.current"] > before
        del result
    gc.collect()
    assert swapkit.memory_stats()["allocated_bytes.all.current"] == before


def test_hooks_of_others_when_they_copy_a_handle_then_the_error_says_so() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    handle = torch.ops.swapkit.pack_saved(torch.randn(ROWS))
    assert torch.ops.swapkit.unpack_saved(handle, [ROWS], [1], torch.float, weight.device).sum()
    with pytest.raises(RuntimeError, match="was copied by other code's saved-tensor hooks"):
        torch.ops.swapkit.unpack_saved(handle.clone(), [ROWS], [1], torch.float, weight.device)
