"""One run of the demo, in its own process: `python -m swapkit.demo.training SPEC`.

SPEC is a `RunSpec` encoded by `messages.encode`. The run executes commands from its stdin, one at a
time, answers each on its stdout, and ends when stdin ends.
"""

import ctypes
import dataclasses
import hashlib
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

import torch

from swapkit.demo.channel import Channel
from swapkit.demo.messages import (
    Built,
    Command,
    Finished,
    GarbledError,
    Message,
    OutOfMemory,
    RunAction,
    RunKind,
    RunSpec,
    Series,
    Stepped,
    decode,
)
from swapkit.demo.model import LanguageModel, next_byte_loss
from swapkit.demo.sizes import SIZES, ModelSize
from swapkit.demo.text import batch_windows, standard_library_text
from swapkit.demo.torch_allocator import TorchAllocator

_LEARNING_RATE = 1e-3
_PR_SET_PDEATHSIG = 1


class Allocator(Protocol):
    """The memory allocator below torch in a run."""

    def session(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[object]:
        """Return the context to train in."""

    def watched(self) -> AbstractContextManager[None]:
        """Return a context that records the bytes in use and reports the pool's segments."""

    def series(self) -> Series:
        """Return the bytes in use over the last watched step."""

    def stage(self) -> str:
        """Return the session's stage, empty without a session."""

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes reserved and in use so far; 0 without statistics."""

    def limit(self, limit_bytes: int) -> None:
        """Limit all memory to this many bytes from now on."""

    def finished(self, *, digest: str) -> Finished:
        """Return the summary of the run."""


class Training:
    """A model, its optimizer and its text."""

    def __init__(self, size: ModelSize, *, seed: int, recompute: bool) -> None:
        """Create all three.

        Args:
            size: size of the model.
            seed: the same seed gives the same numbers.
            recompute: recompute each block with `torch.utils.checkpoint`.
        """
        torch.manual_seed(seed)
        self.model = LanguageModel(size, recompute=recompute)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.steps_done = 0
        self._size = size
        self._seed = seed
        self._text = standard_library_text()

    def step(self) -> str:
        """Train one step.

        Returns:
            The loss before the update, as `float.hex` formats it.
        """
        windows = batch_windows(
            self._text,
            seed=self._seed,
            step=self.steps_done,
            batch=self._size.batch,
            tokens=self._size.tokens,
        )
        joined = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8)
        loss = next_byte_loss(self.model, joined.view(len(windows), -1).long())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return float(loss.item()).hex()

    def state_bytes(self) -> int:
        """Return the total bytes of parameters, gradients and optimizer states."""
        parameters = sum(each.nbytes for each in self.model.parameters())
        states = (state.values() for state in self.optimizer.state.values())
        return 2 * parameters + sum(
            value.nbytes for each in states for value in each if isinstance(value, torch.Tensor)
        )

    def digest(self) -> str:
        """Return the SHA-256 of all parameters, buffers and optimizer states, sorted by name."""
        model, states = self.model, self.optimizer.state
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, parameter in model.named_parameters():
            named += [(f"{name}.{key}", value) for key, value in states[parameter].items()]
        digest = hashlib.sha256()
        for name, tensor in sorted(named, key=lambda pair: pair[0]):
            digest.update(name.encode() + tensor.detach().numpy().tobytes())
        return digest.hexdigest()


class TrainingRun:
    """Executor of the parent's commands."""

    def __init__(self, spec: RunSpec, channel: Channel) -> None:
        """Store the specification; the BUILD command builds the run.

        Args:
            spec: specification of the run.
            channel: channel to the parent.
        """
        self._spec = spec
        self._channel = channel
        self._stack = ExitStack()
        self._allocator: Allocator | None = None
        self._training: Training | None = None

    def answer(self, command: Command) -> Message:
        """Execute one command.

        Args:
            command: the command.

        Returns:
            The answer; `OutOfMemory` if memory ran out.
        """
        action, limit_bytes = command.action, command.limit_bytes
        try:
            if action == RunAction.BUILD:
                return self._build(limit_bytes)
            if action == RunAction.TRY and limit_bytes is not None:
                return self._try(limit_bytes)
            return (
                self._step(watched=command.watched) if action == RunAction.STEP else self._finish()
            )
        except torch.OutOfMemoryError as error:
            step = self._training.steps_done if self._training else 0
            return OutOfMemory(text=str(error), step=step)

    def close(self) -> None:
        """Exit the session."""
        self._stack.close()

    def _build(self, budget_bytes: int | None) -> Built:
        torch.set_num_threads(self._spec.threads)
        allocator = self._allocator = self._make_allocator(budget_bytes)
        training = self._training = Training(
            SIZES[self._spec.size],
            seed=self._spec.seed,
            recompute=self._spec.kind == RunKind.RECOMPUTE,
        )
        self._stack.enter_context(allocator.session(training.model, training.optimizer))
        return Built()

    def _make_allocator(self, budget_bytes: int | None) -> Allocator:
        if self._spec.kind == RunKind.TORCH:
            return TorchAllocator()
        # Import only here, so that a run with torch's own allocator does not load swapkit's pool.
        from swapkit.demo.pool_allocator import PoolAllocator

        return PoolAllocator(
            self._channel.send,
            budget_bytes=budget_bytes,
            policy=self._spec.policy,
            bytes_per_s=self._spec.bytes_per_s,
        )

    def _step(self, *, watched: bool) -> Stepped:
        allocator, training = self._begun()
        with allocator.watched() if watched else nullcontext():
            start = time.perf_counter()
            loss = training.step()
            seconds = time.perf_counter() - start
        reserved_bytes, allocated_bytes = allocator.peaks()
        return Stepped(
            loss=loss,
            seconds=seconds,
            state_bytes=training.state_bytes(),
            reserved_peak_bytes=reserved_bytes,
            allocated_peak_bytes=allocated_bytes,
            stage=allocator.stage(),
            series=allocator.series() if watched else (),
        )

    def _try(self, limit_bytes: int) -> Stepped:
        """Train a step on a pool of this size."""
        allocator, training = self._begun()
        training.optimizer.zero_grad(set_to_none=True)  # an earlier failed try may leave gradients
        allocator.limit(limit_bytes)
        return self._step(watched=False)

    def _finish(self) -> Finished:
        allocator, training = self._begun()
        finished = allocator.finished(digest=training.digest())
        return dataclasses.replace(finished, torch_version=torch.__version__)

    def _begun(self) -> tuple[Allocator, Training]:
        if self._allocator is None or self._training is None:
            msg = "the run received a command before it was built"
            raise GarbledError(msg)
        return self._allocator, self._training


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends; off Linux, the closed pipe ends it.

    Args:
        parent_pid: process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run until the parent sends QUIT or closes its end.

    Args:
        arguments: the run's specification, encoded.

    Returns:
        The process's exit status.
    """
    spec = decode(arguments[0])
    if not isinstance(spec, RunSpec):
        msg = f"a run of the demo expects a RunSpec, got {type(spec).__name__}"
        raise GarbledError(msg)
    die_with(spec.parent_pid)
    channel = Channel.from_stdio()
    run = TrainingRun(spec, channel)
    try:
        for command in channel.commands():
            if command.action == RunAction.QUIT:
                break
            channel.send(run.answer(command))
    finally:
        run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
