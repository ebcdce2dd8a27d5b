"""`SwapkitCallback` in trainers of TRL: same bits, within the budget."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from tests.integrations.support import (
    QUIET,
    TOKENS,
    VOCABULARY,
    Outcome,
    assert_same_within,
    measure,
    needs,
    tiny_llama,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs("trl", "datasets"), QUIET, pytest.mark.usefixtures("installation")]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *map(str, range(VOCABULARY - 3))]
    words = {word: index for index, word in enumerate(names)}
    tokens = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(seed: int, words: int) -> str:
    return " ".join(str((seed * 7 + at * 3) % (VOCABULARY - 3)) for at in range(words))


def make_trainer(kind: str, folder: Path, callbacks: list[Any]) -> Any:
    import trl
    from datasets import Dataset

    numbers = range(32)
    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4,
        "logging_steps": 2, "save_strategy": "no", "report_to": "none", "bf16": False,
        "use_cpu": True, "max_length": TOKENS, "disable_tqdm": True, "seed": 1,
        "gradient_checkpointing": False,
    }  # fmt: skip
    data: dict[str, list[str]]
    more: dict[str, Any] = {"processing_class": make_tokenizer()}
    if kind == "SFT":
        data = {"text": [text(each, TOKENS - 2) for each in numbers]}
    elif kind == "GRPO":
        data = {"prompt": [text(each, 8) for each in numbers]}
        del options["max_length"]
        options |= {"num_generations": 4, "max_completion_length": TOKENS - 12}
        more["reward_funcs"] = reward
    else:
        data = {
            "prompt": [text(each, 8) for each in numbers],
            "chosen": [text(each + 1, TOKENS - 12) for each in numbers],
            "rejected": [text(each + 2, TOKENS - 12) for each in numbers],
        }
    model = tiny_llama(layers=8)
    if kind == "DPO":
        more["ref_model"] = copy.deepcopy(model)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=Dataset.from_dict(data),
        callbacks=callbacks,
        **more,
    )


def reward(completions: list[str], **_columns: Any) -> list[float]:
    """Return a reward for each completion: the share of even numbers in it."""
    words = [each.split() for each in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in each) / TOKENS for each in words]


def train(kind: str, folder: Path, callbacks: list[Any]) -> Outcome:
    def run() -> tuple[Any, Any, list[float]]:
        trainer = make_trainer(kind, folder, callbacks)
        trainer.train()
        logs = trainer.state.log_history
        return trainer.model, trainer.optimizer, [each["loss"] for each in logs if "loss" in each]

    return measure(run)


@pytest.mark.promise("A3")
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_trainer_of_trl_when_in_a_budget_then_the_same_bits(tmp_path: Path, kind: str) -> None:
    from swapkit.integrations.transformers import SwapkitCallback

    plain = train(kind, tmp_path, [])
    callback = SwapkitCallback(int(0.95 * plain.peak_bytes))
    found = train(kind, tmp_path, [callback])
    assert_same_within(found, plain, callback.session)
    assert callback.session is not None
    assert callback.session.stats.steps == 4
