r"""Two ranks that share the experts of a model, in sessions; run by `test_expert_parallel.py`.

    python -m torch.distributed.run --nproc-per-node=2 \
        tests/integration/expert_parallel_program.py all

Each rank routes its tokens to the experts of both by an all-to-all, whose sizes depend on the data,
and back. The arguments are the policies to train with. Rank 0 prints, as one line of JSON, what
became of each session, for each rank.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

import swapkit
from swapkit.testing import planning_at_once
from tests.support.ranks import publish_and_exit
from tests.support.sessions import Plain, Training, train_plainly
from tests.support.stateful import RecomputeAll

if TYPE_CHECKING:
    from collections.abc import Callable

    Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]

WIDTH, HIDDEN, TOKENS = 64, 128, 4096
LAYERS = 3
STEPS = 8
SHARES = (0.9, 0.95, 1.0)
ALL, PLENTY = "all", 2.0  # the policy that recomputes all that it may, and what it is given


def the_group() -> Any:
    """Return the group of the experts: sessions talk to each other in another one."""
    return _groups[0]


_groups: list[Any] = []


# ---- ways to exchange tokens ---------------------------------------------------------------------


def exchange_functional(x: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
    """As torch's functional collectives do, which autograd knows."""
    made: torch.Tensor = collectives.all_to_all_single_autograd(x, out, into, the_group())
    return made


class _InPlace(torch.autograd.Function):
    """Fills memory of its own, as Megatron and DeepSpeed do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        ctx.splits = out, into
        made = x.new_empty((sum(out), *x.shape[1:]))
        dist.all_to_all_single(made, x.contiguous(), out, into, group=the_group())
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        out, into = ctx.splits
        made = grads[0].new_empty((sum(into), *grads[0].shape[1:]))
        dist.all_to_all_single(made, grads[0].contiguous(), into, out, group=the_group())
        return made, None, None


def exchange_in_place(x: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
    """By the collectives of `torch.distributed`, which write to what they are given."""
    made: torch.Tensor = _InPlace.apply(x, out, into)
    return made


EXCHANGES: dict[str, Exchange] = {
    "functional": exchange_functional,
    "in place": exchange_in_place,
}


# ---- the model -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer with one expert on each rank."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(self.norm(x)).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        into = torch.bincount(chosen, minlength=dist.get_world_size())
        out = torch.empty_like(into)
        dist.all_to_all_single(out, into, group=the_group())
        sizes, others = into.tolist(), out.tolist()
        routed = self.exchange(x[order], others, sizes)
        done = self.down(nn.functional.gelu(self.up(routed)).sigmoid())
        back = self.exchange(done, sizes, others)
        mixed: torch.Tensor = (weights[order, None] * back)[order.argsort()].tanh()
        return x + mixed


class ExpertTraining(Training):
    """Training with other tokens on each rank."""

    def forward(self) -> torch.Tensor:
        """Return the loss of a batch."""
        torch.manual_seed(100 * self.steps_done + dist.get_rank())
        loss: torch.Tensor = self.model(torch.randn(TOKENS, WIDTH)).square().mean()
        return loss


def make(exchange: Exchange) -> ExpertTraining:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*[Experts(exchange) for _ in range(LAYERS)])
    return ExpertTraining(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def count() -> int:
    """Return how many collectives this rank has begun in the group."""
    number: int = the_group()._get_sequence_number_for_group()
    return number


def run(make_it: Callable[[], Training], plain: Plain, share: float, policy: str) -> dict[str, Any]:
    """Train in a session; return what became of it."""
    training = make_it()
    chosen = RecomputeAll() if policy == ALL else policy
    limit = plain.budget(share)
    before = count()
    planned = 0
    session = swapkit.budget(limit, training.model, training.optimizer, policy=chosen)
    with planning_at_once(), session:
        for _ in range(STEPS):
            # A candidate or the plan: routing may lead to another one at any step.
            planned += session.stage in {"search", "stable"}
            training.step()
            dist.barrier()
        return {
            "same": training.outcome() == plain.outcome,
            "collectives": count() - before,
            "planned": planned,
            "recomputed": session.stats.recomputed_regions,
        }


def run_all(policies: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, exchange in EXCHANGES.items():
        make_it = functools.partial(make, exchange)
        before = count()
        plain = train_plainly(make_it, STEPS)
        plain_count = count() - before
        for policy in policies:
            for share in SHARES if policy != ALL else (PLENTY,):
                result = run(make_it, plain, share, policy)
                found[f"{name}, {policy}, {share}"] = {**result, "plainly": plain_count}
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _groups.append(dist.new_group(backend="gloo"))
    swapkit.install()
    found = run_all(sys.argv[1:])
    publish_and_exit(found)


if __name__ == "__main__":
    main()
