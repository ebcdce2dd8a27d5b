"""Bytes that activation offloading copies out, relative to the distinct saved bytes.

One forward and backward pass of the demo's Llama-style model, in fp32 and under bf16 autocast. A
saved tensor hook in this file counts each storage at each version once, without parameters, buffers
and the copies of weights that autocast makes and keeps. `swapkit.offload()` should copy exactly
these bytes. For comparison, the bytes that other libraries copy on the same model:

- torchtune and TRL: bytes of the copies that their managers' pack hooks make, over the simulated
  GPU of `tests/conformance/rivals.py`; installed by `pip install '.[rivals]'`;
- save_on_cpu: bytes of every saved tensor, all of which it copies on a device.

A ratio above 1: storages are copied more than once, or weights are copied. Below 1: some movable
storages stay on the device, such as those that TRL treats as duplicates. Storages below 1024 bytes
stay in all of them but save_on_cpu, and are not counted.
`--json FILE` writes one flat object: `fp32_distinct_bytes`, `fp32_swapkit_bytes`,
`fp32_swapkit_ratio`, ..., `bf16_save_on_cpu_ratio`; null where a library is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._runtime.process.runtime import get_runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also for the GPU in tests/

from examples.language_model import SIZES, LanguageModel, next_byte_loss

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Scope = AbstractContextManager[object]

LEAST_BYTES = 1024
COPY = torch.ops.aten.copy_.default
TO_COPY = torch.ops.aten._to_copy.default  # noqa: SLF001
PRECISIONS = ("fp32", "bf16")
LIBRARIES = {
    "torchtune": "torchtune.training._activation_offloading",
    "TRL": "trl.models.activation_offloading",
}
ABSENT = "not installed"


class Training:
    """The model, and one pass over it."""

    def __init__(self, size: str) -> None:
        shape = SIZES[size]
        torch.manual_seed(0)
        self.model = LanguageModel(shape)
        self.windows = torch.randint(256, (shape.batch, shape.tokens + 1))

    def run(self, precision: str, scope: Scope, *, between: Callable[[], object]) -> None:
        """Run forward inside `scope`, call `between`, run backward."""
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with autocast, scope:
            loss = next_byte_loss(self.model, self.windows)
        between()
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def state_storages(self) -> set[int]:
        """Return the storages of parameters and buffers."""
        states = [*self.model.parameters(), *self.model.buffers()]
        return {storage_of(state) for state in states}


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage object."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


class WeightCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that collects the copies of weights that autocast makes."""

    def __init__(self, states: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states
        self.copies: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result: Any = func(*args, **(kwargs or {}))
        if func is TO_COPY and storage_of(args[0]) in self._states:
            self.copies.append(result)
        return result


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func in {COPY, TO_COPY}:
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def count_saved(training: Training, precision: str) -> tuple[int, int]:
    """Return the distinct saved bytes, and the total bytes of all saved tensors."""
    states = training.state_storages()
    casts = WeightCasts(states)
    storages: dict[tuple[int, int], int] = {}
    kept: list[torch.Tensor] = []  # keep tensors alive so that no address is reused
    all_bytes = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal all_bytes
        all_bytes += tensor.nbytes
        kept.append(tensor.detach())
        key = (storage_of(tensor), tensor._version)  # noqa: SLF001
        storages[key] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with casts:
        training.run(precision, hooks, between=lambda: None)
    states |= {storage_of(copy) for copy in casts.copies}
    distinct = {key: nbytes for key, nbytes in storages.items() if key[0] not in states}
    return sum(nbytes for nbytes in distinct.values() if nbytes >= LEAST_BYTES), all_bytes


def count_swapkit(training: Training, precision: str) -> int:
    """Return the bytes that `swapkit.offload()` copies to the host."""
    scheduler = get_runtime().default_swapper(get_runtime().cpu).scheduler
    before = scheduler.stats().copied_out_bytes
    training.run(precision, swapkit.offload(), between=scheduler.drain)
    return scheduler.stats().copied_out_bytes - before


def count_manager(training: Training, precision: str, module: str, *, streams: bool) -> int | None:
    """Return the bytes that a library's manager copies when packing; None: not installed."""
    rivals: Any = import_module("tests.conformance.rivals")
    manager = rivals.manager_of(module)
    if manager is None:
        return None
    with rivals.gpu_in_sight():
        hooks = manager(use_pin_memory=False, use_streams=streams, min_offload_size=LEAST_BYTES)
    if hasattr(hooks, "update_model_params"):  # it must not move parameters
        hooks.update_model_params(training.model)
    copies = Copies()
    pack = hooks.pack_hook

    def counted(tensor: torch.Tensor) -> object:
        with copies:
            return pack(tensor)

    hooks.pack_hook = counted
    with rivals.gpu_in_use(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.run(precision, hooks, between=lambda: None)
    return copies.nbytes


def measure(training: Training) -> dict[str, int | float | None]:
    figures: dict[str, int | float | None] = {}
    for precision in PRECISIONS:
        distinct, everything = count_saved(training, precision)
        counts: dict[str, int | None] = {"swapkit": count_swapkit(training, precision)}
        for name, module in LIBRARIES.items():
            for streams in (True, False):
                key = name if streams else f"{name}_one_stream"
                counts[key] = count_manager(training, precision, module, streams=streams)
        counts["save_on_cpu"] = everything
        figures[f"{precision}_distinct_bytes"] = distinct
        for key, count in counts.items():
            figures[f"{precision}_{key}_bytes"] = count
            figures[f"{precision}_{key}_ratio"] = None if count is None else count / distinct
    return figures


def print_table(figures: dict[str, int | float | None], size: str) -> None:
    print(
        f"Bytes copied to the host in one forward pass ({size} model); ratio to the distinct ones"
    )
    print(f"{'':24}" + "".join(f"{name + ', MiB':>14}{'ratio':>8}" for name in PRECISIONS))
    names = [key[5:-6] for key in figures if key.startswith("fp32_") and key.endswith("_bytes")]
    for name in names:
        line = f"{name.replace('_', ' ') if name != 'save_on_cpu' else name:24}"
        for precision in PRECISIONS:
            count = figures[f"{precision}_{name}_bytes"]
            ratio = figures.get(f"{precision}_{name}_ratio")
            if count is None:
                line += f"{ABSENT:>22}"
            else:
                line += f"{count / 2**20:14.3f}" + (f"{ratio:8.3f}" if ratio else f"{'':8}")
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny", help="size of the model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    swapkit.install(device="cpu")
    figures = measure(Training(options.size))
    print_table(figures, options.size)
    equal = all(figures[f"{p}_swapkit_bytes"] == figures[f"{p}_distinct_bytes"] for p in PRECISIONS)
    print(f"Goal (swapkit copies exactly the distinct bytes): {'reached' if equal else 'missed'}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
