"""One run of the demo, in a process of its own: `python -m swapkit.demo.training SPEC`.

SPEC is a `RunSpec` as `messages.encode` writes it. The run does what commands on its stdin say, one
at a time, answers each on its stdout, and ends when the commands do.
"""

import ctypes
import dataclasses
import hashlib
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch

from swapkit.demo.channel import Channel
from swapkit.demo.messages import (
    Action,
    Finished,
    GarbledError,
    Message,
    OutOfMemory,
    RunKind,
    RunSpec,
    Series,
    Stepped,
    Warmed,
    decode,
)
from swapkit.demo.model import LanguageModel, next_byte_loss
from swapkit.demo.plain_allocator import PlainAllocator
from swapkit.demo.sizes import SIZES, ModelSize
from swapkit.demo.text import batch_windows, standard_library_text

_LEARNING_RATE = 1e-3
_PR_SET_PDEATHSIG = 1


class Allocator(Protocol):
    """What lies below torch in a run."""

    @property
    def peak_bytes(self) -> int:
        """Most tensor bytes alive at once, 0 if the pool counts them."""

    @property
    def pool_peak_bytes(self) -> int:
        """Most bytes of the pool in use at once, 0 if there is none."""

    def session(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[object]:
        """Train inside this."""

    def watched_step(self) -> AbstractContextManager[None]:
        """Watch what happens inside as one step."""

    def series(self) -> Series:
        """Bytes over the last watched step."""

    def stop_watching(self) -> None:
        """Leave the coming steps alone."""

    def finished(self, *, digest: str) -> Finished:
        """Sum the run up."""

    def close(self) -> None:
        """Stop what is still running."""


class Training:
    """A model, its optimizer and its text."""

    def __init__(self, size: ModelSize, *, seed: int, recompute: bool) -> None:
        """Make all three.

        Args:
            size: of the model.
            seed: same seed, same numbers.
            recompute: by `torch.utils.checkpoint`, block by block.
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
            The loss before it, as `float.hex` writes it.
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
        """Bytes of parameters, gradients and optimizer states together."""
        parameters = sum(each.nbytes for each in self.model.parameters())
        states = (state.values() for state in self.optimizer.state.values())
        return 2 * parameters + sum(
            value.nbytes for each in states for value in each if isinstance(value, torch.Tensor)
        )

    def digest(self) -> str:
        """SHA-256 of all parameters' bytes, in the order of their names."""
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


class Run:
    """Carries the parent's commands out."""

    def __init__(self, spec: RunSpec, channel: Channel) -> None:
        """Start nothing yet.

        Args:
            spec: what to run.
            channel: to the parent.
        """
        self._spec = spec
        self._channel = channel
        self._stack = ExitStack()
        self._allocator: Allocator | None = None
        self._training: Training | None = None

    def answer(self, action: Action) -> Message:
        """Carry one command out.

        Args:
            action: what to do.

        Returns:
            The answer to it: `OutOfMemory` if memory did not suffice.
        """
        try:
            if action == Action.WARM:
                return self._warm()
            return self._step() if action == Action.STEP else self._finish()
        except torch.OutOfMemoryError as error:
            return OutOfMemory(
                text=str(error),
                step=self._training.steps_done if self._training else 0,
                series=self._allocator.series() if self._allocator else (),
            )

    def close(self) -> None:
        """End the session and whatever else was begun."""
        self._stack.close()

    def _warm(self) -> Warmed:
        """Build everything and train the untimed steps."""
        torch.set_num_threads(self._spec.threads)
        allocator = self._allocator = self._make_allocator()
        self._stack.callback(allocator.close)
        training = self._training = Training(
            SIZES[self._spec.size],
            seed=self._spec.seed,
            recompute=self._spec.kind == RunKind.RECOMPUTE,
        )
        self._stack.enter_context(allocator.session(training.model, training.optimizer))
        losses, seconds = [], []
        for _ in range(self._spec.untimed):
            start = time.perf_counter()
            with allocator.watched_step():
                losses.append(training.step())
            seconds.append(time.perf_counter() - start)
        allocator.stop_watching()
        return Warmed(
            losses=tuple(losses),
            series=allocator.series(),
            step_seconds=tuple(seconds),
            peak_bytes=allocator.peak_bytes,
            pool_peak_bytes=allocator.pool_peak_bytes,
            state_bytes=training.state_bytes(),
        )

    def _make_allocator(self) -> Allocator:
        kind, budget_bytes = self._spec.kind, self._spec.budget_bytes
        if kind == RunKind.PLAIN:
            return PlainAllocator()
        # Only here, so that nothing of swapkit runs below plain torch.
        from swapkit.demo.pool_allocator import PoolAllocator

        return PoolAllocator(
            self._channel.send,
            cap_bytes=budget_bytes if kind == RunKind.CAPPED else None,
            budget_bytes=budget_bytes if kind == RunKind.BUDGETED else None,
            policy=self._spec.policy,
            bytes_per_s=self._spec.bytes_per_s,
        )

    def _step(self) -> Stepped:
        training = self._begun()
        start = time.perf_counter()
        loss = training.step()
        return Stepped(loss=loss, seconds=time.perf_counter() - start)

    def _finish(self) -> Finished:
        training = self._begun()
        assert self._allocator is not None
        finished = self._allocator.finished(digest=training.digest())
        return dataclasses.replace(finished, torch_version=torch.__version__)

    def _begun(self) -> Training:
        if self._training is None:
            msg = "the run was asked to go on before it was warmed up"
            raise GarbledError(msg)
        return self._training


def die_with(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends; elsewhere the closed pipe does.

    Args:
        parent_pid: of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run until the parent says that it is enough.

    Args:
        arguments: the run's specification, encoded.

    Returns:
        The process's exit status.
    """
    spec = decode(arguments[0])
    if not isinstance(spec, RunSpec):
        msg = f"a run of the demo needs its specification, not {type(spec).__name__}"
        raise GarbledError(msg)
    die_with(spec.parent_pid)
    channel = Channel.from_stdio()
    run = Run(spec, channel)
    try:
        for command in channel.commands():
            if command.action == Action.QUIT:
                break
            channel.send(run.answer(command.action))
    finally:
        run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
