"""`SwapkitCallback` in the `Trainer` of Lightning, both packages: same bits, all loops, the end."""

from __future__ import annotations

import contextlib
import csv
import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument, OverBudget
from tests.integrations.support import (
    QUIET,
    Outcome,
    assert_same_within,
    measure,
    needs,
    read_scalars,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [QUIET, pytest.mark.usefixtures("installation")]
PACKAGES = [
    pytest.param("lightning.pytorch", marks=needs("lightning")),
    pytest.param("pytorch_lightning", marks=needs("pytorch_lightning")),
]
WIDTH, ROWS = 128, 512


class _BrokenBatchError(Exception):
    """What a user's code raises."""


def make_module(package: str, *, optimizers: int = 1, breaks_at: int = -1) -> Any:
    lightning = importlib.import_module(package)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            blocks = [
                torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1))
                for _ in range(6)
            ]
            self.blocks = torch.nn.Sequential(*blocks)
            self.losses: list[float] = []
            self.sessions: list[object] = []
            self.automatic_optimization = optimizers == 1

        def loss(self, batch: Any) -> torch.Tensor:
            (x,) = batch
            loss: torch.Tensor = (torch.tanh(self.blocks(x)) - x).square().mean()
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == breaks_at:
                raise _BrokenBatchError
            loss = self.loss(batch)
            self.losses.append(float(loss))
            if not self.automatic_optimization:
                self.manual_backward(loss)
                own = self.optimizers()
                for optimizer in own[: 2 if batch_idx % 2 else 1]:  # the second steps less often
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch: Any, _batch_idx: int) -> None:
            self.sessions.append(swapkit.sessions())
            self.losses.append(float(self.loss(batch)))

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> Any:
            parts = [self.blocks[:3], self.blocks[3:]] if optimizers == 2 else [self.blocks]
            return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]

    return Module()


def make_data() -> torch.utils.data.DataLoader[Any]:
    rows = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=ROWS)


def make_trainer(package: str, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    common: dict[str, Any] = {
        "default_root_dir": str(folder), "max_steps": 6, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 2,
        "enable_model_summary": False,
    }  # fmt: skip
    return importlib.import_module(package).Trainer(callbacks=callbacks, **{**common, **options})


def make_callback(limit: int | str, **options: Any) -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    from swapkit.integrations.lightning import SwapkitCallback

    return SwapkitCallback(limit, **options)


def fit(
    package: str, folder: Path, callbacks: list[Any], *, optimizers: int = 1, **options: Any
) -> Outcome:
    def run() -> tuple[Any, Any, list[float]]:
        module = make_module(package, optimizers=optimizers)
        trainer = make_trainer(package, folder, callbacks, **options)
        trainer.fit(module, make_data(), make_data())
        return module, list(trainer.optimizers), module.losses

    return measure(run)


@pytest.mark.promise("A3")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulation", "bf16"],
)
def test_fit_when_in_a_budget_then_the_same_bits(
    tmp_path: Path, package: str, options: dict[str, Any]
) -> None:
    plain = fit(package, tmp_path, [], **options)
    callback = make_callback(int(0.85 * plain.peak_bytes))
    found = fit(package, tmp_path, [callback], **options)
    assert_same_within(found, plain, callback.session)
    assert callback.session.stats.steps == 6


@pytest.mark.promise("A3")
@pytest.mark.parametrize("package", PACKAGES)
def test_fit_when_two_optimizers_are_stepped_by_hand_then_the_same_bits(
    tmp_path: Path, package: str
) -> None:
    plain = fit(package, tmp_path, [], optimizers=2, max_steps=9)
    callback = make_callback(int(0.85 * plain.peak_bytes))
    found = fit(package, tmp_path, [callback], optimizers=2, max_steps=9)
    assert_same_within(found, plain, callback.session)
    assert callback.session.stats.steps >= 3


@pytest.mark.parametrize("package", PACKAGES)
def test_loops_when_run_then_each_has_one_session_and_none_is_left(
    tmp_path: Path, package: str
) -> None:
    callback = make_callback("1GiB")
    module, data = make_module(package), make_data()
    trainer = make_trainer(package, tmp_path, [callback], max_steps=4)
    seen = []
    for loop in (trainer.validate, trainer.test, trainer.predict):
        loop(module, data)
        seen.append(callback.session)
        assert not callback.session.is_active
    trainer.fit(module, data, data)
    seen.append(callback.session)
    assert len({id(each) for each in seen}) == 4
    inside = {id(found) for found in module.sessions}
    assert all(len(found) == 1 for found in module.sessions), inside
    assert {id(found[0]) for found in module.sessions} == {id(each) for each in seen}
    assert swapkit.sessions() == ()


@pytest.mark.parametrize("package", PACKAGES)
def test_fit_when_a_batch_raises_then_the_session_is_closed(tmp_path: Path, package: str) -> None:
    callback = make_callback("1GiB")
    trainer = make_trainer(package, tmp_path, [callback])
    with pytest.raises(_BrokenBatchError):
        trainer.fit(make_module(package, breaks_at=2), make_data())
    assert not callback.session.is_active
    assert trainer.callbacks[-1] is callback
    assert swapkit.sessions() == ()
    assert swapkit.memory_stats()["budget_bytes"] == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_fit_when_the_budget_holds_not_even_the_module_then_refused(
    tmp_path: Path, package: str
) -> None:
    callback = make_callback("64KiB")
    with pytest.raises(OverBudget):
        make_trainer(package, tmp_path, [callback]).fit(make_module(package), make_data())
    assert callback.session is None
    assert swapkit.sessions() == ()


def make_tuned(package: str, breaks_at: int = -1) -> Any:
    """Return a module whose batch size and learning rate can be tuned."""

    class Tuned(type(make_module(package))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.lr = 128, 0.01
            self.steps = 0

        def train_dataloader(self) -> Any:
            rows = torch.utils.data.TensorDataset(torch.ones(1, WIDTH).expand(1 << 16, WIDTH))
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

        val_dataloader = train_dataloader

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.sessions.append(swapkit.sessions())
            self.steps += 1
            if self.steps == breaks_at:
                raise _BrokenBatchError
            loss: torch.Tensor = super().training_step(batch, batch_idx)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    return Tuned()


@pytest.mark.parametrize("package", PACKAGES)
def test_tuning_when_in_a_budget_then_it_finds_a_batch_size_that_fits(
    tmp_path: Path, package: str
) -> None:
    callback = make_callback("6MiB")
    tuners = importlib.import_module(f"{package}.callbacks")
    finders = [
        tuners.BatchSizeFinder(init_val=128, max_trials=12),
        tuners.LearningRateFinder(num_training_steps=4),
    ]
    module = make_tuned(package)
    options: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 1}
    trainer = make_trainer(package, tmp_path, [*finders, callback], **options)
    before = list(trainer.callbacks)
    trainer.fit(module)
    assert trainer.callbacks == before
    # A row takes 512 bytes in each tensor, and an operator works on three of these.
    assert 512 <= module.batch_size <= 2048
    assert {len(each) for each in module.sessions} == {1}
    session = callback.session
    assert {each[0] for each in module.sessions} == {session}, "tuning and training share one"
    assert session.stats.oom_rescues > 0
    assert session.stats.peak_bytes <= session.limit_bytes
    assert not session.is_active


@pytest.mark.parametrize("package", PACKAGES)
def test_tuning_when_a_batch_raises_then_the_session_is_closed(
    tmp_path: Path, package: str
) -> None:
    callback = make_callback("6MiB")
    finder = importlib.import_module(f"{package}.callbacks").LearningRateFinder()
    trainer = make_trainer(package, tmp_path, [finder, callback], enable_checkpointing=True)
    with pytest.raises(_BrokenBatchError):
        trainer.fit(make_tuned(package, breaks_at=3))
    assert swapkit.sessions() == ()
    assert not callback.session.is_active


@pytest.mark.parametrize("package", PACKAGES)
def test_fit_when_it_logs_then_metrics_are_in_the_same_rows(tmp_path: Path, package: str) -> None:
    loggers = importlib.import_module(f"{package}.loggers")
    logger = loggers.CSVLogger(str(tmp_path))
    trainer = make_trainer(package, tmp_path, [make_callback("1GiB")], logger=logger)
    trainer.fit(make_module(package), make_data())
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["swapkit/steps"] for row in rows] == ["2", "4", "6"]
    assert {row["swapkit/budget_bytes"] for row in rows} == {str(1 << 30)}


@needs("tensorboard")
@pytest.mark.parametrize("package", PACKAGES)
def test_fit_when_it_logs_to_tensorboard_then_metrics_are_scalars(
    tmp_path: Path, package: str
) -> None:
    logger = importlib.import_module(f"{package}.loggers").TensorBoardLogger(str(tmp_path))
    trainer = make_trainer(package, tmp_path, [make_callback("1GiB")], logger=logger)
    trainer.fit(make_module(package), make_data())
    assert read_scalars(tmp_path)["swapkit/steps"] == [2.0, 4.0, 6.0]


@needs("lightning")
def test_callback_when_an_option_is_unknown_then_refused_before_training() -> None:
    with pytest.raises(InvalidArgument, match="has no such option"):
        make_callback("1GiB", host_limits="1GiB")
