"""Steps whose memory fragments: those of the seed document, and one of varying lengths.

All are recorded on the meta device. Weights and gradients exist before the step; the states of an
optimizer, which stay where they are, are left out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from benchmarks._planner_instances import Part, Workload, compose
from benchmarks.replay.allocations import allocations_of_step
from swapkit.api.recording import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.replay.allocations import AllocationTrace

SHARDS = "tp8"  # every model of the document is on eight devices in this way
STAGES, MICROBATCHES = 4, 12  # of 70B. The document has 512: in between, 1F1B repeats itself
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A row of the document's table (S4), of one device: the first of the pipeline."""

    model: str
    layers: int  # of this device
    tokens: int
    batch: int
    microbatches: int
    stages: int = 1
    recompute: bool = False

    @property
    def name(self) -> str:
        """The name for people."""
        pipeline = f" PP{self.stages}" if self.stages > 1 else ""
        way = ", recompute" if self.recompute else ""
        return f"{self.model.upper()} {self.tokens // 1024}k, {self.batch}{pipeline}{way}"

    @property
    def key(self) -> str:
        """The name in documents."""
        way = "_recompute" if self.recompute else ""
        return f"{self.model}_{self.tokens // 1024}k_batch{self.batch}{way}"

    def trace(self) -> AllocationTrace:
        """Return the requests of the step."""
        part = Part(
            shape=f"{self.model} {SHARDS}" if self.model != "tiny" else self.model,
            layers=self.layers,
            tokens=self.tokens,
            batch=self.batch,
            is_last=self.stages == 1,
            recompute=self.recompute,
        )
        workload = Workload(
            name=self.name,
            part=part,
            schedule="1f1b" if self.stages > 1 else "accumulation",
            stages=self.stages,
            microbatches=self.microbatches,
        )
        return allocations_of_step(compose(workload))


def list_configurations() -> Iterator[Configuration]:
    """Yield the rows of the document, each without and with recomputing every layer."""
    rows = (
        *(("7b", tokens, 4) for tokens in (4096, 6144)),
        ("13b", 8192, 4),
        *(("13b", tokens, 2) for tokens in (4096, 6144, 8192)),
    )
    layers = {"7b": 32, "13b": 40}
    for (model, tokens, batch), recompute in product(rows, (False, True)):
        yield Configuration(
            model=model, layers=layers[model], tokens=tokens, batch=batch,
            microbatches=16 // batch, recompute=recompute,
        )  # fmt: skip
    for tokens, recompute in product((4096, 6144, 8192), (False, True)):
        yield Configuration(
            model="70b", layers=80 // STAGES, tokens=tokens, batch=2, microbatches=MICROBATCHES,
            stages=STAGES, recompute=recompute,
        )  # fmt: skip


def list_quick_configurations() -> Iterator[Configuration]:
    """Yield a few small ones."""
    yield Configuration(model="tiny", layers=2, tokens=1024, batch=4, microbatches=2)
    yield Configuration(
        model="tiny", layers=2, tokens=2048, batch=2, microbatches=6, stages=4, recompute=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VaryingLengths:
    """A step whose microbatches have different lengths, with several in flight.

    It is in the spirit of the document's example: short sequences leave holes of 1 to 3 MiB, and
    the logits of a long one need gigabytes at once.
    """

    width: int = 1024
    layers: int = 4
    vocabulary: int = 32000
    batch: int = 4
    lengths: Sequence[int] = ()
    in_flight: int = 16

    def trace(self) -> AllocationTrace:
        """Return the requests of the step."""
        with torch.device("meta"):
            layer = nn.TransformerEncoderLayer(
                self.width, self.width // 128, 4 * self.width, dropout=0.0, batch_first=True
            )
            body = nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False)
            head = nn.Linear(self.width, self.vocabulary, bias=False)
        model = nn.Sequential(body, head).to(DTYPE)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return allocations_of_step(record(lambda: self._step(model), model, hardware="H100"))

    def _step(self, model: nn.Module) -> None:
        losses: deque[torch.Tensor] = deque()
        for length in self.lengths:
            losses.append(self._measure_loss(model, length))
            if len(losses) == self.in_flight:
                torch.autograd.backward(losses.popleft())
        while losses:
            torch.autograd.backward(losses.popleft())

    def _measure_loss(self, model: nn.Module, length: int) -> torch.Tensor:
        inputs = torch.empty(self.batch, length, self.width, dtype=DTYPE, device="meta")
        labels = torch.empty(self.batch * length, dtype=torch.long, device="meta")
        return functional.cross_entropy(model(inputs).float().flatten(0, 1), labels)


EXAMPLE = VaryingLengths(
    lengths=[4096 if number % 8 == 7 else 64 + 229 * number % 701 for number in range(24)]
)
QUICK_EXAMPLE = VaryingLengths(
    width=256, layers=2, vocabulary=1000, in_flight=4,
    lengths=[2048 if number % 4 == 3 else 64 + 229 * number % 701 for number in range(8)],
)  # fmt: skip
