"""`SwapkitCallback` for the `Trainer` of transformers, and for those of TRL, which derive from it.

import swapkit
from swapkit.integrations.transformers import SwapkitCallback

swapkit.install()                                   # before the model is built
trainer = Trainer(model=model, args=args, callbacks=[SwapkitCallback("10GiB")], ...)
trainer.train()
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from swapkit._runtime.session.life import bind, close_left
from swapkit.errors import Unsupported
from swapkit.integrations.opening import check_options, open_session, require
from swapkit.texts import get_logger
from swapkit.units import show

require("transformers", __name__)

from transformers import PrinterCallback, ProgressCallback, TrainerCallback  # noqa: E402
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from swapkit._runtime.session.session import Session

__all__ = ["SwapkitCallback"]

PREFIX = "swapkit/"
_FLAG = "gradient_checkpointing"  # of modules, in every version
_COSTS = (
    "gradient checkpointing runs every layer twice, and what a layer saves stays on the device "
    "until its backward has ended, whatever the budget"
)
_log = get_logger("settings")


class SwapkitCallback(TrainerCallback):
    """Train inside a memory budget: a session for each `train()` of a `Trainer`.

    The session opens when the optimizer exists, before the first step, and covers evaluation and
    checkpoints during training. It closes when training ends, and when an exception ends it. Call
    `swapkit.install()` before the model is built, or its parameters are outside the budget.

    A session recomputes what it has to. Torch's checkpoint (`gradient_checkpointing=True`, or
    `activation_checkpointing=True`) recomputes every layer, and holds what a layer saves until its
    backward has ended, where no budget can move it. So it is off while the session runs, unless
    `keep_checkpointing` is set. Results have the same bits either way.

    One object may serve several trainers, one after the other. Its methods run on the thread that
    calls `train()`, with no lock held.

    Args:
        limit: bytes, `"10GiB"`, `"80%"` or a fraction of the device's memory.
        keep_checkpointing: leave gradient checkpointing on where it is on.
        log_metrics: add `session.metrics()` to the logs of training steps, so that they arrive at
            TensorBoard, W&B and the other reporters of the trainer, and in `log_history`.
        **options: of `swapkit.budget`, such as `policy=`, `host_limit=` or `disk=`.

    Raises:
        InvalidArgument: an option is unknown, or the limit cannot be parsed.

    Attributes:
        session: the current or latest session; None before the first.
    """

    def __init__(
        self,
        limit: int | float | str,
        *,
        keep_checkpointing: bool = False,
        log_metrics: bool = True,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, limit, options)
        self.session: Session | None = None
        self._limit = limit
        self._keeps_checkpointing = keep_checkpointing
        self._logs_metrics = log_metrics
        self._options = options
        self._opened: _Opened | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show(self._limit)}, session={self.session!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the options: a session belongs to its process."""
        return {**self.__dict__, "session": None, "_opened": None}

    # ---- events of the trainer -------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002 - as transformers calls it
        control: TrainerControl,  # noqa: ARG002
        model: torch.nn.Module | None = None,
        optimizer: object = None,
        **_others: object,
    ) -> None:
        """Open the session.

        Raises:
            Unsupported: the trainer uses DeepSpeed.
            OverBudget: more than the limit is in use already.
        """
        if args.deepspeed:
            raise Unsupported(
                "SwapkitCallback: DeepSpeed places parameters, gradients and states by itself. "
                "Train without `deepspeed=`, with FSDP or on one device"
            )
        self.close()  # of a training that an exception ended
        close_left()
        optimizers = [] if optimizer is None else [optimizer]
        self.session = open_session(self._limit, model, optimizers, self._options)
        self._opened = _Opened(self.session, self._switch_checkpointing(model))
        handler, loop = _find_loop()
        if loop is not None:
            bind(self._opened, loop)
        if handler is not None and self._logs_metrics:
            self._opened.put_back = _put_before_reporters(handler, self)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - as transformers calls it
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **_others: object,
    ) -> None:
        """Add the session's metrics to the logs of a training step, and to those of the end."""
        session = self.session
        if not self._logs_metrics or session is None or not session.is_active or logs is None:
            return
        if "loss" in logs or "train_runtime" in logs:
            metrics = session.metrics(prefix=PREFIX)
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - as transformers calls it
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **_others: object,
    ) -> None:
        """Close the session."""
        self.close()

    def close(self) -> None:
        """Close the session, if one is active. Safe to call twice."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _switch_checkpointing(self, model: torch.nn.Module | None) -> list[torch.nn.Module]:
        """Switch torch's checkpoint off, or say what it costs; return the modules that had it."""
        checkpointed = _list_checkpointed(model)
        if not checkpointed:
            return []
        if self._keeps_checkpointing:
            _log.warning("%s: leave it off, the session recomputes what it has to", _COSTS)
            return []
        _log.warning(
            "%s. It is off while the session runs, which recomputes and swaps what it has to, to "
            "the same bits. Leave it off; SwapkitCallback(..., keep_checkpointing=True) keeps it",
            _COSTS,
        )
        _set_checkpointing(checkpointed, is_on=False)
        return checkpointed


class _Opened:
    """A session, and the modules whose checkpointing is off as long as it runs."""

    def __init__(self, session: Session, checkpointed: list[torch.nn.Module]) -> None:
        self._session = session
        # Also when an exception ends the training, and the trainer and this object are lost.
        self._switch_back = weakref.finalize(self, _set_checkpointing, checkpointed, is_on=True)
        self._switch_back.atexit = False
        self.limit_bytes = session.limit_bytes
        self.put_back: Callable[[], None] | None = None  # restores the order of the callbacks

    @property
    def is_active(self) -> bool:
        return self._session.is_active

    def close(self) -> None:
        """End the session, on any thread."""
        self._switch_back()
        if self.put_back is not None:
            self.put_back()
        self._session.close()


def _list_checkpointed(model: torch.nn.Module | None) -> list[torch.nn.Module]:
    """Return the modules of a model of transformers that torch's checkpoint runs, by their flag."""
    modules = [] if model is None else list(model.modules())
    return [each for each in modules if getattr(each, _FLAG, False) is True]


def _set_checkpointing(modules: list[torch.nn.Module], *, is_on: bool) -> None:
    for module in modules:
        setattr(module, _FLAG, is_on)


class ConsoleFilter(TrainerCallback):
    """Takes the metrics of sessions out of the logs again, before they are printed."""

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - as transformers calls it
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **_others: object,
    ) -> None:
        """Remove the metrics."""
        for name in [name for name in logs or {} if name.startswith(PREFIX)]:
            assert logs is not None
            del logs[name]


def _find_loop() -> tuple[CallbackHandler | None, FrameType | None]:
    """Return the handler that calls this callback, and the trainer's call that called it.

    A trainer passes no reference to itself, so both come from the stack of this thread.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller
    handler: CallbackHandler | None = None
    while frame is not None:
        if frame.f_code.co_name in _HANDLING and _is_handlers(frame):
            handler = frame.f_locals["self"]
        elif handler is not None:
            return handler, frame
        frame = frame.f_back
    return None, None


_HANDLING = ("call_event", "on_train_begin")


def _is_handlers(frame: FrameType) -> bool:
    """Return whether a call is a handler's. It ends soon, so its locals may be read."""
    return isinstance(frame.f_locals.get("self"), CallbackHandler)


def _put_before_reporters(
    handler: CallbackHandler, callback: SwapkitCallback
) -> Callable[[], None]:
    """Let reporters see the metrics, and hide them from callbacks that print to the console.

    Callbacks share one dict of logs, in the order of a list. The list is replaced, not changed: the
    handler is going through it.

    Returns:
        Restores the order. Callbacks that were added meanwhile come last.
    """
    places = {id(each): place for place, each in enumerate(handler.callbacks)}
    others = [each for each in handler.callbacks if each is not callback]
    first = [each for each in others if isinstance(each, DefaultFlowCallback)]
    printers = [each for each in others if isinstance(each, (PrinterCallback, ProgressCallback))]
    rest = [each for each in others if each not in first and each not in printers]
    handler.callbacks = [*first, callback, *rest, ConsoleFilter(), *printers]
    return functools.partial(_put_back, weakref.ref(handler), places)


def _put_back(find_handler: Callable[[], CallbackHandler | None], places: dict[int, int]) -> None:
    handler = find_handler()
    if handler is not None:
        present = [each for each in handler.callbacks if type(each) is not ConsoleFilter]
        handler.callbacks = sorted(present, key=lambda each: places.get(id(each), len(places)))
