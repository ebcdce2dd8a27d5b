"""One way to train, in a process of its own: `python -m benchmarks.gpu.trainer SETUP RESULT`.

SETUP is a `Setup` as JSON, RESULT the file that gets the figures. First some steps with
deterministic operators, whose gradients are identified; then, without them, steps that are timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import measure
from benchmarks.gpu.configurations import (
    MOVES_WEIGHTS,
    Method,
    NotInstalledError,
    Setup,
    install,
    prepare,
)
from benchmarks.gpu.llama import SHAPES, build_model, make_tokens
from benchmarks.gpu.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterator

Figures = dict[str, Any]

FINISHED, OUT_OF_MEMORY = "finished", "out of memory"
DIFFERENT_BATCHES = 4
OVERHEAD_STEPS = 4  # of a round with a session, and of one without; the first is not counted
SETTLING_STEPS = 40  # after which a session should long be stable
# Of a stable session before time is taken: until so many in a row have moved no memory, as they do
# when steps move to planned addresses; from the first of these numbers to the second, in most.
SETTLED_STEPS = (16, 48)
QUIET_STEPS = 4
SETTLING_SECONDS = 15.0


class Training:
    """The model, its optimizer, and the steps."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        shape = SHAPES[setup.shape]
        shape = dataclasses.replace(shape, layers=setup.layers or shape.layers)
        if shape.rank and setup.method in MOVES_WEIGHTS:
            # It may be larger than the device. Values do not matter.
            self.model = build_model(shape, "meta").to_empty(device="cpu")
        else:
            self.model = build_model(shape, setup.device)
        self.method: Method = prepare(setup, self.model)
        if setup.backend:
            self.model.compile(backend=setup.backend, dynamic=False)
        fused = measure.is_cuda(setup.device)
        make = self.method.make_optimizer
        self.optimizer = (
            torch.optim.AdamW(trained_of(self.model), lr=1e-4, fused=fused)
            if make is None
            else make()
        )
        self._batches = [
            make_tokens(shape, index, setup.device) for index in range(DIFFERENT_BATCHES)
        ]
        self._transformers = shape.library == "transformers"
        self.steps = 0
        self.loss = torch.zeros(())

    def step(self) -> None:
        """Train one step."""
        self.backward()
        self.update()

    def backward(self) -> None:
        tokens = self._batches[self.steps % DIFFERENT_BATCHES]
        self.steps += 1
        if self.method.run is not None:
            self.loss = self.method.run(tokens).detach()
            return
        with self.method.scope():
            if self._transformers:
                loss = self.model(input_ids=tokens, labels=tokens).loss
            else:
                loss = self.model(tokens)
        loss.backward()
        self.loss = loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resident_bytes(self) -> int:
        """Return what is there in every step: parameters, gradients, buffers, optimizer states."""
        by_parameter = getattr(self.optimizer, "state", {})  # torchao's has none of its own
        states = (value for state in by_parameter.values() for value in state.values())
        tensors = [*self.model.buffers(), *(s for s in states if isinstance(s, torch.Tensor))]
        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        gradients = sum(parameter.nbytes for parameter in trained_of(self.model))
        return parameters + gradients + sum(tensor.nbytes for tensor in tensors)


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return what an optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let operators repeat themselves; torch fills no memory for it.

    Attention does not, where torch is told only to warn.
    """
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
        settings.fill_uninitialized_memory = fills


@contextlib.contextmanager
def session_of(training: Training) -> Iterator[Any]:
    """Enter swapkit's session, if the setup has one, and give it.

    Its plan is made at once: what is timed are steps that follow it. The steps with deterministic
    operators, which take longer, are not the one that is recorded.
    """
    setup = training.setup
    if setup.limit_bytes == 0:
        yield None
        return
    import swapkit
    from swapkit.testing import planning_at_once

    session = swapkit.budget(
        setup.limit_bytes,
        training.model,
        training.optimizer,
        policy=setup.policy,
        profile_steps=max(1, setup.digest_steps + setup.warmup_steps),
        device=setup.device,
    )
    with planning_at_once(), session:
        training.model.to(setup.device)
        yield session


def train(setup: Setup, probe: Probe) -> Figures:
    """Do everything that a setup says; return the figures."""
    install(setup)
    if measure.is_cuda(setup.device):
        torch.zeros(1, device=setup.device)  # makes the context, which is not to be counted
    use = measure.DeviceUse(setup.device if probe.watches_device else "cpu")
    probe.prepare()
    training = Training(setup)
    if setup.method == "overhead":
        return measure_overhead(training)
    figures: Figures = {}
    with session_of(training) as session:
        with use.watched():
            if training.method.same_bits and setup.digest_steps:
                figures |= identify(training)
            for _ in range(setup.warmup_steps):
                training.step()
            steps_before_stable = settle(training, session)
            measure.synchronize(setup.device)
        peaks = measure.Peaks(setup.device, pool=setup.has_pool)
        peaks.reset()
        probe.begin(training, session)
        step = partial(probe.step, training, session)
        figures["steps_ms"] = measure.time_steps(step, setup.timed_steps, setup.device)
        figures |= probe.end(training, session)
        figures |= peaks.read()
        use.sample()
        if session is not None:
            figures |= describe_session(session)
            figures["steps_before_stable"] = steps_before_stable
        figures |= probe.after(training, session)
    figures["device_peak_bytes"] = use.peak_bytes
    figures["host_peak_bytes"] = measure.host_peak_bytes()
    figures["resident_bytes"] = training.resident_bytes()
    weights = (each.nbytes for each in training.model.parameters() if not each.requires_grad)
    figures["frozen_bytes"] = sum(weights)
    return figures


def settle(training: Training, session: Any) -> int | None:  # noqa: ANN401 - swapkit's Session
    """Train until the session has decided on a plan; return after how many steps in all it had."""
    if session is None:
        return None
    from swapkit.testing import planning_at_once

    with planning_at_once():
        for _ in range(SETTLING_STEPS):
            if session.stage == "stable":
                break
            training.step()
        stable_after = training.steps if session.stage == "stable" else None
        rest(training)  # here, so that planned addresses do not arrive between measured steps
    return stable_after


def rest(training: Training) -> None:
    """Train until the memory of the steps stays where it is."""
    least, most = SETTLED_STEPS
    quiet, maps, begin = 0, count_maps(training), time.monotonic()
    for step in range(most):
        is_late = time.monotonic() - begin > SETTLING_SECONDS
        if (step >= least and quiet >= QUIET_STEPS) or (is_late and step >= QUIET_STEPS):
            break
        training.step()
        before, maps = maps, count_maps(training)
        quiet = quiet + 1 if maps == before else 0


def count_maps(training: Training) -> int:
    """Return how often the pool has mapped memory so far; 0: another allocator serves."""
    setup = training.setup
    return measure.allocator_stats(setup.device, pool=setup.has_pool).get("maps", 0)


def identify(training: Training) -> Figures:
    """Train the first steps; return what identifies the last one's gradients, and its loss."""
    with deterministic():
        for _ in range(training.setup.digest_steps - 1):
            training.step()
        training.backward()
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        found = {
            "digest": measure.digest(gradients),
            "loss": float(training.loss).hex(),
        }
        gradients.clear()
        training.update()
    return found


def describe_session(session: Any) -> Figures:  # noqa: ANN401 - swapkit's Session
    stats = session.stats
    return {
        "session_peak_bytes": stats.peak_bytes,
        "budget_bytes": stats.budget_bytes,
        "rescues": stats.oom_rescues,
        "swapped_out_bytes": stats.swapped_out_bytes,
        "swapped_in_bytes": stats.swapped_in_bytes,
        "stall_seconds": stats.stall_seconds,
        "host_copies_peak_bytes": stats.host_peak_bytes,
        "recorded_ms": recorded_ms(session.trace),
    }


def recorded_ms(trace: Any) -> float | None:  # noqa: ANN401 - swapkit's Trace
    """Return how long the operators of the recorded step take, as plans assume."""
    return None if trace is None else float(trace.seconds) * 1e3


def measure_overhead(training: Training) -> Figures:
    """Take turns with and without a session that has more room than is needed."""
    device = training.setup.device
    for _ in range(2):
        training.step()
    with_session: list[float] = []
    without: list[float] = []
    for index in range(training.setup.rounds):
        kinds = (False, True) if index % 2 == 0 else (True, False)
        for in_session in kinds:
            scope = session_of(training) if in_session else contextlib.nullcontext()
            with scope as session:
                settle(training, session)
                times = measure.time_steps(training.step, OVERHEAD_STEPS, device)
            median = measure.median_of(times[1:])
            assert median is not None
            (with_session if in_session else without).append(median)
    ratios = [a / b for a, b in zip(with_session, without, strict=True)]
    return {
        "steps_ms": with_session,
        "plain_steps_ms": without,
        "overhead_ratio": measure.median_of(ratios),
        "overhead_spread_ratio": measure.spread_of(ratios),
    }


def run(setup: Setup, probe: Probe | None = None) -> Figures:
    """Return the figures, or why there are none."""
    begin = time.monotonic()
    try:
        figures = train(setup, probe or Probe()) | {"outcome": FINISHED}
    except torch.OutOfMemoryError as error:
        figures = {"outcome": OUT_OF_MEMORY, "error": str(error)}
    except NotInstalledError as error:
        figures = {"outcome": str(error)}
    except ModuleNotFoundError as error:
        figures = {"outcome": f"{error.name} is not installed ({error})"}
    except Exception as error:  # noqa: BLE001 - a row of the table says so, the log the rest
        figures = {"outcome": f"failed: {type(error).__name__}: {error}"}
        sys.excepthook(type(error), error, error.__traceback__)
    return figures | {"seconds": time.monotonic() - begin}


def main(probe: Probe | None = None) -> None:
    """Do what the command line says."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the device is used
    faulthandler.enable()
    # One that is stopped for want of time says in its log where its threads were.
    faulthandler.register(signal.SIGTERM, chain=True)
    text, result = sys.argv[1:]
    figures = run(Setup.load(text), probe)
    gc.collect()
    path = Path(result)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
