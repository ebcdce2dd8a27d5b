"""`SwapkitCallback` for the `Trainer` of Lightning, from `lightning` or from `pytorch_lightning`.

import swapkit
from swapkit.integrations.lightning import SwapkitCallback

swapkit.install()                                   # before the module is built
trainer = L.Trainer(callbacks=[SwapkitCallback("10GiB")])
trainer.fit(module, data)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from swapkit._runtime.session.life import bind, close_left
from swapkit.errors import Unsupported
from swapkit.integrations.opening import check_options, open_session, require
from swapkit.units import show

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _find_base() -> type:
    """Return the class of callbacks of the package that the program has imported, or of both.

    Both packages hold the same code. A trainer accepts callbacks of its own package, only.
    Importing a package that the program does not use would cost seconds.
    """
    usual = require("lightning", __name__, "pytorch_lightning")
    imported = [module for module in _PACKAGES.values() if module in sys.modules]
    if not imported:
        imported = [_PACKAGES[usual]]
    bases = [importlib.import_module(f"{module}.callbacks").Callback for module in imported]
    return bases[0] if len(bases) == 1 else type("Callback", tuple(bases), {})


if TYPE_CHECKING:
    from types import FrameType

    import torch
    from lightning.pytorch.callbacks import Callback

    from swapkit._runtime.session.session import Session

else:
    Callback = _find_base()

__all__ = ["SwapkitCallback"]


class SwapkitCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Train inside a memory budget: a session for each run of a `Trainer`.

    `fit` runs in a session from before the sanity check to its end. It makes plans for the training
    step, with any number of optimizers, also in manual optimization, where a step of the session
    ends when each optimizer has stepped. `validate`, `test` and `predict` save no tensors for
    backward, so there the budget is a limit only. An exception closes the session, too. Call
    `swapkit.install()` before the module is built, or its parameters are outside the budget.

    `session.metrics()` goes to the trainer's loggers every `log_every_n_steps` steps. The methods
    run on the thread that calls the trainer, with no lock held.

    Args:
        limit: bytes, `"10GiB"`, `"80%"` or a fraction of the device's memory.
        log_metrics: send the metrics to the trainer's loggers.
        **options: of `swapkit.budget`, such as `policy=`, `host_limit=` or `disk=`.

    Raises:
        InvalidArgument: an option is unknown, or the limit cannot be parsed.

    Attributes:
        session: the current or latest session; None before the first.
    """

    def __init__(
        self, limit: int | float | str, *, log_metrics: bool = True, **options: Any
    ) -> None:
        check_options(type(self).__name__, limit, options)
        self.session: Session | None = None
        self._limit = limit
        self._logs_metrics = log_metrics
        self._options = options
        self._place = 0  # among the trainer's callbacks, outside of its runs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show(self._limit)}, session={self.session!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the options: a session belongs to its process."""
        return {**self.__dict__, "session": None}

    # ---- beginnings ------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: torch.nn.Module, stage: str) -> None:  # noqa: ANN401, ARG002
        """Move to the front for this run.

        Lightning's tuning callbacks train in their `on_fit_start`, and must find the session open.
        """
        self._place = trainer.callbacks.index(self)
        self._put(trainer, 0)

    def _put(self, trainer: Any, place: int) -> None:  # noqa: ANN401 - of either package
        """Move to a place among the callbacks. In a new list: the trainer goes through this one."""
        others = [each for each in trainer.callbacks if each is not self]
        trainer.callbacks = [*others[:place], self, *others[place:]]

    def on_fit_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:  # noqa: ANN401 - of either package
        """Open the session: the optimizers exist, and the module is on its device.

        Raises:
            Unsupported: the trainer uses DeepSpeed.
            OverBudget: more than the limit is in use already.
        """
        if type(trainer.strategy).__name__ == "DeepSpeedStrategy":
            raise Unsupported(
                "SwapkitCallback: DeepSpeed places parameters, gradients and states by itself. Use "
                "another strategy, such as FSDP, or one device"
            )
        self._open(trainer, pl_module, list(trainer.optimizers), self._options)

    def on_validation_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:  # noqa: ANN401
        """Open a session, unless this belongs to `fit`."""
        self._open_limit(trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:  # noqa: ANN401
        """Open a session."""
        self._open_limit(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:  # noqa: ANN401
        """Open a session."""
        self._open_limit(trainer, pl_module)

    def _open_limit(self, trainer: Any, module: torch.nn.Module) -> None:  # noqa: ANN401
        """Open a session for a run without optimizers, which needs no plan."""
        if self.session is None or not self.session.is_active:
            unplanned = {key: each for key, each in self._options.items() if key != "plan"}
            self._open(trainer, module, [], {**unplanned, "policy": "rescue"})

    def _open(
        self,
        trainer: Any,  # noqa: ANN401 - of either package
        module: torch.nn.Module,
        optimizers: list[object],
        options: dict[str, Any],
    ) -> None:
        self.close()  # the trainer was stopped by force
        close_left()
        self.session = open_session(self._limit, module, optimizers, options)
        run = _find_run(trainer)
        if run is not None:  # a tuning callback that fails leaves a trainer without callbacks
            bind(self.session, run)

    # ---- steps -----------------------------------------------------------------------------------

    def on_train_batch_end(
        self,
        trainer: Any,  # noqa: ANN401 - of either package
        pl_module: torch.nn.Module,  # noqa: ARG002 - as Lightning calls it
        outputs: object,  # noqa: ARG002
        batch: object,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Log the session's metrics where the trainer logs."""
        session, every = self.session, trainer.log_every_n_steps
        if not self._logs_metrics or session is None or not session.is_active or not every:
            return
        # The steps of the trainer's own logs, as Lightning's callbacks read them: `global_step`
        # counts the steps of all optimizers.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
        if (step + 1) % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(session.metrics(), step=step)

    # ---- ends ------------------------------------------------------------------------------------

    def on_exception(
        self,
        trainer: Any,  # noqa: ANN401 - of either package
        pl_module: torch.nn.Module,  # noqa: ARG002 - as Lightning calls it
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """Close the session."""
        self._end(trainer)

    def teardown(self, trainer: Any, pl_module: torch.nn.Module, stage: str) -> None:  # noqa: ANN401, ARG002
        """Close the session."""
        self._end(trainer)

    def _end(self, trainer: Any) -> None:  # noqa: ANN401 - of either package
        """Close the session; move back to where the trainer had this callback."""
        self.close()
        if self in trainer.callbacks:
            self._put(trainer, self._place)

    def close(self) -> None:
        """Close the session, if one is active. Safe to call twice."""
        if self.session is not None:
            self.session.close()


def _find_run(trainer: Any) -> FrameType | None:  # noqa: ANN401 - of either package
    """Return the trainer's method that runs the loop, from the stack of this thread."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller
    while frame is not None and not _runs(frame, trainer):
        frame = frame.f_back
    return frame


def _runs(frame: FrameType, trainer: Any) -> bool:  # noqa: ANN401 - of either package
    # Locals that were looked at stay alive as long as the call: look at those of one method only.
    return frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer
