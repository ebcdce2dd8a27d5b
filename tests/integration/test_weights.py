"""Weights that leave the device between two uses: same bits, within a budget below the model."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit.errors import OverBudget
from tests.programs.kinds import Pair
from tests.support.sessions import digest

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 256
LAYERS = 10
STEPS = 4
MEBI = 1 << 20
SEALED = r"leave the device between two uses.*tensor\.clone\(\)"


pytestmark = pytest.mark.usefixtures("served")


class Adapted(nn.Module):
    """A layer that is frozen, and a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.base(x) + self.up(self.down(x)))


class Routed(nn.Module):
    """Experts of which each row of the batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + y


class Tied(nn.Module):
    """Frozen layers between an embedding and an output layer that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, WIDTH)
        self.layers = nn.Sequential(*[Adapted() for _ in range(LAYERS)])
        self.output = nn.Linear(WIDTH, 1024, bias=False)
        self.output.weight = self.embedding.weight
        self.embedding.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, :2].abs() * 100).long() % 1024
        y: torch.Tensor = self.output(self.layers(self.embedding(tokens)))
        return y


class Taught(nn.Module):
    """A student, and a frozen teacher without gradients whose results it learns."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.teacher = nn.Sequential(*layers).requires_grad_(requires_grad=False)
        self.student = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            expected = self.teacher(x)
        y: torch.Tensor = self.student(x) - expected
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapters": lambda: nn.Sequential(*[Adapted() for _ in range(LAYERS)]),
    "experts": lambda: nn.Sequential(*[Routed() for _ in range(LAYERS // 3)]),
    "tied": Tied,
    "teacher": Taught,
    "half": lambda: nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False) for _ in range(LAYERS)],
        *[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2)],
    ),
    "trained": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
}


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    trained = [each for each in model.parameters() if each.requires_grad]
    if name == "trained":  # its gradients go as they come: only the weights take memory
        return model, InBackward(trained)
    if name == "half":  # all weights and gradients at once would not fit
        return model, torch.optim.SGD(trained, lr=1e-2, foreach=True)
    return model, torch.optim.AdamW(trained, lr=1e-3)


class InBackward(torch.optim.SGD):
    """Updates each weight when its gradient is there."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-2)
        for each in parameters:
            each.register_post_accumulate_grad_hook(self._update)

    @staticmethod
    @torch.no_grad()
    def _update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=-1e-2)
        parameter.grad = None


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    first: int = 0,
    rows: int = 16,
) -> list[str]:
    """Return the bits of each step: loss, gradients, random state. `first`: the first number."""
    found = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = model(torch.randn(rows, WIDTH)).square().mean()
        loss.backward()
        # No variable: the gradients are freed before those of the next step.
        given = (each.grad for each in model.parameters() if each.grad is not None)
        found.append(digest([loss.detach(), *given, torch.get_rng_state()]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return digest([*model.parameters(), *model.buffers(), *states])


def frozen_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in {*model.parameters()})


@pytest.mark.parametrize("policy", ["auto", "swap", "rescue"])
@pytest.mark.parametrize("name", MODELS)
def test_training_when_the_weights_are_larger_than_the_budget_then_the_bits_are_the_same(
    name: str, policy: str
) -> None:
    model, optimizer = make(name)
    expected = train(model, optimizer), bits_of(model, optimizer)
    del model, optimizer
    model, optimizer = make(name)
    limit = int(frozen_bytes(model) * 0.6)
    with swapkit.budget(limit, model, optimizer, policy=policy) as session:
        found = train(model, optimizer)
        assert "weights: " in session.explain()
        stats = session.stats
    assert (found, bits_of(model, optimizer)) == expected
    assert stats.peak_bytes <= limit
    assert stats.swapped_in_bytes > frozen_bytes(model)
    if name not in {"trained", "half"}:  # what is frozen is copied out once
        assert stats.swapped_out_bytes < 2 * frozen_bytes(model)


# ---- any reader ----------------------------------------------------------------------------------


def send_away(limit: int = 64 * MEBI) -> int:
    """Let all weights leave; return the bytes that this frees."""
    installation = require_installation(torch.device("cpu"))
    with installation.lock:
        found = installation.runtime.swappers(installation.device)
        return sum(each.mover.free_held(limit, False) for each in found)


def copied(model: nn.Linear) -> nn.Linear:
    return copy.deepcopy(model)


def averaged(model: nn.Linear) -> torch.Tensor:
    average = torch.optim.swa_utils.AveragedModel(model)
    send_away()
    average.update_parameters(model)
    weight = average.module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def loaded(model: nn.Linear) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
    send_away()
    return model.weight


def written(model: nn.Linear) -> torch.Tensor:
    model.weight.data.mul_(0.5)
    send_away()
    with torch.no_grad():
        model.weight.add_(1)
        send_away()
        model.weight[2].zero_()
    send_away()
    return model.weight


def stepped(
    kind: Callable[..., torch.optim.Optimizer], **options: Any
) -> Callable[[nn.Linear], object]:
    def run(model: nn.Linear) -> torch.Tensor:
        optimizer = kind(model.parameters(), lr=0.01, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(BATCH).square().mean().backward()
            send_away()
            optimizer.step()
            send_away()
        return model.weight

    return run


def twice_backward(model: nn.Linear) -> torch.Tensor | None:
    x = BATCH.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    send_away()
    grad.square().sum().backward()
    return model.weight.grad


def checkpointed(model: nn.Linear) -> torch.Tensor | None:
    y = torch.utils.checkpoint.checkpoint(
        model, BATCH.clone().requires_grad_(), use_reentrant=False
    )
    send_away()
    y.square().sum().backward()
    return model.weight.grad


def on_a_thread(model: nn.Linear) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            send_away()
            found.append(model(BATCH))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return torch.stack(found)


def cast(model: nn.Linear) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: torch.Tensor = model(BATCH)
    return y


def looked_at(model: nn.Linear) -> list[object]:
    weight = model.weight
    found: list[object] = []
    for look in (
        lambda: weight.norm().item(),
        lambda: weight[3, 5].item() + 1,
        lambda: bool((weight == weight.detach()).all()),
        lambda: weight.view(-1)[7].item() + 1,
        lambda: weight.T.sum().item(),
        lambda: repr(weight),
        weight.tolist,
        lambda: weight._version,
        lambda: (weight.shape, weight.stride(), weight.untyped_storage().nbytes()),
    ):
        send_away()
        found.append(look())
    return found


def transformed(model: nn.Linear) -> list[object]:
    call = torch.func.functional_call
    found: list[object] = [call(model, dict(model.named_parameters()), (BATCH,))]
    send_away()
    found.append(torch.vmap(lambda row: nn.functional.linear(row, model.weight))(BATCH))
    send_away()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(BATCH, weight).square().sum()

    return [*found, torch.func.grad(loss)(model.weight)]


def normed(model: nn.Linear) -> torch.Tensor:
    y: torch.Tensor = nn.utils.parametrizations.weight_norm(model)(BATCH)
    return y


def viewed(model: nn.Linear) -> torch.Tensor:
    row = model.weight.detach()[4]  # stays: the program holds it
    send_away()
    with torch.no_grad():
        row.fill_(3.0)
    return model.weight


def unrecorded(model: nn.Linear) -> list[torch.Tensor]:
    with torch.no_grad():
        found = [model(BATCH)]
    send_away()
    with torch.inference_mode():
        return [*found, model(BATCH)]


def traced(model: nn.Linear) -> torch.Tensor:
    again = torch.jit.trace(model, BATCH)
    send_away()
    y: torch.Tensor = again(BATCH)
    return y


def replaced(model: nn.Linear) -> torch.Tensor:
    model.weight.data = model.weight.data * 2
    return model.weight


torch.manual_seed(1)
BATCH = torch.randn(8, WIDTH)
READERS: dict[str, Callable[[nn.Linear], object]] = {
    "forward": lambda model: model(BATCH),
    "looks": looked_at,
    "writes": written,
    "view": viewed,
    "deepcopy": lambda model: copied(model).weight,
    "double": lambda model: copied(model).double().weight,
    "average": averaged,
    "load": loaded,
    "autocast": cast,
    "double backward": twice_backward,
    "checkpoint": checkpointed,
    "no graph": unrecorded,
    "transforms": transformed,
    "weight norm": normed,
    "trace": traced,
    "data": replaced,
    "threads": on_a_thread,
    "SGD": stepped(torch.optim.SGD),
    "AdamW foreach": stepped(torch.optim.AdamW, foreach=True),
    "AdamW fused": stepped(torch.optim.AdamW, fused=True),
    "RMSprop": stepped(torch.optim.RMSprop, foreach=True),
}


@pytest.mark.parametrize("reader", READERS)
def test_weight_when_it_is_away_then_each_reader_finds_its_bytes(reader: str) -> None:
    torch.manual_seed(0)
    expected = READERS[reader](nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    others = nn.Linear(4 * WIDTH, 4 * WIDTH).requires_grad_(requires_grad=False)
    with swapkit.budget("3MiB", nn.ModuleList([model, others]), policy="rescue"):
        assert send_away() >= 0
        with pytest.raises(RuntimeError, match=SEALED):
            model.weight.data_ptr()
        found = READERS[reader](model)
        assert digest_of(found) == digest_of(expected)
    assert model.weight.data_ptr()


def digest_of(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return digest([found.detach().clone().double()])  # the digest reads by address
    if isinstance(found, list):
        return "".join(map(digest_of, found))
    return repr(found)


@pytest.mark.parametrize("is_away", [True, False], ids=["away", "here"])
def test_weight_when_read_by_its_address_then_an_error_names_the_remedy(*, is_away: bool) -> None:
    model = large()
    weight = model.get_parameter("1.weight")
    alias: Any = torch.empty(0)
    with swapkit.budget("3MiB", model, policy="rescue"):
        send_away()
        storage: Any = weight.untyped_storage()
        if not is_away:
            weight.sum()
        for read in (
            weight.numpy,
            weight.data_ptr,
            lambda: np.from_dlpack(weight),
            lambda: storage.fill_(0),
            lambda: alias.set_(weight).fill_(0),
        ):
            with pytest.raises((RuntimeError, BufferError), match=SEALED):
                read()
        inside = weight.clone().numpy()
    assert (np.asarray(weight) == inside).all()


def test_session_when_it_ends_then_weights_are_as_before_it_and_tensors_can_be_swapped() -> None:
    model = large()
    weight, keys = model.get_parameter("1.weight"), keys_of(model.get_parameter("1.weight"))
    kept = model.get_parameter("2.weight").detach()  # so that weight stays
    for _ in range(2):
        with swapkit.budget("3500KiB", model, policy="rescue") as session:
            graph = model[1](torch.ones(2 * WIDTH, requires_grad=True)).sum()
            send_away()
            assert kept.data_ptr() == model.get_parameter("2.weight").data_ptr()
            other = nn.Parameter(torch.zeros_like(weight))
            torch.utils.swap_tensors(model.get_parameter("0.weight"), other)
            del other
            assert "weights: " in session.explain()
        graph.backward()
        assert {keys_of(each) for each in model.parameters()} == {keys}


def test_weight_when_resized_then_all_of_it_leaves_and_comes_back() -> None:
    model = large()
    weight = model.get_parameter("1.bias")
    with swapkit.budget("3MiB", model, policy="rescue"):
        send_away()
        weight.sum()
        weight.resize_(64 * WIDTH).fill_(2.0)
        send_away()
        assert weight.sum().item() == 2.0 * 64 * WIDTH


def test_operator_when_it_runs_across_two_sessions_then_its_weight_still_leaves_later() -> None:
    model = large()
    weight = model.get_parameter("1.weight")
    inside, go_on = threading.Event(), threading.Event()

    @torch.library.custom_op("swapkit_tests::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go_on.wait()
        return x[:1].clone()

    session = swapkit.budget("3MiB", model, policy="rescue").__enter__()
    thread = threading.Thread(target=slow, args=(weight,))
    thread.start()
    inside.wait()
    session.close()
    with swapkit.budget("3MiB", model, policy="rescue") as session:
        go_on.set()
        thread.join()
        send_away()
        assert weight[:1].clone().numpy().shape == (1, 2 * WIDTH)
    assert weight.data_ptr()


def test_model_when_it_has_other_kinds_of_tensors_then_the_session_trains_it() -> None:
    model = large()
    model.register_buffer("sparse", torch.eye(WIDTH).to_sparse())
    model.register_buffer("doubled", Pair(torch.ones(WIDTH), torch.ones(WIDTH)))
    norm = nn.BatchNorm1d(2 * WIDTH)
    model.append(norm)
    plain = copy.deepcopy(norm)
    with swapkit.budget("3MiB", model):
        for step in range(3):
            x = model[step](torch.full((4, 2 * WIDTH), step + 1.0)) * torch.arange(4.0)[:, None]
            send_away()
            assert torch.equal(norm(x), plain(x))
            assert (model.get_buffer("doubled") * 2).sum() == 4 * WIDTH
            send_away()
    found, wanted = (each.get_buffer("running_var") for each in (norm, plain))
    assert torch.equal(found, wanted)
    assert not torch.equal(found, torch.ones(2 * WIDTH))


def test_session_when_it_plans_inside_of_one_whose_weights_leave_then_it_does_without() -> None:
    model, head = large(), nn.Linear(2 * WIDTH, 8)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    outer = swapkit.budget("3MiB", model, optimizer)
    with outer, swapkit.budget("3MiB", head, optimizer) as inner:
        for _ in range(3):
            head(model[1](model[0](torch.ones(2 * WIDTH)))).sum().backward()
            optimizer.step()
        assert "weights leave the device" in inner.explain()


def test_session_when_too_small_beside_another_then_the_error_says_whose_weights_leave() -> None:
    first, second = large(), large()
    with (
        swapkit.budget("64MiB", first),
        pytest.raises(OverBudget, match="weights leave only in the one that began first"),
        swapkit.budget("3MiB", second),
    ):
        pass
    del first
    with swapkit.budget("3MiB", second) as session:
        assert "weights: " in session.explain()


def test_weights_when_views_and_states_of_them_are_kept_then_they_leave_all_the_same() -> None:
    model = large()
    with swapkit.budget("3MiB", model, policy="rescue"):
        kept = model.state_dict(), model.get_parameter("2.weight").t()
        x = torch.ones(2, 2 * WIDTH, requires_grad=True)
        y = torch.tanh(torch.tanh(x @ kept[1]) @ kept[1])
        send_away()
        y.sum().backward()
        for layer in model:
            layer(x).sum()
        assert kept[1].new_tensor([1.0]).tolist() == kept[1].new([1.0]).tolist() == [1.0]
        nn.init.trunc_normal_(kept[0]["1.bias"])
    assert kept[0]["1.weight"].data_ptr() == model.get_parameter("1.weight").data_ptr()


def test_part_when_recomputed_with_frozen_weights_that_leave_then_the_bits_are_the_same() -> None:
    found = []
    for limit in ("64MiB", "3MiB"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), *large())
        with swapkit.budget(limit, model, policy="rescue"):
            swapkit.checkpoint(model[2])
            for _ in range(3):
                model(torch.ones(2, 2 * WIDTH)).sum().backward()
                send_away()
        found.append(digest([each.grad for each in model[0].parameters() if each.grad is not None]))
        del model
    assert found[0] == found[1]


def large() -> nn.ModuleList:
    model = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(4))
    return model.requires_grad_(requires_grad=False)


def keys_of(tensor: torch.Tensor) -> str:
    return str(torch._C._dispatch_keys(tensor))


def test_weights_when_their_model_is_dropped_then_their_memory_is_free() -> None:
    model = nn.ModuleList(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(3))
    pool = require_installation(torch.device("cpu")).pool
    with swapkit.budget("9MiB", model, policy="rescue") as session:
        for each in model:
            each(torch.ones(4 * WIDTH)).sum()
        del each, model[:]
        session.mark_step()
        assert pool.in_use_bytes() < MEBI
