"""Programs whose memory the benchmark of planned addresses watches.

Each step is seeded by its number, so that all ways to serve the memory must give the same bits.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from examples.language_model import SIZES, FeedForward, LanguageModel, Training, next_byte_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from examples.language_model import ModelSize

BYTE_VALUES = 256
MODELS = {  # of the programs other than the demo's
    "quick": replace(SIZES["tiny"], layers=2, dim=64, hidden=176, tokens=256, batch=2),
    "full": replace(SIZES["tiny"], layers=4, tokens=384, batch=2),
}
DEMOS = {"quick": replace(SIZES["tiny"], dim=64, layers=2, hidden=176), "full": SIZES["tiny"]}
LENGTHS = (0.75, 1.0, 0.375, 0.875, 0.625, 0.5)  # shares of the most tokens, by microbatch
IN_FLIGHT = 3  # microbatches between forward and backward
EXPERTS, CHOSEN, IMBALANCE = 4, 2, 0.5


class Program:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.steps_done = 0

    def step(self) -> None:
        """Train one step."""
        torch.manual_seed(self.steps_done)
        self.accumulate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1

    def accumulate(self) -> None:
        """Compute the gradients of a step."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return the SHA-256 of all parameters and states."""
        states = [each.values() for each in self.optimizer.state_dict()["state"].values()]
        tensors = [*self.model.state_dict().values(), *(each for state in states for each in state)]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


class Lengths(Program):
    """Accumulation as in 1F1B: several microbatches in flight, each of another length."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__(LanguageModel(size))
        self.size = size

    def accumulate(self) -> None:
        losses: deque[Tensor] = deque()
        for share in LENGTHS:
            losses.append(self.loss(int(share * self.size.tokens)))
            if len(losses) == IN_FLIGHT:
                losses.popleft().backward()  # type: ignore[no-untyped-call]
        while losses:
            losses.popleft().backward()  # type: ignore[no-untyped-call]

    def loss(self, tokens: int) -> Tensor:
        assert isinstance(self.model, LanguageModel)
        windows = torch.randint(BYTE_VALUES, (self.size.batch, tokens + 1))
        return next_byte_loss(self.model, windows)


class Disturbed(Lengths):
    """The same with one allocation more and one less in each phase, elsewhere in every step.

    Each block takes and frees a temporary in forward and in backward. In each phase, one block goes
    without, and one takes another tensor, which lives until a later block.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__(size)
        self._choices = random.Random()
        self._forward = self._backward = _Phase(self._choices, size.layers)
        assert isinstance(self.model, LanguageModel)
        for index, block in enumerate(self.model.blocks):
            block.register_forward_hook(partial(self._pass, index))

    def step(self) -> None:
        self._choices.seed(self.steps_done)
        super().step()

    def loss(self, tokens: int) -> Tensor:
        self._forward, self._backward = (_Phase(self._choices, self.size.layers) for _ in range(2))
        return super().loss(tokens)

    def _pass(self, index: int, _block: nn.Module, _inputs: object, output: Tensor) -> None:
        self._forward.pass_block(index, output)
        output.register_hook(  # type: ignore[no-untyped-call]
            partial(self._backward.pass_block, self.size.layers - 1 - index)
        )


class _Phase:
    """What is out of the ordinary in one forward or backward pass."""

    def __init__(self, choices: random.Random, blocks: int) -> None:
        self._missing = choices.randrange(blocks)
        self._taken, self._freed = sorted(choices.choices(range(blocks), k=2))
        self._share = choices.choice([1.0, choices.random()])  # of a temporary's size
        self._extra: Tensor | None = None

    def pass_block(self, index: int, values: Tensor) -> None:
        """Take what the block at a position of the pass takes.

        Args:
            index: position of the block in the pass.
            values: as large as a temporary.
        """
        if index == self._taken:
            self._extra = values.new_zeros(max(1, int(self._share * values.numel())))
        if index != self._missing:
            torch.zeros_like(values)
        if index == self._freed:
            self._extra = None


class Experts(nn.Module):
    """A feed-forward of experts; a step's routing prefers some of them."""

    preference: Tensor

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.router = nn.Linear(size.dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward(size) for _ in range(EXPERTS))
        self.register_buffer("preference", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Send each token to its experts."""
        tokens = x.flatten(0, 1)
        weights, chosen = (self.router(tokens) + self.preference).softmax(-1).topk(CHOSEN)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, ranks = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, ranks, None])
        return out.view_as(x)


class Routed(Program):
    """A model of experts: how many tokens each gets differs in every step."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__(LanguageModel(size))
        self.size = size
        assert isinstance(self.model, LanguageModel)
        self._layers = []
        for block in self.model.blocks:
            block.feed_forward = Experts(size)
            self._layers.append(block.feed_forward)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def accumulate(self) -> None:
        assert isinstance(self.model, LanguageModel)
        for layer in self._layers:
            layer.preference.normal_(std=IMBALANCE)
        windows = torch.randint(BYTE_VALUES, (self.size.batch, self.size.tokens + 1))
        next_byte_loss(self.model, windows).backward()  # type: ignore[no-untyped-call]


def make_program(name: str, extent: str) -> Program | Training:
    """Create one of `PROGRAMS`; the same seed gives the same numbers."""
    torch.manual_seed(0)
    if name == "demo":
        return Training(DEMOS[extent], seed=0, recompute=False)
    return PROGRAMS[name](MODELS[extent])


PROGRAMS: dict[str, Callable[[ModelSize], Program]] = {
    "lengths": Lengths,
    "disturbed": Disturbed,
    "experts": Routed,
}
NAMES = ("demo", *PROGRAMS)
