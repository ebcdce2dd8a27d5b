"""Weights that were loaded from files need no copy elsewhere: they are read from there again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.saved import weights
from swapkit.errors import DiskError
from tests.integration.test_weights import send_away
from tests.integration.test_weights_disk import FAILURE, FAILURES
from tests.support import MIB
from tests.support.instruments import disk_fault, instruments
from tests.support.sessions import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swapkit._native.sched import SchedulerStats
    from swapkit._runtime.session.session import Session

WIDTH, LAYERS = 512, 40  # a weight has 1 MiB
BUDGET = 4 * MIB
HOST_LIMIT = 4 * MIB

State = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("served")


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled code."""
    monkeypatch.setattr(weights, "has_compiled", lambda: False)


class Adapted(nn.Module):
    """A layer that is frozen, and a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.adapter(x) @ self.adapter.weight
        return torch.nn.functional.gelu(self.base(x) + 0.1 * added)


def made() -> nn.Sequential:
    """Return a model without its weights' memory; that of its adapters is there."""
    with torch.device("meta"):
        return nn.Sequential(*[Adapted() for _ in range(LAYERS)])


def fill(model: nn.Sequential, state: State, first: int = 0) -> nn.Sequential:
    """Give each layer from the first on memory, and its weight what was loaded."""
    for number, layer in enumerate(list(model)[first:], first):
        layer.to_empty(device="cpu")
        begin(layer, number)
        layer.load_state_dict({"base.weight": state[f"{number}.base.weight"]}, strict=False)
    return model


def begin(layer: nn.Module, number: int) -> None:
    torch.manual_seed(number)
    nn.init.normal_(layer.get_parameter("adapter.weight"), std=0.05)


def by_torch(path: Path) -> State:
    return dict(torch.load(path / "model.pt", mmap=True))


def by_safetensors(path: Path) -> State:
    return dict(pytest.importorskip("safetensors.torch").load_file(path / "model.safetensors"))


LOADERS: dict[str, Callable[[Path], State]] = {"torch": by_torch, "safetensors": by_safetensors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ten times as large as the budget, in both formats."""
    found = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    state = {
        f"{number}.base.weight": torch.randn(WIDTH, WIDTH) * WIDTH**-0.5 for number in range(LAYERS)
    }
    torch.save(state, found / "model.pt")
    pytest.importorskip("safetensors.torch").save_file(state, found / "model.safetensors")
    return found


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    shutil.copytree(folder, tmp_path / "own")
    return tmp_path / "own"


def train(model: nn.Sequential, steps: int = 1) -> list[str]:
    """Return the bits of each step's loss, and of the adapters after it."""
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(digest([loss.detach(), *(each.detach().clone() for each in adapters)]))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    return train(fill(made(), torch.load(folder / "model.pt")), 2)


def moved(session: Session) -> SchedulerStats:
    return session._require().swapper.scheduler.stats()


@pytest.mark.parametrize("loader", LOADERS)
def test_checkpoint_when_ten_times_the_budget_then_it_trains_with_little_host_memory_and_no_disk(
    loader: str, folder: Path, expected: list[str]
) -> None:
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT) as session:
        model = fill(made(), LOADERS[loader](folder))
        assert train(model, 2) == expected
        assert session.stats.peak_bytes <= BUDGET
        assert session.stats.host_peak_bytes <= HOST_LIMIT
        assert session.stats.disk_peak_bytes == 0
        assert moved(session).written_bytes == 0
        assert moved(session).read_bytes > (LAYERS - 4) * MIB
        session._require().swapper.scheduler.check()


@pytest.mark.parametrize("policy", ["auto", "rescue"])
def test_checkpoint_when_loaded_into_a_model_that_was_built_in_the_session_then_over_the_disk(
    policy: str, folder: Path, tmp_path: Path, expected: list[str]
) -> None:
    """What was built first has no file: it goes to the disk until it is overwritten."""
    with swapkit.budget(BUDGET, policy=policy, host_limit=HOST_LIMIT, disk=tmp_path) as session:
        model = nn.Sequential(*[Adapted() for _ in range(LAYERS)])
        for number, layer in enumerate(model):
            begin(layer, number)
        model.load_state_dict(by_torch(folder), strict=False)
        assert train(model, 2) == expected
        assert session.stats.peak_bytes <= BUDGET
        assert session.stats.host_peak_bytes <= HOST_LIMIT
        assert session.stats.disk_peak_bytes <= LAYERS * MIB
        assert moved(session).disk_bytes < HOST_LIMIT  # what had been built


# ---- files that change ---------------------------------------------------------------------------


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def deleted(path: Path) -> None:
    path.unlink()


def touched(path: Path) -> None:
    path.touch()


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def written(path: Path) -> None:
    """Change all weights by one bit each."""
    with path.open("r+b") as file:
        file.seek(-(MIB // 2), os.SEEK_END)
        for _ in range(LAYERS - 1):
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.seek(-MIB - 1, os.SEEK_CUR)


@pytest.mark.parametrize("change", [replaced, deleted, touched])
def test_file_when_replaced_or_deleted_after_the_load_then_its_bytes_are_still_read(
    change: Callable[[Path], None], own: Path, expected: list[str]
) -> None:
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT) as session:
        model = fill(made(), by_torch(own))
        send_away()
        change(own / "model.pt")
        assert train(model, 2) == expected
        assert session.stats.host_peak_bytes <= HOST_LIMIT


@pytest.mark.parametrize("change", [truncated, written])
def test_file_when_changed_after_the_load_then_an_error_names_it_and_other_bytes_are_never_used(
    change: Callable[[Path], None], own: Path, folder: Path, expected: list[str]
) -> None:
    model = made()
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT):
        fill(model, by_torch(own))
        send_away()
        change(own / "model.pt")
        with pytest.raises(DiskError, match=r"model\.pt.*(shorter|has been changed)"):
            train(model)
        shutil.copyfile(folder / "model.pt", own / "model.pt")
        assert train(model, 2) == expected


def test_session_when_it_ends_after_a_file_was_changed_then_the_other_weights_are_whole(
    own: Path, folder: Path
) -> None:
    model = made()
    state = by_torch(folder)
    session = swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT).__enter__()
    fill(model, by_torch(own))
    send_away()
    truncated(own / "model.pt")
    with pytest.raises(DiskError, match=r"model\.pt: the file has become shorter"):
        session.close()
    whole = 0
    for number, layer in enumerate(model):
        weight = layer.get_parameter("base.weight")
        with contextlib.suppress(DiskError):
            assert torch.equal(weight, state[f"{number}.base.weight"])
            whole += 1
    assert whole >= LAYERS // 3


# ---- loading that fails --------------------------------------------------------------------------


def test_checkpoint_when_it_would_be_on_the_device_as_a_whole_then_the_error_names_the_remedy(
    folder: Path, expected: list[str]
) -> None:
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT) as session:
        with pytest.raises(torch.OutOfMemoryError, match=r"mmap=True.*map_location=\"cpu\""):
            torch.load(folder / "model.pt")
        state = torch.load(folder / "model.pt", mmap=True, map_location="cpu")
        assert train(fill(made(), state), 2) == expected
        assert session.stats.peak_bytes <= BUDGET


@pytest.mark.parametrize("nth", [1, 30, 60])
def test_file_when_reading_it_fails_then_nothing_is_lost_and_training_goes_on_when_it_works(
    nth: int, folder: Path, expected: list[str]
) -> None:
    model = made()

    def fill_and_train() -> None:
        fill(model, by_torch(folder))
        train(model)

    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT):
        with (
            disk_fault(instruments.SK_DISK_CALL_READ, errno.EIO, nth=nth, forever=True),
            pytest.raises(FAILURES, match=FAILURE),
        ):
            fill_and_train()
        if model[-1].get_parameter("base.weight").is_meta:  # it failed while it was loaded
            model = fill(made(), by_torch(folder))
        assert train(model, 2) == expected


class Failing(dict[str, torch.Tensor]):
    """A checkpoint that ends too early."""

    def __init__(self, state: State, fail: Callable[[], object]) -> None:
        super().__init__(state)
        self._fail = fail

    def __getitem__(self, key: str) -> torch.Tensor:
        if key.startswith("20."):
            self._fail()
        return super().__getitem__(key)


def lose() -> None:
    raise OSError(errno.EIO, "the checkpoint ends here")


FAILING: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "file": (lose, OSError),
    "memory": (lambda: torch.empty(2 * BUDGET, dtype=torch.uint8), torch.OutOfMemoryError),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("failing", FAILING)
def test_load_when_it_fails_in_the_middle_then_what_was_loaded_is_whole_and_the_rest_can_follow(
    failing: str, loader: str, folder: Path, expected: list[str]
) -> None:
    fail, error = FAILING[failing]
    model, state = made(), LOADERS[loader](folder)
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT) as session:
        with pytest.raises(error):
            fill(model, Failing(state, fail))
        for number in range(20):
            weight = model[number].get_parameter("base.weight")
            assert torch.equal(weight, state[f"{number}.base.weight"])
        fill(model, state, 20)
        assert train(model, 2) == expected
        assert session.stats.peak_bytes <= BUDGET
        assert session.stats.host_peak_bytes <= HOST_LIMIT


def test_session_when_it_is_a_later_one_then_weights_are_read_from_the_file_again(
    folder: Path, expected: list[str]
) -> None:
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT):
        model = fill(made(), by_torch(folder))
    with swapkit.budget(BUDGET, model, policy="rescue", host_limit=HOST_LIMIT) as session:
        assert train(model, 2) == expected
        assert session.stats.host_peak_bytes <= HOST_LIMIT
        with torch.no_grad():
            model[0].get_parameter("base.weight").zero_()
        send_away()
        assert not model[0].get_parameter("base.weight").any()


@pytest.mark.parametrize("loader", LOADERS)
def test_model_when_mapped_from_a_file_and_moved_to_the_device_then_it_is_read_from_there(
    loader: str, folder: Path, expected: list[str]
) -> None:
    model = made()
    for number, layer in enumerate(model):
        layer.get_submodule("adapter").to_empty(device="cpu")
        begin(layer, number)
    model.load_state_dict(LOADERS[loader](folder), strict=False, assign=True)
    model.requires_grad_(requires_grad=False)
    for layer in model:
        layer.get_submodule("adapter").requires_grad_()
    with swapkit.budget(BUDGET, policy="rescue", host_limit=HOST_LIMIT) as session:
        model._apply(torch.clone)  # as `to` does where the device is another one
        assert train(model, 2) == expected
        assert session.stats.peak_bytes <= BUDGET
        assert session.stats.host_peak_bytes <= HOST_LIMIT
        assert moved(session).read_bytes > (LAYERS - 4) * MIB
