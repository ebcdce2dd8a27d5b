"""`SwapkitCallback` in the `Trainer` of transformers: same bits, within the budget, and its end."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument, Unsupported
from swapkit.integrations.opening import open_session
from tests.integrations.support import (
    QUIET,
    Outcome,
    assert_same_within,
    make_rows,
    measure,
    needs,
    read_scalars,
    tiny_llama,
)
from tests.support import installed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [needs("transformers", "accelerate"), QUIET, pytest.mark.usefixtures("installation")]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
    "saving": {"save_strategy": "steps", "save_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
}


def make_trainer(
    folder: Path,
    callbacks: list[Any],
    kind: type | None = None,
    adapt: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 8,
        "logging_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "seed": 1,
    }  # fmt: skip
    return (kind or Trainer)(
        model=adapt(tiny_llama()),
        args=TrainingArguments(**{**common, **options}),
        train_dataset=make_rows(),
        eval_dataset=make_rows(8),
        callbacks=callbacks,
    )


def list_losses(trainer: Any) -> list[float]:
    names = ("loss", "eval_loss", "grad_norm")
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def train(folder: Path, callbacks: list[Any], **options: Any) -> Outcome:
    def run() -> tuple[Any, Any, list[float]]:
        trainer = make_trainer(folder, callbacks, **options)
        trainer.train()
        return trainer.model, trainer.optimizer, list_losses(trainer)

    return measure(run)


def make_callback(limit: int | str, **options: Any) -> Any:
    from swapkit.integrations.transformers import SwapkitCallback

    return SwapkitCallback(limit, **options)


class _BrokenStepError(Exception):
    """What a user's code raises."""


def make_broken_trainer() -> Any:
    from transformers import Trainer

    class BrokenTrainer(Trainer):  # type: ignore[misc,unused-ignore]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 2:
                raise _BrokenStepError
            return super().training_step(*args, **kwargs)

    return BrokenTrainer


@pytest.mark.promise("A3")
@pytest.mark.parametrize("variant", VARIANTS)
def test_trainer_when_it_trains_in_a_budget_then_the_same_bits(
    tmp_path: Path, variant: str
) -> None:
    options = VARIANTS[variant]
    # Without a session, checkpointing would leave nothing to move: it changes no bits.
    without = {key: each for key, each in options.items() if key != "gradient_checkpointing"}
    plain = train(tmp_path / "plain", [], **without)
    callback = make_callback(int(0.8 * plain.peak_bytes))
    found = train(tmp_path / "ours", [callback], **options)
    assert_same_within(found, plain, callback.session)
    assert callback.session.stats.steps == 6


@needs("peft")
@pytest.mark.promise("A3")
def test_trainer_when_peft_adapts_the_model_then_the_same_bits(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def adapt(model: Any) -> Any:
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        return get_peft_model(model, config)

    plain = train(tmp_path, [], adapt=adapt)
    callback = make_callback(int(0.85 * plain.peak_bytes))
    found = train(tmp_path, [callback], adapt=adapt)
    assert_same_within(found, plain, callback.session)


def test_trainer_when_it_resumes_then_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", [])
    callback = make_callback(int(0.8 * whole.peak_bytes))
    make_trainer(tmp_path, [callback], max_steps=4, save_strategy="steps", save_steps=4).train()

    def resume(callbacks: list[Any]) -> Outcome:
        def run() -> tuple[Any, Any, list[float]]:
            trainer = make_trainer(tmp_path, callbacks)
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
            return trainer.model, trainer.optimizer, list_losses(trainer)

        return measure(run)

    assert resume([callback]).bits == resume([]).bits
    assert callback.session.stats.steps == 2
    assert callback.session.stats.peak_bytes <= callback.session.limit_bytes


def test_callback_when_it_serves_several_trainings_then_each_has_a_session(tmp_path: Path) -> None:
    callback = make_callback("1GiB")
    trainer = make_trainer(tmp_path, [callback], max_steps=2)
    trainer.train()
    first = callback.session
    trainer.train()
    second = callback.session
    make_trainer(tmp_path, [callback], max_steps=2).train()
    assert len({id(each) for each in (first, second, callback.session)}) == 3
    assert [each.stats.steps for each in (first, second, callback.session)] == [2, 2, 2]
    assert swapkit.sessions() == ()


# ---- exceptions ----------------------------------------------------------------------------------


def test_trainer_when_a_step_raises_then_the_budget_is_lifted_at_once(tmp_path: Path) -> None:
    callback = make_callback("1GiB")
    trainer = make_trainer(tmp_path, [callback], make_broken_trainer())
    try:
        trainer.train()
    except _BrokenStepError:
        assert swapkit.sessions() == ()  # while the exception holds the frames of the loop
    assert not callback.session.is_active
    assert callback.session.stats.steps == 2
    assert swapkit.memory_stats()["budget_bytes"] == 0


def test_trainer_when_a_step_raises_then_the_budget_is_lifted_without_a_question(
    tmp_path: Path,
) -> None:
    callback = make_callback("1GiB")
    trainer = make_trainer(tmp_path, [callback], make_broken_trainer())
    with pytest.raises(_BrokenStepError):
        trainer.train()
    while swapkit.memory_stats()["budget_bytes"]:  # the suite's limit ends this
        time.sleep(0.01)
    assert not callback.session.is_active
    trainer.model(**{key: row[None] for key, row in make_rows(1)[0].items()}).loss.backward()
    assert swapkit.sessions() == ()  # this thread removes its own part of the session


def test_trainer_when_a_step_does_not_fit_then_the_next_training_works(tmp_path: Path) -> None:
    plain = train(tmp_path, [])
    callback = make_callback(int(0.2 * plain.peak_bytes))
    with pytest.raises((torch.OutOfMemoryError, swapkit.SwapkitError)):
        train(tmp_path, [callback])
    assert swapkit.sessions() == ()
    assert train(tmp_path, [make_callback("1GiB")]).bits == plain.bits


def test_trainer_when_it_finds_its_batch_size_then_each_try_has_the_budget(tmp_path: Path) -> None:
    plain = train(tmp_path, [], per_device_train_batch_size=2)
    callback = make_callback(plain.peak_bytes)
    trainer = make_trainer(
        tmp_path, [callback], per_device_train_batch_size=64, auto_find_batch_size=True
    )
    trainer.train()
    assert trainer._train_batch_size < 64
    assert callback.session.stats.steps == 6
    assert callback.session.stats.peak_bytes <= plain.peak_bytes
    assert swapkit.sessions() == ()


# ---- gradient checkpointing ----------------------------------------------------------------------


def list_flags(model: Any) -> list[bool]:
    return [each.gradient_checkpointing for each in model.model.layers]


def make_spy() -> Any:
    from transformers import TrainerCallback

    class Spy(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
            self.flags = list_flags(others["model"])

    return Spy()


@pytest.mark.parametrize("keeps", [False, True])
def test_checkpointing_when_on_then_off_in_the_session_unless_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, keeps: bool
) -> None:
    spy, callback = make_spy(), make_callback("1GiB", keep_checkpointing=keeps)
    trainer = make_trainer(tmp_path, [callback, spy], max_steps=2, gradient_checkpointing=True)
    with caplog.at_level(logging.WARNING, "swapkit"):
        trainer.train()
    assert set(spy.flags) == {keeps}
    assert set(list_flags(trainer.model)) == {True}
    assert "gradient checkpointing runs every layer twice" in caplog.text
    assert ("It is off while the session runs" in caplog.text) != keeps


# ---- logs ----------------------------------------------------------------------------------------


@needs("tensorboard")
def test_trainer_when_it_logs_then_metrics_reach_history_and_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    callback = make_callback("1GiB")
    options: dict[str, Any] = {"report_to": ["tensorboard"], "logging_dir": str(tmp_path / "runs")}
    if not hasattr(_arguments_class(), "logging_dir"):
        del options["logging_dir"]
    trainer = make_trainer(tmp_path, [callback], **options)
    before = list(trainer.callback_handler.callbacks)
    for _ in range(2):
        trainer.train()
        assert trainer.callback_handler.callbacks == before
    logged = [each for each in trainer.state.log_history if "loss" in each]
    assert [each["swapkit/steps"] for each in logged] == [2, 4, 6]
    scalars = read_scalars(tmp_path / "runs")
    assert scalars["train/swapkit/budget_bytes"][:3] == [float(1 << 30)] * 3
    printed = capsys.readouterr().out
    assert "'loss'" in printed
    assert "swapkit/" not in printed


def _arguments_class() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments


@needs("wandb")
def test_trainer_when_it_reports_to_wandb_then_metrics_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    make_trainer(tmp_path, [make_callback("1GiB")], report_to=["wandb"]).train()
    try:
        assert wandb.run.summary["train/swapkit/budget_bytes"] == 1 << 30
        assert wandb.run.summary["train/swapkit/steps"] == 6
    finally:
        wandb.finish()


def test_callback_when_metrics_are_unwanted_then_logs_are_as_before(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [make_callback("1GiB", log_metrics=False)], max_steps=2)
    trainer.train()
    assert not [key for entry in trainer.state.log_history for key in entry if "swapkit" in key]


# ---- what is refused, and said -------------------------------------------------------------------


def test_callback_when_an_option_is_unknown_then_refused_before_training() -> None:
    with pytest.raises(InvalidArgument, match=r"SwapkitCallback\(polcy='swap'\).*policy"):
        make_callback("1GiB", polcy="swap")
    with pytest.raises(InvalidArgument, match="limit"):
        make_callback("1 Gibi")


def test_callback_when_deepspeed_is_on_then_refused() -> None:
    arguments = SimpleNamespace(deepspeed="zero3.json")
    with pytest.raises(Unsupported, match="DeepSpeed"):
        make_callback("1GiB").on_train_begin(arguments, None, None)


def test_model_when_built_before_the_pool_then_a_warning_names_its_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swapkit.uninstall()
    trainer = make_trainer(tmp_path, [make_callback("1GiB")], max_steps=1)
    with installed(), caplog.at_level(logging.WARNING, "swapkit"):
        trainer.train()
    assert "of the LlamaForCausalLM lie outside the budget" in caplog.text


def test_model_when_its_weights_are_mapped_from_a_file_then_copied_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, []).model.save_pretrained(tmp_path / "model")
    with installed() as installation, caplog.at_level(logging.INFO, "swapkit"):
        trainer = make_trainer(tmp_path, [make_callback("1GiB")], max_steps=1)
        trainer.model = type(trainer.model).from_pretrained(tmp_path / "model")
        weights = list(trainer.model.parameters())
        assert not installation.pool.owns(weights[0].data_ptr())
        before = [each.detach().clone() for each in weights]
        session = open_session("1GiB", trainer.model, [], {})
        session.close()
        assert all(map(torch.equal, before, weights))
        assert all(installation.pool.owns(each.data_ptr()) for each in weights)
        assert list(map(id, weights)) == list(map(id, trainer.model.parameters()))
    assert "were mapped from files (model.safetensors): copied" in caplog.text
    assert "lie outside" not in caplog.text
