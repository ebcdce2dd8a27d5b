"""`budget` for programs of accelerate: a session for all that an `Accelerator` prepared.

import swapkit
from swapkit.integrations.accelerate import budget

swapkit.install()                                   # before the model is built
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with budget("10GiB", accelerator) as session:
    for batch in loader:
        with accelerator.accumulate(model):
            ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit.api.budgets import budget as plain_budget
from swapkit.errors import InvalidArgument, Unsupported
from swapkit.integrations.opening import check_options, require

require("accelerate", __name__)

from accelerate.utils import DistributedType  # noqa: E402

if TYPE_CHECKING:
    from accelerate import Accelerator

    from swapkit._runtime.session.session import Session

__all__ = ["budget"]


def budget(
    limit: int | float | str, accelerator: Accelerator, *, log_every: int = 0, **options: Any
) -> Session:
    """Train what an `Accelerator` has prepared inside a memory budget.

    As `swapkit.budget(limit, model, optimizer)`, which accepts what `prepare` returned, too. This
    function finds the models and optimizers, and can send metrics to the accelerator's trackers. A
    step ends when all prepared optimizers have stepped; gradient accumulation needs nothing.

    Args:
        limit: bytes, `"10GiB"`, `"80%"` or a fraction of the device's memory.
        accelerator: one that has prepared a model.
        log_every: steps between calls of `accelerator.log(session.metrics())`; 0: never.
        **options: of `swapkit.budget`, such as `policy=`, `host_limit=` or `on_step=`.

    Returns:
        The session; enter it once.

    Raises:
        InvalidArgument: the accelerator has prepared no model, or an option is invalid.
        Unsupported: the accelerator uses DeepSpeed or Megatron-LM.
    """
    check_options("budget", limit, options)
    if accelerator.distributed_type in {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}:
        raise Unsupported(
            f"budget: {accelerator.distributed_type.value} places parameters, gradients and states "
            "by itself. Use accelerate with FSDP, data parallelism or one device"
        )
    if log_every < 0:
        raise InvalidArgument(f"log_every={log_every}: expected a number of steps, 0 for never")
    # Accelerate has no public list of what it prepared.
    models = list(accelerator._models)  # noqa: SLF001
    optimizers = list(accelerator._optimizers)  # noqa: SLF001
    if not models:
        raise InvalidArgument(
            "accelerator: it has prepared no model. Call accelerator.prepare(model, ...) first"
        )
    # The container gives names to the parts; it never runs.
    model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    if log_every:
        options["on_step"] = _logging(accelerator, log_every, options.get("on_step"))
    return plain_budget(limit, model, optimizers or None, **options)


def _logging(accelerator: Accelerator, every: int, also: Any) -> Any:  # noqa: ANN401 - on_step
    """Return an `on_step` that logs and calls the user's, on the thread that ends the step."""

    def log(session: Session) -> None:
        steps = session.stats.steps
        if steps % every == 0:
            accelerator.log(session.metrics(), step=steps)
        if also is not None:
            also(session)

    return log
