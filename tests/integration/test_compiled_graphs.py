"""Models that are compiled as a whole: their saved tensors move while their graphs run."""

from __future__ import annotations

import gc
import itertools
import re
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import swapkit
from swapkit.ir.traces import Phase
from swapkit.testing import planning_at_once
from tests.support import run_fresh
from tests.support.compiled_programs import (
    FUNCTIONS,
    ROWS,
    WIDTH,
    in_bfloat16,
    layers,
    with_checkpoint,
    with_choices,
    with_complex,
    with_ctx,
    with_dropout,
    with_effects,
    with_function_gradient,
    without_operators,
)
from tests.support.sessions import Block, Plain, Training, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STEPS, LAST = 24, 4

pytestmark = [
    pytest.mark.usefixtures("installation", "steady_machine"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not support code generation for complex:UserWarning"),
    # Dynamo's own.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
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


def test_peak_when_torch_makes_saved_views_at_the_end_then_their_memory_moves_before() -> None:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    attend = partial(nn.functional.scaled_dot_product_attention, attn_mask=mask, dropout_p=0.1)

    def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(8):  # what each softmax saves is a view, made behind all operators
            heads = (x @ weight).view(ROWS, 4, -1).transpose(0, 1)[None]
            x = attend(heads, heads, heads)[0].transpose(0, 1).flatten(1)
        return x

    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    compiled = torch.compile(attention, backend="aot_eager")
    once(compiled, x, weight)
    softmax_bytes = 4 * ROWS * ROWS * x.itemsize  # of eight; with its dropout, a layer saves more
    budget_bytes = swapkit.memory_stats()["allocated_bytes.all.current"] + 5 * softmax_bytes
    with swapkit.budget(budget_bytes, policy="rescue"):
        once(compiled, x, weight)


def test_trace_when_a_compiled_model_has_microbatches_then_each_is_recorded_as_the_first() -> None:
    training = compile_as("whole", "aot_eager")()
    training.microbatches = 3
    with planning_at_once(), swapkit.budget("1GiB", training.model, training.optimizer) as session:
        for _ in range(6):
            training.step()
        trace = session.trace
    assert trace is not None
    forward = [each for each in trace.operators if each.phase is Phase.FORWARD]
    counts = Counter(each.microbatch for each in forward if each.module)
    assert counts[0] == counts[1] == counts[2] > 0
    # The loss, behind the compiled call that recording began in.
    assert [each.microbatch for each in forward if each.name == "aten.mean.default"] == [0, 1, 2]


# ---- programs ------------------------------------------------------------------------------------


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


def by_compiled_autograd(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: function(x, weight).sum().backward(), backend="eager")()


RUNS = (
    once,
    twice_through_one_graph,
    two_graphs,
    other_sizes,
    after_an_error,
    on_two_threads,
    by_compiled_autograd,
)


# Threads share random numbers in any order; torch cannot do the last.
IMPOSSIBLE = {
    (with_dropout, on_two_threads),
    (with_checkpoint, on_two_threads),
    (with_checkpoint, by_compiled_autograd),
    (with_complex, by_compiled_autograd),
    (with_function_gradient, by_compiled_autograd),
}
# Otherwise hooks see the handles, and compiled autograd traces all hooks.
HIDES_HANDLES = hasattr(ViewAndMutationMeta, "tensors_saved_for_backwards_no_vc_check_slice")
needs_hidden = pytest.mark.skipif(not HIDES_HANDLES, reason="torch's hooks see every saved tensor")


def list_programs() -> list[Any]:
    """Each function and each run in the quick tests; their product, and inductor, in the slow."""
    found = []
    for backend, function, run in itertools.product(("aot_eager", "inductor"), FUNCTIONS, RUNS):
        is_quick = backend == "aot_eager" and (function is layers or run is once)
        if (function, run) not in IMPOSSIBLE:
            marks = [] if is_quick else [pytest.mark.slow]
            marks += [needs_hidden] if run is by_compiled_autograd else []
            found.append(pytest.param(backend, function, run, marks=marks))
    return found


# Of torch 2.11, once, where compiled autograd traces a hook written in C.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize(("backend", "function", "run"), list_programs())
def test_program_when_tensors_of_its_graphs_move_then_all_bits_are_those_of_torch_alone(
    backend: str, function: Callable[..., torch.Tensor], run: Callable[..., None]
) -> None:
    torch.manual_seed(1)
    given = torch.randn(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)

    def train(compiled: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        weight, x = (each.clone() for each in given)
        weight.requires_grad_()
        results: list[torch.Tensor] = []

        def noted(*args: torch.Tensor) -> torch.Tensor:
            result = compiled(*args)
            results.append(result.detach().clone())
            return result

        torch.manual_seed(2)
        run(noted, x, weight)
        assert weight.grad is not None
        return [*results, weight.grad, weight.detach(), x, torch.get_rng_state()]

    every: tuple[Any, ...] = (
        swapkit.offload(min_bytes=1),
        torch.autograd.graph.save_on_cpu(),
        nullcontext(),
    )
    compiled = torch.compile(function, backend=backend)
    with without_operators():
        plain = [train(compiled) for _ in every]  # a later one may use a graph for other sizes
    torch._dynamo.reset()
    for hooks, expecteds in zip(every, plain, strict=True):
        with hooks:
            for found, expected in zip(train(compiled), expecteds, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [with_dropout, in_bfloat16])
def test_checkpoint_when_it_is_around_a_compiled_function_then_the_bits_are_those_without(
    backend: str, function: Callable[..., torch.Tensor]
) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)

    def train(call: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        result = call(torch.compile(function, backend=backend), x, weight)
        return [result, *torch.autograd.grad(result.square().sum(), weight)]

    with without_operators():
        expecteds = train(lambda compiled, *args: compiled(*args))
    torch._dynamo.reset()
    with swapkit.offload(min_bytes=1):
        for found, expected in zip(
            train(partial(checkpoint, use_reentrant=False)), expecteds, strict=True
        ):
            assert torch.equal(found, expected)


def test_graph_when_a_backend_runs_what_inductor_would_compile_then_the_same_bits() -> None:
    def run(graph: torch.fx.GraphModule, *_: object, **_options: object) -> Any:
        boxed: Any = aot_autograd
        return boxed.make_boxed_func(graph.forward)

    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)

    def train() -> torch.Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(layers, backend=backend)
        with fresh_cache(), swapkit.offload(min_bytes=1):  # torch's cache ignores `inner_compile`
            (found,) = torch.autograd.grad(compiled(x, weight).sum(), weight)
        return found

    backend: Any = partial(compile_fx, inner_compile=run)
    with without_operators():
        expected = train()
    assert torch.equal(train(), expected)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_loops_when_tensors_are_packed_then_they_are_those_of_torch_alone(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    if function in {with_complex, with_effects, with_choices} and dtype is torch.bfloat16:
        pytest.skip("torch has no such operators")
    weight = torch.randn(WIDTH, WIDTH, dtype=dtype, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, dtype=dtype)

    def compile_loops() -> tuple[set[str], str]:
        torch._dynamo.reset()
        compiled = torch.compile(function)
        with fresh_cache():
            codes = run_fw_bw_and_get_code(lambda: compiled(x, weight))[1]
        code = "".join(codes)
        # An operator between two loops puts them into two functions, which count their operands;
        # functions that are the same are there once.
        loops = re.findall(r"\n    \{\n(.*?)\n    \}", code, re.DOTALL)
        return {re.sub(r"\w+_ptr\d+", "ptr", each) for each in loops}, code

    found, code = compile_loops()
    assert "swapkit.pack_saved" in code
    assert "swapkit.unpack_saved" in code
    with without_operators():
        assert found == compile_loops()[0] != set()


# ---- what is packed ------------------------------------------------------------------------------


@needs_hidden
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_graph_when_memory_that_it_has_packed_is_overwritten_then_the_same_bits(
    backend: str, function: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    givens = [each.untyped_storage().data_ptr() for each in (weight, x)]
    overwritten: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        is_owned = torch._C._storage_Use_Count(memory._cdata) <= 2  # this and the tensor
        kept = tensor.detach().clone()
        has_nan = tensor.is_floating_point() or tensor.is_complex()
        if is_owned and memory.data_ptr() not in givens and has_nan:
            overwritten.append(tensor.nbytes)
            tensor.data.fill_(torch.nan)
        return kept

    def train() -> torch.Tensor:
        weight.grad = None
        torch.manual_seed(2)
        once(compiled, x, weight)
        assert weight.grad is not None
        return weight.grad.clone()

    compiled = torch.compile(function, backend=backend)
    plain = train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert torch.equal(train(), plain)
    assert overwritten, "nothing was packed inside of the graph"


def test_gradients_when_parameters_wrap_tensors_then_the_same_bits() -> None:
    torch.manual_seed(1)
    parts = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    x = TwoTensor(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    compiled = torch.compile(layers, backend="aot_eager")

    def train() -> list[torch.Tensor]:
        weight = TwoTensor(*(each.clone() for each in parts)).requires_grad_()
        once(compiled, x, weight)
        assert isinstance(weight.grad, TwoTensor)
        return [weight.grad.a, weight.grad.b]

    plain = train()
    with swapkit.offload(min_bytes=1):
        assert all(map(torch.equal, train(), plain))


def test_hooks_of_the_program_when_torch_compiles_them_then_they_have_every_tensor() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    hooks = [
        torch.fx.symbolic_trace(lambda tensor: tensor.to(torch.float64)),
        torch.fx.symbolic_trace(lambda tensor: tensor.to(torch.float32)),
    ]
    once(layers, x, weight)
    assert weight.grad is not None
    expected, weight.grad = weight.grad, None
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        once(torch.compile(layers, backend="aot_eager"), x, weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def offload_tanh(_context: object, operator: object, *_args: object, **_kwargs: object) -> Any:
    if operator is torch.ops.aten.tanh.default:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def inner(value: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            value = (value @ weight).tanh().exp()
        return value

    policy = partial(create_selective_checkpoint_contexts, offload_tanh)
    result: torch.Tensor = checkpoint(inner, x, use_reentrant=False, context_fn=policy)
    return result


@pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="torch has no such policy yet"
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_selective_checkpoint_when_compiled_then_what_it_offloads_leaves_the_device(
    backend: str,
) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(16 * ROWS, WIDTH)
    compiled = torch.compile(selective, backend=backend)

    def train() -> torch.Tensor:
        weight.grad = None
        once(compiled, x, weight)
        assert weight.grad is not None
        return weight.grad.clone()

    once(selective, x, weight)  # torch ignores the policy's wish
    with swapkit.budget("1GiB") as session:
        within = train()
        assert session.stats.swapped_out_bytes == 4 * x.nbytes
    assert torch.equal(train(), within)


def test_explanation_when_regions_have_run_then_each_has_a_line() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    with swapkit.budget("1GiB") as session:
        once(torch.compile(with_ctx, backend="aot_eager"), x, weight)
        text = session.explain()
    lines = [each for each in text.splitlines() if "with_ctx" in each]
    assert lines
    for line in lines:
        assert line.startswith("compiled region with_ctx (compiled_programs.py:")
        assert "saved tensors, " in line
        assert line.endswith("do not: inputs and parameters of the region")


@pytest.mark.slow
def test_caches_when_another_process_compiles_the_same_then_they_hit(tmp_path: Path) -> None:
    code = f"""
        import os, warnings
        warnings.simplefilter("ignore")  # torch's own, while it loads inductor
        import torch, swapkit
        from torch._dynamo.utils import counters

        swapkit.install(device="cpu")
        torch.manual_seed(0)
        weight = torch.randn({WIDTH}, {WIDTH}, requires_grad=True)
        x = torch.randn({16 * ROWS}, {WIDTH})

        @torch.compile
        def layers(x):
            for _ in range(6):
                x = torch.nn.functional.gelu(x @ weight)
            return x.sum()

        with swapkit.budget(os.environ["BUDGET"], policy="rescue") as session:
            layers(x).backward()
            moved = session.stats.swapped_out_bytes
        has_line = "compiled region" in session.explain()
        found = counters["aot_autograd"]
        hits, misses = found["autograd_cache_hit"], found["autograd_cache_miss"]
        print(sum(weight.grad.flatten().tolist()).hex(), moved > 0, has_line, hits, misses)
    """
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    first, second, third = (
        run_fresh(code, BUDGET=budget, timeout_s=300, **caches).split()
        for budget in ("6MiB", "6MiB", "5MiB")
    )
    assert first[1:] == ["True", "True", "0", "1"]
    assert second[1:] == third[1:] == ["True", "True", "1", "0"]
    assert first[0] == second[0] == third[0]
