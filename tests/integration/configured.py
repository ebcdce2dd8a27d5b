"""What the tests of configured models share: tiny models, training, and what was done to them."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute.regions import run_region
from swapkit._runtime.user_choices import part
from tests.programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.saved.device import PlannedMove
    from swapkit._runtime.shim.types import StorageGroup

VOCABULARY = 64
TOKENS = (2, 32)
HIDDEN = 32
INNER = 64
HEADS = 4
STEPS = 2

# What one layer's operators make, in bytes.
ROWS = TOKENS[0] * TOKENS[1]
HIDDEN_BYTES = 4 * ROWS * HIDDEN
INNER_BYTES = 4 * ROWS * INNER
ATTENTION_BYTES = HIDDEN_BYTES + 4 * ROWS * HEADS  # and the logarithms of its sums

_GOLDEN = Path(__file__).parent.parent / "golden" / "document_examples.md"
_EXAMPLE = re.compile(r"^## (\w+ ?\d?):.*?```yaml\n(.*?)```.*?```text\n(.*?)```", re.M | re.S)


class Example(NamedTuple):
    """An example of the original's description: what the user writes, and what is logged."""

    document: str
    lines: list[str]


def read_examples() -> dict[str, Example]:
    found = _EXAMPLE.findall(_GOLDEN.read_text(encoding="utf-8"))
    return {
        name: Example(document, [line.partition("INFO - ")[2] for line in log.splitlines()])
        for name, document, log in found
    }


# ---- models -------------------------------------------------------------------------------------


def make_llama(layers: int = 4, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "use_cache": False,
        **options,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes)).train()


def make_tokens(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, TOKENS, generator=generator)


# ---- training -----------------------------------------------------------------------------------


class Training(NamedTuple):
    """What some steps leave."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]


def get_loss(model: Any, step: int = 0) -> Any:
    tokens = make_tokens(step)
    return model(input_ids=tokens, labels=tokens).loss


def train(
    model: torch.nn.Module,
    steps: int = STEPS,
    loss_of: Callable[[Any, int], torch.Tensor] = get_loss,
) -> Training:
    """Train a model as any user would."""
    torch.manual_seed(1)  # for dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.detach())
        gradients += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return Training(losses, gradients, [one.clone() for one in model.state_dict().values()])


@functools.cache
def train_llama_plainly(layers: int = 4) -> Training:
    return train(make_llama(layers))


def assert_same_training(found: Training, wanted: Training) -> None:
    assert len(found.gradients) == len(wanted.gradients) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs)


# ---- what is done meanwhile ---------------------------------------------------------------------


class Sent(NamedTuple):
    """A storage that was sent to the host: who saved it, its bytes, and when it comes back."""

    name: str
    nbytes: int
    prefetch: int


@contextlib.contextmanager
def watch_sent() -> Iterator[list[Sent]]:
    """Note what planned swaps send to the host, each storage once; the scheduler must agree."""
    runtime = get_runtime()
    swapper = runtime.current_swapper()
    before = swapper.scheduler.stats().copied_out_bytes
    seen: weakref.WeakSet[StorageGroup] = weakref.WeakSet()
    sent: list[Sent] = []

    def note(group: StorageGroup) -> None:
        if group not in seen:
            seen.add(group)
            sent.append(Sent(swapper.name(group), group.nbytes, group.placement.prefetch or 0))

    runtime.tracker.start("test")  # so that all names are whole
    former = runtime.trace
    runtime.trace = [] if former is None else former
    swapper.note_planned = note  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        del swapper.note_planned
        runtime.trace = former
        runtime.tracker.stop("test")
    copied = swapper.scheduler.stats().copied_out_bytes - before
    assert copied == sum(one.nbytes for one in sent)


@contextlib.contextmanager
def trace_moves() -> Iterator[list[PlannedMove]]:
    runtime = get_runtime()
    runtime.trace = []
    try:
        yield runtime.trace
    finally:
        runtime.trace = None


@contextlib.contextmanager
def count_recomputed() -> Iterator[list[int]]:
    """Count the regions and operators that are recomputed; the number is there afterwards."""
    swapper = get_runtime().current_swapper()
    before = swapper.counters().recomputed
    counted: list[int] = []
    yield counted
    counted.append(swapper.counters().recomputed - before)


@contextlib.contextmanager
def count_calls(model: torch.nn.Module) -> Iterator[Counter[str]]:
    """Count how often each submodule is called in forward, those in a region twice."""
    calls: Counter[str] = Counter()
    inside: list[object] = []

    def count(path: str) -> None:
        if torch._C._current_graph_task_id() == -1:
            calls[path] += 2 if inside else 1

    def run_inside(terms: Any, function: Any, args: Any, kwargs: Any) -> Any:
        inside.append(terms)
        try:
            return run_region(terms, function, args, kwargs)
        finally:
            inside.pop()

    handles = [
        module.register_forward_pre_hook(lambda *_, path=path: count(path))
        for path, module in model.named_modules()
    ]
    part.run_region = run_inside  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        part.run_region = run_region  # type: ignore[attr-defined]
        for handle in handles:
            handle.remove()


def find_forwards(model: torch.nn.Module) -> list[str]:
    """Return the paths of the modules whose forward is not their class's."""
    return [path for path, module in model.named_modules() if "forward" in module.__dict__]
