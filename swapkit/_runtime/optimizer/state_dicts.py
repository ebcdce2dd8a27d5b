"""State dicts of optimizers whose states are on the host.

A plain state on the host is a CPU tensor, and needs no help. A DTensor whose shard is on the host
still reports the device of its mesh (`state_slots.py`). Code that moves it there, such as
`torch.distributed.checkpoint` for full state dicts, would not move the shard. So a state dict has
another DTensor of the same shard that reports the CPU, as the states of FSDP2's `CPUOffloadPolicy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapkit._runtime.optimizer.state_slots import is_sharded, local_part

if TYPE_CHECKING:
    import torch

StateDict = dict[str, Any]


def report_places(_optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Replace DTensors that report another device than their shard's: a state dict's post-hook.

    The optimizer's own states are unchanged. A shard is shared, not copied.
    """
    states = state_dict["state"]
    if not any(map(_misreports, _values_of(states))):
        return state_dict
    return {**state_dict, "state": {key: _report(state) for key, state in states.items()}}


def _values_of(states: dict[object, object]) -> list[object]:
    dicts = [state for state in states.values() if isinstance(state, dict)]
    return [value for state in dicts for value in state.values()]


def _misreports(value: Any) -> bool:  # noqa: ANN401 - a tensor or another value
    return is_sharded(value) and value.device != local_part(value).device


def _report(value: Any) -> Any:  # noqa: ANN401 - of the same kind
    if isinstance(value, dict):
        return {key: _report(each) for key, each in value.items()}
    if not _misreports(value):
        return value
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())
