"""Memory has names: who holds the pool's blocks, and what lies outside of it."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.memory_holders import find_holders, find_outside
from swapkit._runtime.model.tracker import BACKWARD, ModuleTracker
from tests.support import MIB
from tests.support.threads import busy_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture
def tracker() -> Iterator[ModuleTracker]:
    tracker = ModuleTracker()
    tracker.start("test")
    yield tracker
    tracker.stop("test")


def amounts(installation: Installation, tracker: ModuleTracker) -> dict[str, tuple[int, int]]:
    holders = find_holders(installation.device, tracker)
    return {holder.name: (holder.nbytes, holder.count) for holder in holders}


def grown(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return what came since: other tests may have left tensors behind."""
    pairs = {name: (before.get(name, (0, 0)), now) for name, now in after.items()}
    changes = {name: (b[0] - a[0], b[1] - a[1]) for name, (a, b) in pairs.items()}
    return {name: change for name, change in changes.items() if change != (0, 0)}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2 * MIB // 4))


def test_holders_when_training_state_exists_then_it_is_named_by_kind(
    installation: Installation, tracker: ModuleTracker
) -> None:
    before = amounts(installation, tracker)
    model = nn.Linear(1024, 1024, bias=False)
    scale = Scale()
    tracker.add_model(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    change = grown(before, amounts(installation, tracker))
    assert change["parameters"] == (4 * MIB, 1)
    assert change["gradients of parameters"] == (4 * MIB, 1)
    assert change["optimizer states"] == (4 * MIB, 1)
    assert change["buffers"] == (2 * MIB, 1)


def test_holders_when_modules_ran_then_what_they_made_has_their_names(
    installation: Installation, tracker: ModuleTracker
) -> None:
    model = nn.ModuleDict({"up": nn.Tanh(), "down": nn.Sigmoid()})
    tracker.add_model(model)
    before = amounts(installation, tracker)
    x = torch.ones(MIB // 4)
    first = model["up"](x)
    second = model["down"](first)
    change = grown(before, amounts(installation, tracker))
    assert change["made in up"] == (MIB, 1)
    assert change["made in down"] == (MIB, 1)
    assert change["made outside of any module"] == (MIB, 1)
    assert second.numel() == x.numel()


def test_holders_when_made_in_backward_then_the_name_says_so(
    installation: Installation, tracker: ModuleTracker
) -> None:
    from swapkit._native.pool import set_tag

    tracker.add_model(model := nn.Sequential(nn.Tanh()))
    tag = next(tag for tag in range(1, 9) if tracker.name(tag) == "0")
    before = amounts(installation, tracker)
    previous = set_tag(tag | BACKWARD)
    tensor = torch.ones(MIB // 4)
    set_tag(previous)
    change = grown(before, amounts(installation, tracker))
    assert change == {"made in backward of 0": (tensor.nbytes, 1)}
    assert len(model) == 1


def test_holders_when_backward_has_ended_then_what_follows_is_not_made_in_it(
    installation: Installation,
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    made: list[torch.Tensor] = []

    def keep_something(grad: torch.Tensor) -> torch.Tensor:
        made.append(torch.ones(MIB // 4))
        return grad

    with swapkit.budget("1GiB", model, policy="rescue"):
        tracker = installation.tracker
        x = torch.ones(256, 64)
        hidden = model[0](x)
        hidden.register_hook(keep_something)
        loss = model[1](hidden).sum()
        before = amounts(installation, tracker)
        loss.backward()
        made.append(torch.ones(MIB // 2))
        change = grown(before, amounts(installation, tracker))
    assert change["made outside of any module"] == (2 * MIB, 1)
    assert change["made in backward of 1"][0] >= MIB
    assert x.numel() == 256 * 64


def test_holders_when_an_optimizer_steps_then_its_temporaries_are_its_own(
    installation: Installation,
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[torch.Tensor] = []

    def closure() -> float:
        model(torch.ones(256, 64)).sum().backward()
        made.append(torch.ones(MIB // 4))
        return 0.0

    with swapkit.budget("1GiB", model, policy="rescue"):
        before = amounts(installation, installation.tracker)
        optimizer.step(closure)
        change = grown(before, amounts(installation, installation.tracker))
    assert change["made in an optimizer's step"] == (MIB, 1)


def test_holders_when_an_optimizer_keeps_lists_of_tensors_then_they_are_its_states(
    installation: Installation, tracker: ModuleTracker
) -> None:
    before = amounts(installation, tracker)
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, history_size=3)

    target = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.eye(512)) - target).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    states = optimizer.state[model.weight]
    kept = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for value in states.values()
        for each in (value if isinstance(value, list) else [value])
        if isinstance(each, torch.Tensor)
    }
    assert len(states["old_dirs"]) > 1
    change = grown(before, amounts(installation, tracker))
    assert change["optimizer states"][1] == len(kept)
    assert change["optimizer states"][0] >= sum(kept.values())


def test_holders_when_listed_then_the_largest_is_first(
    installation: Installation, tracker: ModuleTracker
) -> None:
    model = nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Tanh()])
    tracker.add_model(model)
    made = [model[i](torch.ones(n * MIB // 4)) for i, n in ((0, 1), (1, 3), (2, 2))]
    holders = find_holders(installation.device, tracker)
    sizes = [holder.nbytes for holder in holders]
    assert sizes == sorted(sizes, reverse=True)
    order = [
        holder.name for holder in holders if holder.name in {"made in 0", "made in 1", "made in 2"}
    ]
    assert order == ["made in 1", "made in 2", "made in 0"]
    assert len(made) == 3


def test_outside_when_tensors_are_not_the_pools_then_they_are_named_and_summed(
    installation: Installation, tracker: ModuleTracker
) -> None:
    before = {h.name: (h.nbytes, h.count) for h in find_outside(installation.device, tracker)}
    array = np.zeros(MIB, dtype=np.uint8)
    shared = torch.from_numpy(array)
    views = [shared[1:], shared.view(2, -1)]  # of one storage: counted once
    parameter = nn.Parameter(torch.from_numpy(np.zeros(MIB // 4, dtype=np.float32)))
    ours = torch.ones(MIB)
    after = {h.name: (h.nbytes, h.count) for h in find_outside(installation.device, tracker)}
    assert grown(before, after) == {"other tensors": (MIB, 1), "parameters": (MIB, 1)}
    assert len(views) + parameter.ndim + ours.ndim == 4


def test_holders_when_a_parameter_has_no_memory_yet_then_it_is_passed_over(
    installation: Installation, tracker: ModuleTracker
) -> None:
    lazy = nn.LazyLinear(3)
    find_outside(installation.device, tracker)
    find_holders(installation.device, tracker)
    assert isinstance(lazy.weight, nn.parameter.UninitializedParameter)


@pytest.mark.parametrize("kind", ["meta", "sparse", "subclass"])
def test_holders_when_a_tensor_is_of_a_foreign_kind_then_it_is_passed_over(
    installation: Installation, tracker: ModuleTracker, kind: str
) -> None:
    tensor = {
        "meta": lambda: torch.ones(4, device="meta"),
        "sparse": lambda: torch.eye(4).to_sparse(),
        "subclass": lambda: torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {})),
    }[kind]()
    before = amounts(installation, tracker)
    parameter = nn.Parameter(tensor, requires_grad=False)
    find_outside(installation.device, tracker)
    assert "parameters" not in grown(before, amounts(installation, tracker)) or kind == "subclass"
    assert parameter.shape == tensor.shape


def test_holders_when_another_thread_runs_then_own_tensors_have_names_and_its_none(
    installation: Installation, tracker: ModuleTracker
) -> None:
    model, foreign = nn.Linear(1024, 1024, bias=False), nn.Linear(512, 1024, bias=False)
    model.register_buffer("scale", torch.ones(MIB // 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with swapkit.budget("1GiB", model, optimizer, policy="rescue"):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        with busy_thread():
            found = amounts(installation, tracker)
    assert found["parameters"] == (4 * MIB, 1)
    assert found["gradients of parameters"] == (4 * MIB, 1)
    assert found["optimizer states"] == (4 * MIB, 1)
    assert found["buffers"] == (MIB, 1)
    assert found["made outside of any module"][0] >= foreign.weight.nbytes


def test_holders_when_another_thread_is_in_backward_then_no_gradient_is_looked_at(
    installation: Installation, tracker: ModuleTracker
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(_grad: torch.Tensor) -> None:
        inside.set()
        go_on.wait()

    model = nn.Linear(1024, 1024, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(wait)
    thread = threading.Thread(target=x.sum().backward)
    thread.start()
    inside.wait()
    found = amounts(installation, tracker)
    go_on.set()
    thread.join()
    assert "parameters" in found
    assert "gradients of parameters" not in found
    assert "gradients of parameters" in amounts(installation, tracker)


def test_session_when_it_is_entered_then_nobody_walks_over_all_objects(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> NoReturn:
        raise AssertionError("a walk over the heap")

    monkeypatch.setattr(gc, "get_objects", refuse)
    model = nn.Linear(4, 4)
    with swapkit.budget("1GiB", model, torch.optim.SGD(model.parameters())) as session:
        model(torch.ones(4)).sum().backward()
        session.mark_step()
        with pytest.raises(AssertionError, match="a walk over the heap"):
            session.explain()
    assert installation.active
