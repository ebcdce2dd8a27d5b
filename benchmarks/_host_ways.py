"""Ways to train the demo's model, or one like GPT-2: CPU time of the training thread for each."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import swapkit
from benchmarks._per_saved_tensor import Passing
from examples.language_model import BYTE_VALUES, LanguageModel, ModelSize, next_byte_loss
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import KEEP, SWAP, as_plan, run
from swapkit.testing import planning_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from swapkit._runtime.session.session import Session
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.runs import SessionStats
    from swapkit.ir.traces import Trace
    from swapkit.planning.planner import Policy

    Scope = Callable[[], AbstractContextManager[Any]]
    Check = Callable[[], None]

RESCUE = "rescue"
SESSIONS = 5  # attempts to find a plan that holds in a session that is given it
SETTLING_STEPS = 24  # most steps until a session is stable, with a plan unchanged
HELD_STEPS = 4  # for this many steps
UNTIMED_STEPS = 2  # at the start of each turn: caches hold another way's data
LEAST_BYTES = 1024  # of storages that sessions move
EXCESS_BYTES = 1 << 17  # in use beyond a budget
WINDOW = 40  # a copy back may start at most this many slots before the use


class Times(NamedTuple):
    """CPU time of the training thread, in microseconds."""

    forward_us: float
    backward_us: float
    optimizer_us: float

    @property
    def both_us(self) -> float:
        """Forward plus backward."""
        return self.forward_us + self.backward_us


class Counts(NamedTuple):
    """The work of a way in each of its steps."""

    swapped_bytes: float = 0.0
    recomputed: float = 0.0  # operators, or parts of the model


def make_size(layers: int, dim: int, tokens: int) -> ModelSize:
    return ModelSize(
        dim=dim, layers=layers, heads=2, hidden=2 * dim, tokens=tokens, batch=1, steps=1
    )


def leave(_: object = None) -> None:
    """Do nothing."""


class GptBlock(nn.Module):
    """A layer as in GPT-2: fused projection, two norms with bias, GELU."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, size.hidden), nn.Linear(size.hidden, size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        parts = self.qkv(self.norm1(x)).split(dim, dim=-1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = torch.add(x, self.out(mixed.transpose(1, 2).reshape(x.shape)))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return torch.add(x, self.down(hidden))


class Gpt(LanguageModel):
    """A model of layers as in GPT-2."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__(size)
        self.blocks = nn.ModuleList(GptBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)  # type: ignore[assignment]


class Training:
    """A model that is trained with one batch: by AdamW if it is a `Gpt`, else by SGD."""

    def __init__(
        self,
        size: ModelSize,
        change: Callable[[LanguageModel], object] = leave,
        kind: type[LanguageModel] = LanguageModel,
    ) -> None:
        """Build the model; `change` may modify it, for example to recompute its blocks."""
        torch.manual_seed(0)
        self.model = kind(size)
        change(self.model)
        optimizer = torch.optim.AdamW if kind is Gpt else torch.optim.SGD
        self.optimizer: torch.optim.Optimizer = optimizer(self.model.parameters(), lr=1e-4)
        self._windows = torch.randint(BYTE_VALUES, (size.batch, size.tokens + 1))

    def loss(self) -> torch.Tensor:
        return next_byte_loss(self.model, self._windows)

    def step(self, scope: Scope = contextlib.nullcontext, check: Check = leave) -> Times:
        """Train one step, with forward inside `scope`; call `check` before the optimizer."""
        begin = time.thread_time_ns()
        with scope():
            loss = self.loss()
        middle = time.thread_time_ns()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.thread_time_ns()
        check()
        stepping = time.thread_time_ns()
        self.optimizer.step()
        stepped = time.thread_time_ns()
        self.optimizer.zero_grad()
        return Times((middle - begin) / 1e3, (end - middle) / 1e3, (stepped - stepping) / 1e3)


class Way(Protocol):
    """A way to train."""

    counts: Counts

    def run(self, steps: int) -> list[Times]:
        """Train some untimed steps, then `steps` timed ones."""


class Plain:
    """Training outside of a session."""

    def __init__(self, training: Training, scope: Scope = contextlib.nullcontext) -> None:
        self._training = training
        self._scope = scope
        self.counts = Counts()

    def run(self, steps: int) -> list[Times]:
        for _ in range(UNTIMED_STEPS):
            self._training.step(self._scope)
        return [self._training.step(self._scope) for _ in range(steps)]


class NotAsPlanned(RuntimeError):
    """A session does not run as the measurement requires."""


class InSession:
    """Training in sessions that follow one plan; the constructor finds it."""

    def __init__(
        self, name: str, training: Training, policy: str | Policy, limit_bytes: int
    ) -> None:
        """Find the plan.

        Raises:
            NotAsPlanned: there is no plan that holds.
        """
        self._name = name
        self._training = training
        self._policy = policy
        self._limit_bytes = limit_bytes
        self._plan = None if policy == RESCUE else self._find_plan()
        self.counts = Counts()

    def run(self, steps: int) -> list[Times]:
        """Train under the plan.

        Raises:
            NotAsPlanned: a step deviated from the plan, or the session replanned or rescued.
        """
        with self._enter(self._plan) as session:
            for _ in range(UNTIMED_STEPS):
                self._training.step()
            before = session.stats
            times = [
                self._training.step(check=lambda: self._check_step(session)) for _ in range(steps)
            ]
            self._check_session(session)
            self.counts = _count(before, session.stats, steps)
        return times

    def _enter(self, plan: Plan | None) -> Session:
        training = self._training
        return swapkit.budget(
            self._limit_bytes, training.model, training.optimizer, policy=self._policy, plan=plan
        )

    def _find_plan(self) -> Plan:
        """Return a plan that holds in a session that is given it, as in each turn."""
        plan: Plan | None = None
        for _ in range(SESSIONS):
            self._training.step()  # as in a turn, which follows steps without a budget
            with planning_at_once(), self._enter(plan) as session:
                given = plan
                plan = self._settle(session)
            if given is not None and not session.stats.replans and not session.stats.oom_rescues:
                return given
        raise self._refuse(f"no stable plan in {SESSIONS} sessions", session)

    def _settle(self, session: Session) -> Plan:
        """Train until a plan has held for `HELD_STEPS` steps in a row; return it."""
        former, held = (0, 0), 0
        for _ in range(SETTLING_STEPS):
            self._training.step()
            found = (session.stats.replans, session.stats.oom_rescues)
            held = held + 1 if session.stage == "stable" and found == former else 0
            former = found
            if held == HELD_STEPS and session.plan is not None:
                return session.plan
        raise self._refuse(f"no stable plan after {SETTLING_STEPS} steps", session)

    def _check_step(self, session: Session) -> None:
        """Check between backward and the optimizer that the step followed the plan."""
        if self._plan is None:
            return
        assert self._plan.trace is not None
        executor = session._active.controller._executor  # type: ignore[union-attr] # noqa: SLF001
        position, count = executor and executor.now(), len(self._plan.trace.events)
        if position != count:
            where = "it deviated" if position is None else f"at event {position}"
            raise self._refuse(
                f"a step does not follow the plan to event {count}: {where}", session
            )

    def _check_session(self, session: Session) -> None:
        stats = session.stats
        if session.stage != "stable":
            raise self._refuse(f"in stage {session.stage}", session)
        if stats.replans or stats.oom_rescues:
            raise self._refuse(f"{stats.replans} replans, {stats.oom_rescues} rescues", session)

    def _refuse(self, why: str, session: Session) -> NotAsPlanned:
        return NotAsPlanned(f"{self._name}: {why}\n{session.explain()}")


class WithWeights:
    """Training in sessions whose weights may leave the device."""

    def __init__(self, training: Training, room: float, policy: str = RESCUE) -> None:
        """Take the room in the budget for more than is in use, as a share of the weights' bytes.

        With a negative one, as many bytes of weights are away.
        """
        self._training = training
        self._policy = policy
        weights_bytes = sum(each.nbytes for each in training.model.parameters())
        self._room_bytes = int(room * weights_bytes)
        self.counts = Counts()

    def run(self, steps: int) -> list[Times]:
        """Train, under a plan once it has settled; the counts are of what comes back.

        Raises:
            NotAsPlanned: no plan has.
        """
        with self._enter() as session:
            with planning_at_once():
                for _ in range(UNTIMED_STEPS if self._policy == RESCUE else SETTLING_STEPS):
                    self._training.step()
            if session.stage != "stable":
                raise NotAsPlanned(f"weights: in stage {session.stage}\n{session.explain()}")
            before_bytes = session.stats.swapped_in_bytes
            times = [self._training.step() for _ in range(steps)]
            self.counts = Counts((session.stats.swapped_in_bytes - before_bytes) / steps)
        return times

    @contextlib.contextmanager
    def _enter(self) -> Iterator[Session]:
        """Begin a session; weights may leave if more than the budget is in use at its begin."""
        in_use_bytes = swapkit.memory_stats()["allocated_bytes.all.current"]
        excess = torch.empty(max(0, self._room_bytes + EXCESS_BYTES), dtype=torch.uint8)
        limit_bytes = in_use_bytes + self._room_bytes
        training = self._training
        policy = self._policy
        with swapkit.budget(limit_bytes, training.model, training.optimizer, policy=policy) as made:
            del excess
            yield made


def freeze(model: LanguageModel) -> None:
    """Let only a norm of the first layer require gradients: they pass all other layers."""
    model.requires_grad_(requires_grad=False)
    model.blocks[0].get_submodule("norm1").requires_grad_(requires_grad=True)


def _count(before: SessionStats, after: SessionStats, steps: int) -> Counts:
    return Counts(
        (after.swapped_out_bytes - before.swapped_out_bytes) / steps,
        (after.recomputed_regions - before.recomputed_regions) / steps,
    )


class InTurn:
    """A policy that applies its actions to the movable storages in rotation."""

    def __init__(self, *actions: int) -> None:
        """Take actions `KEEP`, `SWAP` or `RECOMPUTE`; an impossible action becomes `KEEP`."""
        self._actions = actions

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        problem = lower(trace, least_bytes=LEAST_BYTES)
        count = len(problem.item_bytes)
        wanted = np.fromiter(islice(cycle(self._actions), count), np.int8, count)
        is_possible = np.where(wanted == SWAP, problem.can_swap, problem.can_recompute)
        actions = np.where(is_possible, wanted, KEEP).astype(np.int8)
        done = run(problem, machine, actions, window=WINDOW)
        return as_plan(trace, problem, machine, actions, done, policy="in turn")


class Counting(Passing):
    """Dispatch mode that counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.operators += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Step(NamedTuple):
    """Operators and saved tensors of a step."""

    forward_operators: int
    backward_operators: int
    saved_tensors: int


def count_step(training: Training) -> Step:
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 1
        return tensor

    with Counting() as forward, torch.autograd.graph.saved_tensors_hooks(pack, identity):
        loss = training.loss()
    with Counting() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.zero_grad()
    return Step(forward.operators, backward.operators, saved)


def identity(value: Any) -> Any:  # noqa: ANN401 - a hook takes and returns anything
    return value


def checkpoint_by_torch(model: LanguageModel, *, saves: frozenset[object] = frozenset()) -> None:
    """Recompute each block with torch; `saves`: operators for its selective checkpoint."""

    def decide(_: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        is_saved = operator in saves
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if saves:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, decide)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def checkpoint_by_swapkit(model: LanguageModel, *, save: tuple[str, ...] = ()) -> None:
    """Recompute each block, except for the operators that `save` names."""
    for block in model.blocks:
        swapkit.checkpoint(block, save=save)
