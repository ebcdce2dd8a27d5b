"""A small session without the search for a plan: record a step, follow a plan, compare."""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from swapkit._native.sched import Scheduler, State
from swapkit._runtime.allocators.installation import require_installation
from swapkit._runtime.execution.plan_executor import PlanExecutor
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.saved.eviction import EvictionTerms
from swapkit._runtime.saved.hooks import Hooks
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.thread_state import thread_state
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import EventKind, Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._native.backend import Backend
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit.ir.traces import Trace

WIDTH, TOKENS = 64, 256


class Block(nn.Module):
    """Norm, linear, activation, linear, around it a shortcut."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """Some blocks, each of which can be skipped."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return x


class _Session:
    """What an installation asks of a session."""

    def __init__(self, course: Course, limit_bytes: int) -> None:
        self._course = course
        self.limit_bytes = limit_bytes

    def rescue(self, needed_bytes: int) -> int:
        return self._course.swapper.rescue_bytes(needed_bytes)

    def hints(self, _needed_bytes: int) -> list[str]:
        return []

    def add_peak(self, peak_bytes: int) -> None:
        pass


class Course:
    """A model in training, whose steps are recorded and follow plans."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        backend: Backend | None = None,
        tokens: int = TOKENS,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Net() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = tokens
        self.loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.pow(2).mean()
        self.installation = require_installation()
        device = self.installation.device
        scheduler = Scheduler(
            backend or device.backend, drop_owner=device.shared.shim.drop_address, **options
        )
        self.swapper: Swapper = get_runtime().new_swapper(device, scheduler, EvictionTerms(1 << 40))
        self._make_hooks()
        self.swapper.evictor._least_bytes = 0
        self.seed = 0
        self.losses: list[float] = []

    def _make_hooks(self) -> None:
        self.hooks = Hooks(self.swapper, Placement(Action.AUTO, min_bytes=1))
        self.swapper.events = self.hooks.packer

    @contextmanager
    def running(self, limit_bytes: int = 1 << 40) -> Iterator[Course]:
        """Be a session."""
        installation, runtime = self.installation, get_runtime()
        with ExitStack() as undo:
            session: Any = _Session(self, limit_bytes)
            installation.enter(session)
            undo.callback(installation.leave, session)
            installation.tracker.add_model(self.model)
            installation.tracker.start("test")
            undo.callback(installation.tracker.stop, "test")
            undo.callback(self._make_hooks)  # a pair is entered once
            self.hooks.enter()
            undo.callback(self.hooks.leave)
            thread_state.sessions.append(self.swapper)
            undo.callback(thread_state.sessions.pop)
            runtime.active.append(self.swapper)
            undo.callback(runtime.active.remove, self.swapper)
            yield self

    def batch(self) -> torch.Tensor:
        """Return the next batch, always the same in the same place."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.tokens, WIDTH, generator=generator)

    def forward(self) -> torch.Tensor:
        """Run a forward pass of the next batch; return its loss."""
        batch = self.batch()
        torch.manual_seed(self.seed)
        return self.loss(self.model(batch))

    def backward(self, loss: torch.Tensor) -> None:
        """Run its backward pass."""
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        """Run a step."""
        self.backward(self.forward())
        self.end()

    def end(self) -> None:
        """End a step as a session does."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.swapper.end_step()

    def record(self) -> Trace:
        """Run a step; return what it did."""
        recorder = Recorder(
            Setting(
                device=torch.device("cpu"),
                tracker=self.installation.tracker,
                pool=self.installation.pool,
                root=self.model,
                optimizers=(self.optimizer,),
            )
        )
        recorder.start()
        self.hooks.packer.observer = recorder.savings
        try:
            self.step()
        finally:
            self.hooks.packer.observer = None
            recorder.stop()
        return recorder.trace()

    @contextmanager
    def following_plan(self, trace: Trace, *decisions: Decision) -> Iterator[PlanExecutor]:
        """Follow a plan meanwhile."""
        plan = Plan(decisions=decisions, budget_bytes=1 << 40)
        following = PlanExecutor(self.swapper, self.model, trace, plan)
        following.start()
        try:
            yield following
        finally:
            following.stop()

    def moved(self) -> tuple[int, int]:
        """Return the bytes copied out and back so far."""
        stats = self.swapper.scheduler.stats()
        return stats.copied_out_bytes, stats.copied_in_bytes

    def outcome(self) -> list[Any]:
        """Return losses, and copies of parameters, buffers, optimizer states, random state."""
        states = [list(each.values()) for each in self.optimizer.state_dict()["state"].values()]
        tensors = [*self.model.state_dict().values(), *(each for state in states for each in state)]
        return [
            *self.losses,
            *(each.detach().clone() for each in tensors),
            torch.get_rng_state(),
        ]


def items(trace: Trace) -> list[int]:
    """Return the storages that are saved in forward and used in backward, in order."""
    used = {event.storage for event in trace.events if event.kind is EventKind.USE}
    return [
        number
        for number, storage in enumerate(trace.storages)
        if storage.is_saved and storage.kind is Kind.ACTIVATION and number in used
    ]


def maker(trace: Trace, storage: int) -> int:
    """Return the operator that makes a storage."""
    return next(
        number for number, operator in enumerate(trace.operators) if storage in operator.writes
    )


def made_by(trace: Trace, name: str) -> list[int]:
    """Return the saved storages that operators of a name make."""
    return [each for each in items(trace) if name in trace.operators[maker(trace, each)].name]


class States:
    """Notes after each event where some storages are, by the order in which they are saved."""

    def __init__(self, course: Course, events: list[int]) -> None:
        self.events = events  # whose saved tensors are watched
        self.groups: dict[int, object] = {}
        self.states: list[dict[int, State]] = []
        self.drain: Callable[[], object] = course.swapper.scheduler.drain

    def saved(self, _tensor: torch.Tensor, packed: object) -> None:
        if len(self.states) in self.events:
            self.groups[len(self.states)] = packed
        self._note()

    def used(self, _packed: object, _tensor: torch.Tensor) -> None:
        self._note()

    def _note(self) -> None:
        self.states.append({each: self.state_of(packed) for each, packed in self.groups.items()})
        self.drain()

    @staticmethod
    def state_of(packed: object) -> State:
        return State(cast("Any", packed).group.state)


def event_of(trace: Trace, storage: int, kind: EventKind) -> int:
    """Return the first event of a kind of a storage."""
    return next(
        number
        for number, event in enumerate(trace.events)
        if event.storage == storage and event.kind is kind
    )


def swap_all(trace: Trace, *but: int) -> tuple[Decision, ...]:
    """Return decisions to swap everything else."""
    chosen = [each for each in items(trace) if each not in but]
    return tuple(Decision(storage=each, action=Action.SWAP) for each in chosen)


def recompute(*storages: int) -> tuple[Decision, ...]:
    """Return decisions to compute storages again."""
    return tuple(Decision(storage=each, action=Action.RECOMPUTE) for each in storages)


def forward_end(trace: Trace) -> int:
    """Return the first operator of backward."""
    return next(
        number
        for number, operator in enumerate(trace.operators)
        if operator.phase is Phase.BACKWARD
    )


def plain(course: Course, *steps: Callable[[Course], object]) -> list[Any]:
    """Return the outcome of a copy of a course that runs without any of this."""
    other = copy.copy(course)
    other.model, other.losses = copy.deepcopy(course.model), []
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    other.optimizer.load_state_dict(copy.deepcopy(course.optimizer.state_dict()))
    for step in steps:
        step(other)
    gc.collect()
    return other.outcome()


def assert_same(course: Course, expected: list[Any]) -> None:
    """Compare what a course has come to bit for bit."""
    found = course.outcome()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def block(course: Course, number: int) -> Any:
    return cast("Any", course.model).blocks[number]


def follow(course: Course, choose: Callable[[Trace], tuple[Decision, ...]], steps: int = 2) -> int:
    """Record a step and follow a plan for some more; return how often operators ran again."""
    expected = plain(course, *[Course.step] * (1 + steps))
    with course.running():
        trace = course.record()
        decisions = choose(trace)
        with course.following_plan(trace, *decisions) as following:
            for _ in range(steps):
                course.step()
                assert following.end_step().deviation is None
        assert course.swapper.counters().rescues == 0
    assert_same(course, expected)
    return course.swapper.counters().recomputed


class Twice(nn.Module):
    """The same operator several times, on what is saved for nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.sin(torch.sin(x) * self.weight)
        return x


class Apply(nn.Module):
    """A function of a product with a weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def repeat_all(trace: Trace) -> tuple[Decision, ...]:
    """Compute everything again that can be."""
    able = [each for each in items(trace) if trace.operators[maker(trace, each)].is_repeatable]
    assert able
    return recompute(*able)


@contextmanager
def defined(name: str, function: Callable[..., torch.Tensor], schema: str) -> Iterator[Any]:
    """Define an operator whose result is saved."""
    library = torch.library.Library("swapkit_captures", "FRAGMENT")
    library.define(f"{name}{schema}")
    library.impl(name, function, "CPU")

    def save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.others = len(inputs) - 1
        ctx.save_for_backward(output)

    torch.library.register_autograd(
        f"swapkit_captures::{name}",
        lambda context, gradient: (
            gradient * context.saved_tensors[0].cos(),
            *[None] * context.others,
        ),
        setup_context=save,
        lib=library,
    )
    try:
        yield getattr(torch.ops.swapkit_captures, name)
    finally:
        library._destroy()
