"""Weights that leave, in compiled regions: each brings its own, and keeps them to its end."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph

import swapkit
from swapkit.simulation.items import is_weight
from swapkit.testing.planning import planning_at_once
from tests.integration.test_planned_weights import moved_bytes, train_with_traffic
from tests.integration.test_weights import frozen_bytes, send_away, train
from tests.support.sessions import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 256
LAYERS = 8


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Serve torch on the CPU, and forget what was compiled."""
    torch._dynamo.reset()
    counters.clear()
    swapkit.install(device="cpu")
    with torch._inductor.config.patch(compile_threads=1):  # no pool that outlives the test
        yield
    torch._dynamo.reset()
    gc.collect()
    swapkit.uninstall()


class Block(nn.Module):
    """A layer whose kernels read frozen weights by their address, and write to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH)
        self.after = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(torch.tanh(self.before(x) @ (self.scale * 0.1)))
        z: torch.Tensor = x + y + self.up(self.down(x))
        return z


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def run(model: nn.Module) -> tuple[list[str], ...]:
    """Return the bits of steps of training, of inference, and of the model behind them."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    steps = train(model, optimizer)
    with torch.no_grad():
        results = [digest([model(torch.ones(16, WIDTH))])]
    # Copies: a weight whose memory a numpy array has had stays.
    return steps, results, [digest([each.clone()]) for each in model.state_dict().values()]


def test_training_when_blocks_are_compiled_then_bits_are_the_same_and_a_session_compiles_once() -> (
    None
):
    model = make()
    for block in model:
        block.compile()
    expected = run(model)
    plain_graphs = counters["stats"]["unique_graphs"]
    limit = int(frozen_bytes(model) * 0.7)
    for policy in ("auto", "swap", "rescue"):
        model.load_state_dict(make().state_dict())
        with swapkit.budget(limit, model, policy=policy) as session:
            found = run(model)
            stats = session.stats
        assert found == expected
        assert stats.peak_bytes <= limit
        assert stats.swapped_in_bytes > 4 * frozen_bytes(model)
        assert counters["stats"]["unique_graphs"] == 2 * plain_graphs
    model.load_state_dict(make().state_dict())
    assert run(model) == expected
    assert counters["stats"]["unique_graphs"] == 2 * plain_graphs


@pytest.mark.promise("D1")
def test_step_when_blocks_are_compiled_then_weights_move_as_a_plan_decides() -> None:
    model = make()
    for block in model:
        block.compile()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    limit = int(frozen_bytes(model) * 0.7)
    with planning_at_once(), swapkit.budget(limit, model, optimizer) as session:
        _, traffic = train_with_traffic(session, model, optimizer)
        plan = session.plan
    assert plan is not None
    assert plan.trace is not None
    moved = [plan.trace.storages[each.storage] for each in plan.decisions]
    assert any(is_weight(each) and each.module.endswith("scale") for each in moved)
    planned = moved_bytes(plan)[0]
    # A saved tensor may be used again before its copy out is whole: then none has to be copied in.
    saved_bytes = 16 * WIDTH * 4
    late = traffic[-8:]
    assert any(rescues == 0 and planned - came in {0, saved_bytes} for rescues, came, _ in late)


def test_weights_when_frozen_and_compiled_then_they_are_copied_out_once() -> None:
    model = make().requires_grad_(requires_grad=False).eval()
    for block in model:
        block.compile()
    with swapkit.budget(int(frozen_bytes(model) * 0.6), model, policy="rescue") as session:
        for _ in range(4):
            model(torch.ones(16, WIDTH))
    assert session.stats.swapped_in_bytes > frozen_bytes(model)
    assert session.stats.swapped_out_bytes < 1.1 * frozen_bytes(model)  # and its buffers


# ---- any program ---------------------------------------------------------------------------------


def steps_of(
    blocks: list[Block], call: Callable[..., torch.Tensor], rows: list[int]
) -> list[torch.Tensor]:
    """Return results of calls whose weights leave before forward and backward; and the blocks."""
    model = nn.ModuleList(blocks)
    found: list[torch.Tensor] = []
    for step, count in enumerate(rows):
        send_away()
        y = call(torch.full((count, WIDTH), step + 1.0) * torch.arange(count)[:, None])
        found.append(y.detach())
        send_away()
        y.square().mean().backward()
    send_away()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [*found, *gradients, *model.state_dict().values()]


def broken(blocks: list[Block]) -> list[torch.Tensor]:
    """Graph breaks and other shapes."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = blocks[0](x)
        send_away()  # breaks the graph
        z: torch.Tensor = blocks[1](y) * blocks[0].before.weight
        return z

    return steps_of(blocks, torch.compile(call), [4, 6, 9])


def checkpointed(blocks: list[Block]) -> list[torch.Tensor]:
    compiled = torch.compile(blocks[0])

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False)
        return y

    return steps_of(blocks, call, [4, 4])


def aliased(blocks: list[Block]) -> list[torch.Tensor]:
    """Results that are weights, and views of them, which the program then writes to."""
    block = blocks[0]
    compiled = torch.compile(lambda x: [block(x), block.scale.t(), block.scale, block.scale[2:]])

    def call(x: torch.Tensor) -> torch.Tensor:
        views = compiled(x)
        y: torch.Tensor = views.pop(0)
        for view in views:
            send_away()
            view.mul_(1.5)
        return y

    return steps_of(blocks, call, [4, 4])


def written(blocks: list[Block]) -> list[torch.Tensor]:
    """Weights that the region itself changes, and one of which it is given two views."""

    def call(x: torch.Tensor, weight: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        weight.mul_(1.1)
        part.add_(1)
        y: torch.Tensor = blocks[0](x)
        return y

    compiled, scale = torch.compile(call), blocks[0].scale
    return steps_of(blocks, lambda x: compiled(x, scale, scale.view(-1)[5:90]), [4, 4, 4])


def stepped(blocks: list[Block]) -> list[torch.Tensor]:
    """An optimizer that is compiled: a region that changes all weights."""
    block = blocks[0].requires_grad_()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    compiled, step = torch.compile(block), torch.compile(optimizer.step)
    found: list[torch.Tensor] = []
    for _ in range(3):
        found += steps_of([block], compiled, [4])
        step()
        optimizer.zero_grad()
    return [*found, *block.parameters()]


def on_threads(blocks: list[Block]) -> list[torch.Tensor]:
    compiled = [torch.compile(each.eval()) for each in blocks]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def work(at: int) -> None:
        for step in range(16):
            send_away()
            found[at].append(compiled[at](torch.full((4, WIDTH), step + 1.0)).detach())

    work(0)  # compiles
    threads = [threading.Thread(target=work, args=(at,)) for at in found]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [each for results in found.values() for each in results]


PROGRAMS = [broken, checkpointed, aliased, written, stepped, on_threads]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_when_its_weights_leave_around_each_region_then_its_results_are_the_same(
    program: Callable[[list[Block]], list[torch.Tensor]],
) -> None:
    found = []
    for limit in ("64MiB", "3MiB"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = [Block(), Block()]
        model = nn.Sequential(*blocks, nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False))
        with swapkit.budget(limit, model, policy="rescue") as session:
            found.append([digest([each.detach().clone()]) for each in program(blocks)])
            is_moved = session.stats.swapped_in_bytes > 0
        del model, blocks
        gc.collect()
    assert is_moved
    assert found[0] == found[1]


# ---- what does not fit ---------------------------------------------------------------------------


def test_region_when_its_weights_do_not_fit_then_the_error_says_so_and_smaller_blocks_do() -> None:
    model = make().requires_grad_(requires_grad=False).eval()
    x = torch.ones(4, WIDTH)
    whole: Any = torch.compile(model)
    expected = [whole(x), torch.compile(model[0])(x)]
    with swapkit.budget(int(frozen_bytes(model) * 0.6), model, policy="rescue"):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="compile smaller blocks") as caught:
                whole(x)
            assert "of weights are used by a compiled region that runs" in str(caught.value)
        for block in model:
            block.compile()
        found = [model(x), model[0](x)]
    assert all(map(torch.allclose, found, expected))


def test_region_when_a_device_graph_has_its_addresses_then_an_error_names_the_remedy() -> None:
    model = make().requires_grad_(requires_grad=False).eval()
    compiled: Any = torch.compile(model[0])
    x = torch.ones(4, WIDTH)

    def record() -> None:  # as on a GPU
        for each in gc.get_objects():
            if type(each) is CompiledFxGraph:
                each.cudagraph_info = True  # type: ignore[assignment]

    compiled(x)
    record()
    compiled(x)
    with swapkit.budget(int(frozen_bytes(model) * 0.6), model, policy="rescue"):
        model[0].compile()
        model[0](x)
        record()
        with pytest.raises(RuntimeError, match="without mode='reduce-overhead'"):
            compiled(x)
        assert model[1](x).shape == x.shape
