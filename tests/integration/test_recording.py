"""Recording real steps: the memory that the pool saw, the bits that training has, large models."""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit._runtime.allocators.installation import installed_pool
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.trace_builder import has_leftovers
from swapkit._runtime.saved.device import CPU
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit.api.recording import record
from swapkit.errors import InvalidArgument, SessionError
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import BEFORE, Kind, Phase
from tests.programs import assert_same_bits
from tests.support import installed, run_python
from tests.support.recorders import lives_of, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 128


class Layer(nn.Module):
    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> Any:
        if self.again:
            return x + checkpoint(self.body, x, use_reentrant=False)
        return x + self.body(x)


def training(*, again: bool = False) -> tuple[Callable[[], None], nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(again=again) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, WIDTH)

    def step() -> None:
        for _ in range(2):
            model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


@pytest.fixture(autouse=True)
def collected() -> None:
    """Let what other tests left in cycles not lie in the pool."""
    gc.collect()


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_memory_when_a_step_is_recorded_then_it_is_what_the_pool_had_in_use(
    again: bool, is_first: bool
) -> None:
    with installed():
        step, model, optimizer = training(again=again)
        if not is_first:
            step()
        trace, _ = recorded(step, model, optimizer)
        assert trace.peak_bytes > 2 << 20


def test_record_when_a_storage_has_the_place_of_an_emptied_one_then_it_counts_as_another() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.ones(2, 8)
    found = []

    def step() -> None:
        emptied = torch.UntypedStorage(8 * MEBI, device="meta")
        emptied.resize_(4 * MEBI)  # made in the step
        emptied.resize_(0)
        place = emptied._cdata
        del emptied
        others = []
        for _ in range(1000):
            others.append(torch.UntypedStorage(16 * MEBI, device="meta"))
            if others[-1]._cdata == place:
                found.append(others[-1])
                others[-1].resize_(1)
                break
        model(x).sum().backward()

    trace = swapkit.record(step, model, hardware="H100")
    assert found, "no storage has the place"
    assert trace.bytes_before // MEBI == 8 + 16


def test_storage_when_its_memory_goes_and_comes_back_then_each_time_is_a_life_of_its_own() -> None:
    with installed():
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH + 1))
        x = torch.randn(WIDTH, requires_grad=True)

        def step() -> None:
            storage, kept = weight.untyped_storage(), weight.detach()[:1].clone()
            ((weight.detach() * 2).sum() + x.exp().sum()).backward()  # operators with it
            storage.resize_(0)
            torch.ones(4).exp()  # and without
            storage.resize_(weight.nbytes)
            weight.detach()[:1].copy_(kept)

        trace, _ = recorded(step, nn.ParameterList([weight]))
        former, later = (each for each in trace.storages if each.kind is Kind.STATE)
        assert former.birth == BEFORE
        assert former.death < later.birth  # the operator in between runs without it
        assert later.death == len(trace.operators)


def test_parameter_when_its_data_is_exchanged_then_its_memory_counts_while_it_is_there() -> None:
    with installed():
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        x = torch.randn(WIDTH, requires_grad=True)

        def step() -> None:
            with torch.no_grad():
                kept = weight[:1].clone()
                weight.data = torch.empty(0)
            (x.exp() * 2).sum().backward()
            weight.data = torch.zeros(WIDTH, WIDTH)
            with torch.no_grad():
                weight[:1].copy_(kept)

        trace, _ = recorded(step, nn.ParameterList([weight]))
        assert len(lives_of(trace, weight.nbytes)) == 2


def test_memory_when_no_operator_is_seen_to_take_it_then_it_counts_while_it_is_there() -> None:
    held: list[torch.Tensor] = []
    nbytes = 3 << 20
    with installed():
        x = torch.randn(WIDTH, requires_grad=True)

        def step() -> None:
            y = x.exp()
            with hidden():
                held.append(torch.empty(nbytes // 4))
            y = y * 2
            held.clear()
            y.sum().backward()

        trace, recorder = recorded(step)
        assert lives_of(trace, nbytes) == [(1, 2)]
        assert not has_leftovers(trace, recorder.storages)


def test_workspace_when_an_operator_needs_one_then_it_is_known() -> None:
    with installed():
        w = torch.randn(64, 64, requires_grad=True)
        images = torch.randn(4, 8, 32, 32)

        def step() -> None:
            (torch.linalg.svdvals(w).sum() + images.sum()).backward()

        trace = record(step)
        name = "aten._linalg_svd.default"
        (needing,) = [o for o in trace.operators if o.name == name and o.phase is Phase.FORWARD]
        assert needing.workspace_bytes >= 64 * 64 * 4


def test_base_when_the_pool_holds_more_than_is_seen_then_that_is_counted() -> None:
    with installed():
        step, model, optimizer = training()
        without = record(step, model, optimizer).base_bytes
        held = torch.ones(1 << 20)
        assert record(step, model, optimizer).base_bytes >= without + held.nbytes


def test_tensors_when_they_are_outside_the_pool_then_they_count_nothing() -> None:
    swapkit.uninstall()  # whoever installed it
    outside = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with installed():
        trace = record(lambda: (outside @ outside).exp().sum().backward())
    sizes = [each.nbytes for each in trace.storages if each.kind is Kind.STATE or each.birth == -1]
    assert sizes == [0]


@pytest.mark.promise("A3")
def test_training_when_it_is_recorded_then_it_has_the_same_bits() -> None:
    def trained(*, recorded: bool) -> list[torch.Tensor]:
        step, model, optimizer = training()
        for _ in range(3):
            _ = record(step, model, optimizer) if recorded else step()
        return [each.clone() for each in model.state_dict().values()]

    assert_same_bits(trained(recorded=True), trained(recorded=False))


@pytest.mark.parametrize("limit_mib", [64, 4])
def test_session_when_it_moves_what_is_recorded_then_storages_keep_their_numbers(
    limit_mib: int,
) -> None:
    with installed():
        step, model, optimizer = training()
        step()
        expected = record(step, model, optimizer)
        limit = f"{limit_mib}MiB"
        with swapkit.budget(limit, model, optimizer, policy="rescue") as session:
            step()
            runtime = get_runtime()
            recorder = Recorder(
                Setting(
                    device=CPU,
                    tracker=runtime.tracker,
                    pool=installed_pool("cpu"),
                    root=model,
                    optimizers=(optimizer,),
                )
            )
            assert session._active is not None
            packer = session._active.hooks.packer
            packer.observer = recorder.savings
            recorder.start()
            try:
                step()
            finally:
                recorder.stop()
                packer.observer = None
            swapped_bytes = session.stats.swapped_in_bytes
    trace = recorder.trace()
    check_trace(trace)
    assert (swapped_bytes > 0) == (limit_mib == 4)
    # A copy under way holds a storage, too: it may be seen to be let go of a little later.
    for mine, its in zip(trace.storages, expected.storages, strict=True):
        assert replace(mine, held=its.held, death=its.death) == its
        assert mine.held >= its.held
        assert mine.death >= its.death
    assert trace.events == expected.events
    assert trace.signature == expected.signature
    assert [(o.name, o.reads, o.writes, o.microbatch) for o in trace.operators] == [
        (o.name, o.reads, o.writes, o.microbatch) for o in expected.operators
    ]


def test_record_when_a_session_is_active_then_it_is_refused() -> None:
    with installed(), swapkit.budget("1GiB"), pytest.raises(SessionError, match="outside `with"):
        record(lambda: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "a function of no arguments"),
        ((lambda: None,), "saw no backward"),
        ((lambda: None, 3), "model=3"),
        ((lambda: None, None, 3), "optimizer=3"),
    ],
)
def test_record_when_an_argument_is_not_understood_then_it_says_which(
    arguments: Any, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        record(*arguments)
    with pytest.raises(InvalidArgument, match="device='nowhere'"):
        record(lambda: None, device="nowhere")


def test_model_of_transformers_when_it_is_recorded_then_layers_have_their_names() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(_llama(transformers, layers=2, width=64))
    ids = torch.randint(0, 100, (2, 32))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    trace = record(step, model)
    check_trace(trace)
    assert trace.label == "LlamaForCausalLM"
    modules = {each.module for each in trace.operators if each.phase is Phase.FORWARD}
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"} <= modules
    saved = {each.module for each in trace.storages if each.is_saved}
    assert {"model.layers.0.mlp.act_fn", "model.layers.1.mlp.act_fn"} <= saved


@pytest.mark.parametrize("length", [4096, 16384, 131072])
def test_llama_when_it_is_on_meta_then_no_storage_grows_with_the_square_of_the_length(
    length: int,
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Transformers makes a mask for `sdpa` where it cannot look whether it needs one.
    transformers.AttentionInterface.register("causal", sdpa_attention_forward)
    layers, width = 2, 512
    with torch.device("meta"):
        config = _llama(transformers, layers=layers, width=width, attention="causal")
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = record(step, model, optimizer, hardware="H100")
    check_trace(trace)
    names = [each.name for each in trace.operators]
    assert names.count("aten._scaled_dot_product_flash_attention.default") == layers
    assert names.count("aten._scaled_dot_product_flash_attention_backward.default") == layers
    assert max(each.nbytes for each in trace.storages) <= length * width * 16
    attention_flops = 2 * length**2 * width
    forward = next(o for o in trace.operators if "flash_attention.default" in o.name)
    assert forward.seconds >= attention_flops / 540e12
    assert math.isclose(forward.seconds, attention_flops / 540e12, rel_tol=0.5) or length < 16384


@pytest.mark.parametrize("others", [0, 1])
def test_record_when_nothing_of_swapkit_has_run_then_a_trace_and_torchs_hooks_are_gone(
    others: int,
) -> None:
    printed = run_python(f"""
        import threading
        import torch, swapkit
        from torch.nn.modules import module
        from torch.optim import optimizer

        done = threading.Event()
        for _ in range({others}):
            threading.Thread(target=done.wait).start()
        with torch.device("meta"):
            model = torch.nn.Linear(64, 64)
            batch = torch.ones(8, 64)
        for _ in range(2):
            trace = swapkit.record(lambda: model(batch).sum().backward(), model, hardware="H100")
            print(len(trace.operators) > 0, len(module._global_forward_hooks),
                  len(optimizer._global_optimizer_post_hooks))
        done.set()
    """)
    assert printed.splitlines() == ["True 0 0"] * 2


def _llama(transformers: Any, *, layers: int, width: int, attention: str = "sdpa") -> Any:
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        attn_implementation=attention,
    )


def test_record_when_the_step_makes_fake_tensors_then_torch_warns_of_nothing() -> None:
    model = nn.Linear(8, 8)

    def step() -> None:
        with FakeTensorMode():
            shape = (torch.randn(3, 4) @ torch.randn(4, 5)).shape
        (model(torch.randn(2, 8)).exp() * shape[1]).sum().backward()

    with installed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = swapkit.record(step, model)
    assert trace.operators


def test_record_when_a_model_of_fake_tensors_is_recorded_on_a_pool_then_its_step_is_seen() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with installed():
        trace = swapkit.record(lambda: model(x).sum().backward(), model, hardware="H100")
    assert {each.phase for each in trace.operators} == {Phase.FORWARD, Phase.BACKWARD}


MEBI = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "peak", "before"),
    [
        ([0], 8, 8),  # then 8 MiB of another tensor
        ([4], 12, 8),
        ([16], 24, 8),
        ([4, 8], 16, 8),
        ([0, 8], 16, 8),
        ([4, 0], 8, 8),
    ],
)
# Of another thread's storages, only those count that an operator of the step has used.
@pytest.mark.parametrize(("is_known", "thread"), [(False, "own"), (True, "own"), (True, "other")])
def test_record_when_a_storage_is_resized_and_no_pool_tells_then_its_bytes_count_as_they_are(
    sizes: list[int], peak: int, before: int, *, is_known: bool, thread: str
) -> None:
    plain = torch.UntypedStorage.resize_
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.ones(2, 8)
        tensor = torch.ones(8 * MEBI // 4)

    def resize() -> None:
        for size in sizes:
            tensor.untyped_storage().resize_(size * MEBI)

    def step() -> None:
        if is_known:
            tensor.view(-1)[:1].add_(1)
        if thread == "own":
            resize()
        else:
            worker = Thread(target=resize)
            worker.start()
            worker.join()
        other = torch.ones(8 * MEBI // 4, device="meta")
        other.add_(1)
        model(x).sum().backward()

    trace = swapkit.record(step, model, hardware="H100")
    assert trace.peak_bytes // MEBI == peak
    assert trace.bytes_before // MEBI == before
    assert torch.UntypedStorage.resize_ is plain


def test_record_when_fake_weights_are_sharded_then_they_count_while_they_are_gathered() -> None:
    code = """
        import contextlib, torch, swapkit
        import torch.distributed as dist
        from torch._subclasses import FakeTensorMode
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        swapkit.install(device="cpu")
        plain = torch.UntypedStorage.resize_
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
        mesh = init_device_mesh("cpu", (4,))

        def record(mode, **options):
            with mode:
                layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
                model, x = torch.nn.Sequential(*layers), torch.randn(256, 512)
                for module in (*model, model):
                    fully_shard(module, mesh=mesh)
                optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

                def step():
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

                step()
                return swapkit.record(step, model, optimizer, **options)

        real = record(contextlib.nullcontext())
        fake = record(FakeTensorMode(), hardware="H100")
        print(real.peak_bytes, fake.peak_bytes, real.bytes_before, fake.bytes_before)
        print(torch.UntypedStorage.resize_ is plain)
    """
    figures, is_restored = run_python(code).splitlines()
    real, fake, before, fake_before = map(int, figures.split())
    assert fake == pytest.approx(real, rel=0.03)
    assert fake_before == pytest.approx(before, rel=0.03)
    assert is_restored == "True"


def test_record_when_a_modules_name_cannot_be_encoded_then_it_is_escaped() -> None:
    model = nn.Sequential()
    model.add_module("a\ud800", nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    trace = swapkit.record(lambda: model(torch.randn(2, 8)).sum().backward(), model)
    assert r"a\ud800.0" in {each.module for each in trace.operators}
    check_trace(trace)


def test_input_when_a_view_of_it_is_saved_and_the_program_drops_it_then_it_may_move() -> None:
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(256, 256), torch.nn.GELU(), linear(256, 256))
    trace = swapkit.record(lambda: model(torch.randn(8, 64, 256)).sum().backward(), model)
    (given,) = [each for each in trace.storages if each.birth == 0]
    assert given.is_saved
    assert trace.operators[given.held].phase is Phase.FORWARD


@pytest.mark.filterwarnings("error")
def test_recording_when_a_module_runs_with_other_tensors_then_nothing_warns() -> None:
    """Torch warns where code reads the gradient of a tensor that is no leaf."""
    model = nn.Linear(64, 64)

    def step() -> None:
        others = {name: each * 1.0 for name, each in model.named_parameters()}
        torch.func.functional_call(model, others, torch.ones(8, 64)).sum().backward()

    assert record(step, model).operators
    assert model.weight.grad is not None
