"""Recording one step: every operator, every storage's life, every saved tensor, as a `Trace`.

A dispatch mode sees the operators of forward, backward and optimizer. It notes little about each;
`trace` builds the plain values afterwards. Saved tensors come from the hooks of a session, or from
the recorder's own pair (`saved_events.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from swapkit._native.pool import Pool
from swapkit._runtime.operators.evidence import Evidence
from swapkit._runtime.operators.names import Operator
from swapkit._runtime.process.undo import Undo, raise_first
from swapkit._runtime.recording.notes import NotedOperator, Notes, Setting
from swapkit._runtime.recording.operator_runs import (
    RecordingMode,
    form_of,
    run_timed,
    run_trapped,
)
from swapkit._runtime.recording.saved_events import Savings
from swapkit._runtime.recording.tables.blocks import NO_WORKSPACE
from swapkit._runtime.recording.tables.kept_bytes import Read
from swapkit._runtime.recording.tables.operator_work import NO_WORK, UNKNOWN, OpWork, find_work
from swapkit._runtime.recording.tables.storages import tensors_in
from swapkit._runtime.recording.trace_builder import build_trace
from swapkit._runtime.recording.training_state import Optimizers
from swapkit._runtime.saved.hooks import is_in_region
from swapkit._runtime.saved.weights import list_leaving
from swapkit._runtime.torch_compat import reported_calls
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit._runtime.torch_compat.internals import (
    NO_TASK,
    FakeTensor,
    buffers_of,
    graph_task,
    parameters_of,
)
from swapkit._runtime.torch_compat.isolation import is_compiled_code, untraced
from swapkit._runtime.torch_compat.reported_calls import regions, resizes, waits
from swapkit.ir.traces import BEFORE, SEGMENT, WAIT, StagePlace, Trace

if TYPE_CHECKING:
    from swapkit._runtime.shim.types import Mover

UPDATE = "swapkit.update_statistics"  # an operator's writes to anything but its results
# An operator that a region runs again in forward, because an operand is about to change. It needs
# its own name: plans count captured runs by name (`execution/plan_compiler.py`), without this one.
AGAIN = "swapkit.run_again"


class Recorder(Notes):
    """Records one thread, and autograd's threads that work for it, from `start` to `stop`.

    Torch's global hooks fire for the modules and optimizers of every thread. Calls on threads that
    are not recorded are ignored. All callbacks take the recorder's lock; `stop` may run on any
    thread.
    """

    def __init__(self, setting: Setting) -> None:
        """Prepare; recording begins with `start`."""
        super().__init__(setting)
        self._task = NO_TASK  # the latest backward pass
        self._microbatch: int | None = None  # that a pipeline's schedule works on
        self.optimizers = Optimizers(self, setting.optimizers)
        self.savings = Savings(self)
        # Reports the waits of operators to the timer; only our own pool does.
        self._pool = setting.pool if isinstance(setting.pool, Pool) else None
        self._mode = RecordingMode(self)
        self._mode.sees_bytes = setting.has_data
        self._seconds: list[float] = []
        self._evidence_before = Evidence.count
        self.in_use_bytes = 0  # of the pool, at the start
        self._away_bytes = 0  # of weights, at the start
        self._segments: list[Any] = []  # the timer's, of segments that run
        self._has_begun = False
        self._undo = Undo()

    def is_here(self) -> bool:
        """Return whether this thread is recorded: autograd's threads have their caller's modes."""
        return any(mode is self._mode for mode in mode_stack())

    @property
    def had_first_runs(self) -> bool:
        """Whether a region had its first run, which keeps more than later runs do."""
        return Evidence.count != self._evidence_before

    @property
    def doubtful(self) -> frozenset[int]:
        """The operators of the trace whose time may include waiting."""
        return self.timer.doubtful

    @property
    def has_seen(self) -> bool:
        """Whether there is enough for a trace, once the recorder has stopped."""
        return bool(self._seconds and self.savings.events)

    # ---- start and stop ------------------------------------------------------------------------

    def start(self) -> None:
        """Start to record this thread's operators, and those of its backward passes."""
        self.prepare()
        self.begin()

    def prepare(self) -> None:
        """Enter the mode; nothing is noted before `begin`, which then works inside of calls."""
        self.is_paused = True
        self._undo.add(self._mode.leave)  # before the step, so that an interruption leaves nothing
        self._mode.__enter__()

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._has_begun

    def begin(self) -> None:
        """Note what is there now, and operators from now on."""
        undo, self._has_begun = self._undo, True
        for end in (self.storages.stop, self.bytes.stop, self.savings.stop, self._read_times):
            undo.add(end)
        if self.setting.root is not None:
            for module in self.setting.root.modules():
                self._add_module(module)
        undo.add(self.optimizers.stop)
        self.optimizers.start()
        if self._pool is not None:
            undo.add(functools.partial(self._pool.unwatch, self.timer))
        undo.add(self.workspaces.stop)
        if self.setting.pool is not None:
            self.in_use_bytes = self.setting.pool.in_use_bytes()
        self.workspaces.start()
        if self.setting.mover is not None:
            self._find_weights(self.setting.mover)
        if self._pool is None:
            undo.add(functools.partial(resizes.remove, self))
            resizes.add(self)
        else:
            self._pool.watch(self.timer)
        undo.add(self.calls.stop)
        self.calls.start()
        undo.add(functools.partial(waits.remove, self))
        waits.add(self)
        run_region = self.run_region  # one object: it is compared
        undo.add(functools.partial(regions.remove, run_region))
        regions.add(run_region)
        undo.add(functools.partial(reported_calls.remove, self))
        reported_calls.add(self)
        undo.add(self._pause)
        self.is_paused = False

    def _find_weights(self, mover: Mover) -> None:
        """Find the weights that may leave, by name, and where those are that are here."""
        with self.lock:
            self._away_bytes, addresses = mover.held_memory()
            self.workspaces.blocks.of_weights.update(addresses)
            for name, tensor in list_leaving(self.setting.root):
                number = self.storages.known(tensor)
                if number is not None:
                    self.storages.lives[number].module = name
                    self.weights.add(number)

    def _pause(self) -> None:
        self.is_paused = True

    def stop(self) -> None:
        """Undo `start` or `prepare`; then `trace` can build the trace, if recording has begun.

        An operator that runs meanwhile on another thread may still be noted. It has no time in
        `_seconds`, and so is in no trace. A second call retries what failed.
        """
        raise_first(self._undo.run())

    def _read_times(self) -> None:
        self._seconds = self.timer.seconds([row.taken for row in self.rows])

    def trace(
        self,
        *,
        step_seconds: float = 0.0,
        reserved_ratio: float = 1.0,
        base_bytes: int | None = None,
    ) -> Trace:
        """Return the trace, once the recorder has stopped.

        Args:
            step_seconds: the time of such a step unrecorded; 0: not known.
            reserved_ratio: peak reserved bytes, divided by the bytes in use at that time.
            base_bytes: bytes in use by unseen storages; None: the pool's bytes in use at the
                start, minus the seen storages that existed then.
        """
        if base_bytes is None:
            there = (
                life.nbytes
                for life in self.storages.lives
                if life.birth == BEFORE and not life.is_outside
            )
            in_use_bytes = self.workspaces.in_use_bytes
            if in_use_bytes is None:
                in_use_bytes = self.in_use_bytes
            in_use_bytes += self._away_bytes
            base_bytes = max(0, in_use_bytes - sum(there) - self.workspaces.blocks.gone_bytes)
        return build_trace(
            self,
            self.savings.events,
            self._seconds,
            step_seconds=step_seconds,
            reserved_ratio=reserved_ratio,
            base_bytes=base_bytes,
        )

    # ---- operators -------------------------------------------------------------------------------

    @untraced
    def run(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator and note it; return its result."""
        form = form_of(function)
        if form.is_view:  # touches no memory
            return function(*args, **kwargs)
        is_compiled = self._leave_segment()
        operands: list[torch.Tensor] = []
        tensors_in((*args, *kwargs.values()), operands)
        unread = form.effects.unread(args, kwargs)
        given = _without(operands, unread)
        with self.lock:
            self._note_freed()
            reads = self._numbers_read(given)
        # Fake tensors count as the real tensors that they stand for.
        judged = [tensor for tensor in given if type(tensor) is not FakeTensor]
        is_same = form.effects.is_repeatable(args, kwargs, judged)
        can_plan = _can_plan(is_same=is_same, is_compiled=is_compiled)
        read = self._read_bytes(given, is_same=can_plan)
        run = functools.partial(function, *args, **kwargs)
        run = functools.partial(run_trapped, self.setting.exclude_key, function, run)
        result, taken, workspace = run_timed(self, function, run, is_same=is_same)
        made: list[torch.Tensor] = []
        tensors_in((result,), made)
        work = find_work(function, args, kwargs, result, [*operands, *made])
        with self.lock:
            self.storages.note_freed()  # before the operator is noted, by which its blocks count
            changed = _without(form.effects.written(args, kwargs), unread)
            writes = self._numbers_written(changed, made)
            row = len(self.rows)
            if writes or (reads and not self._is_view(made, reads)):
                self._note(form.name, taken, (reads, writes), workspace, can_plan, work)
            else:
                read = None
            if unread:
                self._note_update(unread)
            self.workspaces.close()
        if read is not None:  # without the lock: takes time and may need memory
            self.bytes.ran(row, read, made)
        self._begin_segment(is_on=is_compiled)
        return result

    @untraced
    def run_hook(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator with which a compiled graph packs or unpacks a tensor.

        The graph's own kernels are no operators: what runs between two such calls, or operators of
        libraries, is noted as a *segment*.
        """
        self._end_segment()
        try:
            return function(*args, **kwargs)
        finally:
            self._begin_segment()

    def _begin_segment(self, *, is_on: bool = True) -> None:
        if not is_on or not self.setting.has_data:
            return
        with self.lock:
            if self.workspaces.is_on:
                self.workspaces.begin()
            self.running += 1
            self._segments.append(self.timer.begin())

    def _leave_segment(self) -> bool:
        """End the segment before an operator; return whether another follows behind it."""
        return self._end_segment() and is_compiled_code()

    def _end_segment(self) -> bool:
        """Note the segment that runs, if one does; return whether one did.

        On any thread: no later call reports the end of a backward pass on autograd's threads.
        """
        if not self._segments:
            return False
        with self.lock:
            while self._segments:
                taken = self.timer.end(self._segments.pop(), cast("Operator", SEGMENT))
                self.running -= 1
                workspace = self.workspaces.end() if self.workspaces.is_on else NO_WORKSPACE
                self._note_freed()
                self._note(SEGMENT, taken, ((), ()), workspace, is_same=False, work=UNKNOWN)
                self.workspaces.close()
        return True

    @untraced
    def run_region(
        self,
        function: Callable[..., Any],
        region: object,
        operands: Sequence[Any],
        written: Collection[int] | None,
        is_recorded: bool,  # noqa: ARG002, FBT001 - called by position
        /,
    ) -> Any:  # noqa: ANN401 - torch's
        """Call a compiled region: see `reported_calls.RunRegion`.

        Its kernels are no operators: the region as a whole uses the weights among its operands.
        """
        used = {} if self.is_paused or not self.is_here() else self._find_used(operands)
        if not used:
            return function(region, operands)
        weights = list(used.values())
        changed = [each for at, each in used.items() if written is None or at in written]
        is_compiled = self._leave_segment()
        numbers = self._note_use(weights, [])
        self.in_regions.update(numbers)
        try:
            self._begin_segment()
            result = function(region, operands)
            self._end_segment()
        finally:
            self.in_regions.subtract(numbers)
        self._note_use(weights, changed)
        self._begin_segment(is_on=is_compiled)
        return result

    def _find_used(self, operands: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return the weights that may leave among the operands of a region, by their places."""
        with self.lock:
            return {
                at: each
                for at, each in enumerate(operands)
                if isinstance(each, torch.Tensor) and self.storages.known(each) in self.weights
            }

    def _note_use(
        self, weights: list[torch.Tensor], changed: list[torch.Tensor]
    ) -> tuple[int, ...]:
        """Note that a region begins or ends, which uses weights; return their storages."""
        with self.lock:
            self._note_freed()
            reads = self._numbers_read(weights)
            touched = (reads, self._numbers_written(changed, []))
            self._note(SEGMENT, self.timer.nothing(), touched, NO_WORKSPACE, is_same=False)
        return reads

    @untraced
    def repeat(
        self, function: Operator, given: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> None:
        """Run an operator again for a region of the user's, and note it."""
        with self.lock:
            self._note_freed()
            reads = self._numbers_read(given)
        made, taken, workspace = run_timed(self, function, run, is_same=True)
        # Numbers among the operands are not known here: FLOPs of convolutions are not, either.
        result = made[0] if len(made) == 1 else made
        work = find_work(function, given, {}, result, [*given, *made])
        with self.lock:
            self.storages.note_freed()
            writes = self._numbers_written([], made)
            name = AGAIN if graph_task() == NO_TASK else form_of(function).name
            self._note(name, taken, (reads, writes), workspace, is_same=False, work=work)
            self.workspaces.close()

    def resized(self, storage: torch.UntypedStorage, former_bytes: int) -> None:
        """Note that a storage has got or lost memory, where no pool tells."""
        if not self.is_paused:
            with self.lock:
                self.storages.resized(storage, former_bytes, is_here=self.is_here())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note a wait for a collective, as an operator without operands; one that fails is none."""
        if self.is_paused or not self.setting.has_data or not self.is_here():
            yield
            return
        with self.lock:
            self._note_freed()
        begun = self.timer.begin()
        try:
            yield
        except BaseException:
            self.timer.abandon()
            raise
        taken = self.timer.end(begun, cast("Operator", WAIT))
        with self.lock:
            self.storages.note_freed()
            self._note(WAIT, taken, ((), ()), NO_WORKSPACE, is_same=False)

    @contextlib.contextmanager
    def working(self, microbatch: int, place: StagePlace) -> Iterator[None]:
        """Note on which microbatch of a pipeline the operators in the block work, and where."""
        if not self.is_here():
            yield
            return
        self.places.add(place)
        former, self._microbatch = self._microbatch, microbatch
        try:
            yield
        finally:
            self._microbatch = former

    def _read_bytes(self, given: list[torch.Tensor], *, is_same: bool) -> Read | None:
        """Take checksums of the operands if a plan could repeat the operator; None: it cannot.

        A plan repeats operators of modules, in forward.
        """
        is_forward = graph_task() == NO_TASK and not self.optimizers.is_stepping
        if not (is_same and is_forward and self.bytes.is_on and self.calls.is_inside):
            return None
        return self.bytes.before(given)

    def _note_update(self, unread: list[torch.Tensor]) -> None:
        """Note the writes to `unread` as an operator of their own. The lock is held.

        A repetition skips these writes, so the trace separates them from the results.
        """
        numbers = self._numbers_written(unread, [])
        self._note(UPDATE, self.timer.nothing(), (numbers, numbers), NO_WORKSPACE, is_same=False)

    def _note_freed(self) -> None:
        """Note the storages that forward no longer holds, and those that have lost their memory."""
        self.storages.note_freed()
        self.holds.note_freed(len(self.rows))
        task = graph_task()
        if task == NO_TASK:
            return
        self.holds.finish(len(self.rows), task)
        if task != self._task:
            self._task = task
            self.storages.end_emptied()

    def _note(
        self,
        name: str,
        taken: Any,  # noqa: ANN401 - the timer's
        touched: tuple[tuple[int, ...], tuple[int, ...]],
        workspace: int,
        is_same: bool,  # noqa: FBT001
        work: OpWork = NO_WORK,
    ) -> None:
        reads, writes = touched
        phase = self.optimizers.phase()
        calls = self.calls
        tag, occurrence = calls.count(name, phase)
        row = NotedOperator(
            name,
            taken,
            phase,
            calls.is_inside,
            calls.root_calls,
            tag,
            occurrence,
            reads + self.savings.take_used(reads),
            writes,
            workspace,
            is_same,
            self._microbatch,
            *work,
        )
        self.rows.append(row)

    def _is_view(self, made: list[torch.Tensor], reads: tuple[int, ...]) -> bool:
        """Return whether an operator that wrote nothing only returned views of its operands."""
        return bool(made) and all(self.storages.known(tensor) in reads for tensor in made)

    def _numbers_read(self, given: list[torch.Tensor]) -> tuple[int, ...]:
        numbers: dict[int, None] = {}
        known = self.storages.known
        for tensor in given:
            number = known(tensor)
            if number is None:
                number = self.add_unseen(tensor)
            if number is not None and not self.in_regions[number]:
                numbers[number] = None
        return tuple(numbers)

    def _numbers_written(
        self, changed: list[torch.Tensor], made: list[torch.Tensor]
    ) -> tuple[int, ...]:
        storages, operator = self.storages, len(self.rows)
        numbers: dict[int, None] = {}
        for tensor in changed:
            number = storages.written(tensor, operator)
            if number is not None:
                numbers[number] = None
                self.bytes.written(number)
        for tensor in made:
            number = storages.add(tensor, operator)
            if number is not None:
                numbers[number] = None
        return tuple(numbers)

    def _add_module(self, module: torch.nn.Module) -> None:
        """Number the parameters and buffers of a module on its first call."""
        for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
            if tensor is not None:
                with self.lock:
                    self.optimizers.add_state(tensor)


def _can_plan(*, is_same: bool, is_compiled: bool) -> bool:
    """Return whether a plan may repeat an operator that has the same effect each time.

    In a region the user has decided what is kept or recomputed: no plan recomputes there. Nor in
    compiled code, which writes its own results over operands that it does not need any more.
    """
    return is_same and not is_in_region() and not is_compiled


def _without(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    if not others:
        return tensors
    return [tensor for tensor in tensors if all(tensor is not each for each in others)]
