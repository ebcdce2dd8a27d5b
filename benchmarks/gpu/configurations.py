"""The ways to train that are compared: what each installs, and what it puts around forward.

A `Setup` says everything that one process does; `prepare` makes it so. New ways are one function
and one line in `METHODS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import checkpoint as checkpoints

from benchmarks.gpu.measure import is_cuda
from benchmarks.gpu.reference import SwapReference

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from benchmarks.gpu.llama import Llama

    Scope = Callable[[], AbstractContextManager[object]]

LIBRARIES = {
    "torchtune": "torchtune.training._activation_offloading",
    "trl": "trl.models.activation_offloading",
}
LEAST_BYTES = 1024
ATEN = torch.ops.aten
# What selective recompute keeps: the results of matrix products and of attention.
KEPT = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


class NotInstalledError(Exception):
    """A library that a way to train needs is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training process."""

    shape: str  # of `llama.SHAPES`
    method: str  # of `METHODS`
    device: str
    limit_bytes: int = 0  # of swapkit's session; 0: no session
    policy: str = "auto"  # of that session
    prefetch: int = 0  # 0: none
    offload: bool = False  # whether swapkit swaps everything
    layers: int = 0  # of the shape that are trained; 0: all
    memory_bytes: int = 0  # of a virtual device; 0: as much as the machine has
    native: bool = False  # whether torch's own allocator stays below swapkit
    share: float = 1.0  # of the activations that compiled code may save
    backend: str = ""  # that compiles the whole model; none: eager code
    digest_steps: int = 2
    warmup_steps: int = 2
    timed_steps: int = 8
    rounds: int = 8  # of what takes turns with something else

    def dump(self) -> str:
        """Return it as text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def load(text: str) -> Setup:
        """Return what `dump` made a text of."""
        return Setup(**json.loads(text))

    @property
    def has_pool(self) -> bool:
        """Whether the allocator below torch is swapkit's."""
        return self.method in SWAPKIT_METHODS and not self.native


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What is put around the forward pass, and what takes the place of ordinary parts."""

    scope: Scope = contextlib.nullcontext
    same_bits: bool = True  # compiled code may add in another order
    make_optimizer: Callable[[], torch.optim.Optimizer] | None = None  # None: AdamW
    # Forward and backward; returns the loss. None: those of an ordinary loop.
    run: Callable[[torch.Tensor], torch.Tensor] | None = None


def install(setup: Setup) -> None:
    """Do what has to be done before the device is used."""
    if setup.method not in SWAPKIT_METHODS:
        return
    import swapkit

    if setup.native:
        install_natively = cast("Callable[..., None]", swapkit.install)
        install_natively(device=setup.device, allocator="torch")
    else:
        swapkit.install(device=setup.device)


def prepare(setup: Setup, model: torch.nn.Module) -> Method:
    """Change the model as the method does, and return what goes around its forward pass.

    Raises:
        NotInstalledError: its library is missing.
    """
    return METHODS[setup.method](setup, model)


def plain(_setup: Setup, _model: torch.nn.Module) -> Method:
    return Method()


def recompute(_setup: Setup, model: torch.nn.Module) -> Method:
    if hasattr(model, "gradient_checkpointing_enable"):
        enable = cast("Callable[..., None]", model.gradient_checkpointing_enable)
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        run = partial(checkpoints.checkpoint, use_reentrant=False)
        as_stack(model).run_block = run
    return Method()


def selective(_setup: Setup, model: torch.nn.Module) -> Method:
    kept: list[Any] = [getattr(ATEN, name).default for name in KEPT if hasattr(ATEN, name)]
    contexts = partial(checkpoints.create_selective_checkpoint_contexts, kept)
    run = partial(checkpoints.checkpoint, use_reentrant=False, context_fn=contexts)
    as_stack(model).run_block = run
    return Method()


def save_on_cpu(setup: Setup, _model: torch.nn.Module) -> Method:
    pinned = is_cuda(setup.device)
    return Method(scope=partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned))


def recompute_in_save_on_cpu(setup: Setup, model: torch.nn.Module) -> Method:
    recompute(setup, model)
    return save_on_cpu(setup, model)


def reference(_setup: Setup, model: torch.nn.Module) -> Method:
    return Method(scope=lambda: SwapReference([*model.parameters(), *model.buffers()]))


def library(name: str, _setup: Setup, model: torch.nn.Module) -> Method:
    """Use another library's manager, with its own defaults, pinned memory and streams."""
    try:
        manager = importlib.import_module(LIBRARIES[name]).OffloadActivations
    except ImportError as error:
        raise NotInstalledError(f"{name} is not installed ({error})") from None

    def scope() -> AbstractContextManager[object]:
        hooks = manager(use_pin_memory=True, use_streams=True, min_offload_size=LEAST_BYTES)
        if hasattr(hooks, "update_model_params"):  # so that it knows what not to move
            hooks.update_model_params(model)
        return cast("AbstractContextManager[object]", hooks)

    return Method(scope=scope)


def fsdp2_offload(_setup: Setup, model: torch.nn.Module) -> Method:
    """Keep weights, gradients and states on the host, on one rank."""
    from torch.distributed import HashStore, init_process_group  # type: ignore[attr-defined]
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    init_process_group("fake", rank=0, world_size=1, store=HashStore())
    for block in (*as_stack(model).blocks, model):
        fully_shard(block, offload_policy=CPUOffloadPolicy())
    return Method()


def fsdp2_recompute(setup: Setup, model: torch.nn.Module) -> Method:
    recompute(setup, model)
    return fsdp2_offload(setup, model)


def torchao_offload(_setup: Setup, model: torch.nn.Module) -> Method:
    """Keep the optimizer's states on the host, and step there."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    make = partial(CPUOffloadOptimizer, model.parameters(), torch.optim.AdamW, fused=True, lr=1e-4)
    return Method(make_optimizer=make)


def ramtorch(setup: Setup, model: torch.nn.Module) -> Method:
    """Keep everything on the host, and stream a window of layers."""
    from ramtorch import OffloadModel  # type: ignore[import-not-found]

    stack = as_stack(model.cpu())
    chunks = [stack.embedding, *stack.blocks, torch.nn.Sequential(stack.norm, stack.head)]
    options = {"window": 2, "keep_activations": True, "offload_activations": True}
    offloaded = OffloadModel(chunks, device=setup.device, **options)

    def find_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        kept = logits[:, :-1].float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(kept, tokens[:, 1:].flatten())

    def run(tokens: torch.Tensor) -> torch.Tensor:
        result: Any = offloaded.step(tokens, targets=tokens, loss_fn=find_loss)
        offloaded.flush_grads()
        loss: torch.Tensor = result.loss
        return loss

    trained = [each for each in offloaded.parameters() if each.requires_grad]
    make = partial(torch.optim.AdamW, trained, fused=True, lr=1e-4)
    return Method(run=run, make_optimizer=make)


def compiled(setup: Setup, model: torch.nn.Module) -> Method:
    """Compile each block, which may save a share of what it would save for backward."""
    config: Any = importlib.import_module("torch._functorch.config")
    config.activation_memory_budget = setup.share
    for block in as_stack(model).blocks:
        block.compile(dynamic=False)
    return Method(same_bits=False)


def swapped(setup: Setup, _model: torch.nn.Module) -> Method:
    """Leave it to the session, or swap everything."""
    import swapkit

    if not setup.offload:
        return Method()
    return Method(scope=partial(swapkit.offload, prefetch=setup.prefetch or None))


def as_stack(model: torch.nn.Module) -> Llama:
    return cast("Llama", model)


METHODS: dict[str, Callable[[Setup, torch.nn.Module], Method]] = {
    "plain": plain,
    "recompute": recompute,
    "selective": selective,
    "save_on_cpu": save_on_cpu,
    "recompute_in_save_on_cpu": recompute_in_save_on_cpu,
    "reference": reference,
    "torchtune": partial(library, "torchtune"),
    "trl": partial(library, "trl"),
    "fsdp2_offload": fsdp2_offload,
    "fsdp2_recompute": fsdp2_recompute,
    "torchao_offload": torchao_offload,
    "ramtorch": ramtorch,
    "compile": compiled,
    "swapkit": swapped,
    "overhead": swapped,
}
MOVES_WEIGHTS = ("swapkit", "fsdp2_offload", "fsdp2_recompute", "ramtorch")  # of frozen models
SWAPKIT_METHODS = ("swapkit", "overhead")
