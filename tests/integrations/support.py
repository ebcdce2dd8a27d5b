"""What tests of integrations share: small trainings, what comes of them, and programs of pages."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from tests.support import ROOT
from tests.support.sessions import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 256
TOKENS = 64
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Frameworks warn of what they deprecate; none of that is about swapkit.
QUIET = pytest.mark.filterwarnings("ignore")


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests whose package is not there: each is counted, with its reason."""
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)}: not installed, runs with `make integrations`"
    )


@dataclass(frozen=True)
class Outcome:
    """What a training leaves, and the memory that it took."""

    parameters: str
    states: str
    random: str
    losses: tuple[float, ...]
    peak_bytes: int

    @property
    def bits(self) -> tuple[object, ...]:
        return self.parameters, self.states, self.random, self.losses


def measure(train: Callable[[], tuple[Any, Any, list[float]]]) -> Outcome:
    """Run a training that returns its model, its optimizers and its losses.

    The peak is that of bytes in use: plain training needs at least that much.
    """
    gc.collect()
    torch.manual_seed(0)
    swapkit.reset_peak_memory_stats()
    model, optimizers, losses = train()
    peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
    states = [
        value
        for each in (optimizers if isinstance(optimizers, list) else [optimizers])
        for state in each.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return Outcome(
        parameters=digest([each.detach().float() for each in model.state_dict().values()]),
        states=digest([each.float() for each in states]),
        random=digest([torch.get_rng_state()]),
        losses=tuple(losses),
        peak_bytes=peak_bytes,
    )


def assert_same_within(found: Outcome, plain: Outcome, session: Any) -> None:
    """The bits are the same, and the budget held, which plain training exceeds."""
    assert found.bits == plain.bits
    assert 0 < session.stats.peak_bytes <= session.limit_bytes < plain.peak_bytes
    assert session.stats.swapped_out_bytes + session.stats.recomputed_regions > 0
    assert not session.is_active
    assert swapkit.sessions() == ()


def tiny_llama(layers: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=172, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=TOKENS, attention_dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (count, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def read_scalars(folder: Path) -> dict[str, list[float]]:
    """Return the scalars of the event files below a folder, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend(each.value for each in events.Scalars(tag))
    return found


def run_page(name: str, folder: Path, epilogue: str = "", *command: str) -> str:
    """Run the program of a page of docs/frameworks/, with some lines after it; return its output.

    Args:
        name: of the page.
        folder: to run in.
        epilogue: lines to run after the program, in its module.
        *command: how Python runs a file; none: just so.
    """
    text = (ROOT / "docs/frameworks" / f"{name}.md").read_text(encoding="utf-8")
    (program,) = PYTHON_BLOCK.findall(text)
    file = folder / "train.py"
    file.write_text(f"{program}\n{epilogue}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *command, str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout
