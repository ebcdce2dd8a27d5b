"""Modules that FSDP2 shards, and whether each frees its gathered weights after forward.

Only modules with a plain setting are listed: True or False. Left out are modules that reshard to
fewer ranks (a number), replicas of shards (HSDP), modules whose backward does not gather, and the
outermost ones, for which FSDP2 itself decides. So are modules that another session has taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed

from swapkit._runtime.torch_compat.internals import (
    NO_TASK,
    fsdp_groups_of,
    fsdp_state_of,
    graph_task,
    is_fsdp_idle,
)

_taken: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # by sessions


class ShardedModule:
    """One module, or several that FSDP2 shards together. On the thread of the steps."""

    def __init__(self, module: torch.nn.Module, paths: tuple[str, ...]) -> None:
        """Look at a module. `paths`: of all modules that are sharded together."""
        self._find = weakref.ref(module)
        groups = _groups_of(module)
        self.paths = paths
        self.process_group: Any = groups[0].mesh_info.shard_process_group
        self.device: torch.device = groups[0].device
        self.frees = _frees(groups[0])  # as the user has set it
        self._set: bool | None = None  # what was set instead

    def set(self, *, frees: bool) -> None:
        """Change the setting of the next forwards."""
        module = self._find()
        if module is None:
            return
        now = _frees(_groups_of(module)[0])
        is_users = self._set is not None and now is not self._set  # changed meanwhile
        if now is not frees and not is_users:
            self._set = frees
            module.set_reshard_after_forward(frees, recurse=False)  # type: ignore[operator]

    def restore(self) -> None:
        """Return to the user's setting, unless the user has changed it meanwhile."""
        module, ours = self._find(), self._set
        self._set = None
        if module is not None and ours is not None and _frees(_groups_of(module)[0]) is ours:
            module.set_reshard_after_forward(self.frees, recurse=False)  # type: ignore[operator]

    def has_any_of(self, parameters: Collection[int]) -> bool:
        """Return whether some of its parameters are among these, given by `id`."""
        module = self._find()
        groups = [] if module is None else _groups_of(module)
        return any(
            id(each.sharded_param) in parameters for group in groups for each in group.fsdp_params
        )

    def release(self) -> None:
        """Free the gathered weights, if no forward or backward is using them."""
        module = self._find()
        if module is None or graph_task() != NO_TASK:
            return
        if all(map(is_fsdp_idle, _groups_of(module))):
            module.reshard()  # type: ignore[operator]

    def take(self) -> None:
        """Keep other sessions away."""
        module = self._find()
        if module is not None:
            _taken.add(module)

    def give(self) -> None:
        """Undo `take`."""
        module = self._find()
        if module is not None:
            _taken.discard(module)


def find_sharded(model: torch.nn.Module | None) -> tuple[ShardedModule, ...]:
    """Return the modules of a model whose setting may change, in the model's order."""
    distributed = torch.distributed
    if model is None or not (distributed.is_available() and distributed.is_initialized()):
        return ()
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}  # by FSDP2's state
    for path, module in _walk(model, FSDPModule):
        state = id(fsdp_state_of(module))
        found.setdefault(state, (module, []))[1].append(path)
    return tuple(
        ShardedModule(module, tuple(paths))
        for module, paths in found.values()
        if _may_change(module)
    )


def _walk(
    module: torch.nn.Module, kind: type, path: str = "", *, is_inside: bool = False
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a kind that are inside of another one, with their paths."""
    if is_inside and isinstance(module, kind):
        yield path, module
    is_inside = is_inside or isinstance(module, kind)
    for name, child in module.named_children():
        yield from _walk(child, kind, f"{path}.{name}" if path else name, is_inside=is_inside)


def _may_change(module: torch.nn.Module) -> bool:
    groups = _groups_of(module)
    return bool(groups) and module not in _taken and all(map(_is_plain, groups))


def _is_plain(group: Any) -> bool:  # noqa: ANN401 - FSDPParamGroup
    mesh = group.mesh_info
    if mesh.shard_mesh_dim is None or mesh.replicate_mesh_dim is not None:
        return False
    is_by_number = group.post_forward_mesh_info not in (None, mesh)
    return not is_by_number and group.unshard_in_backward and mesh.shard_mesh_size > 1


def _frees(group: Any) -> bool:  # noqa: ANN401 - FSDPParamGroup
    return group.post_forward_mesh_info is not None


def _groups_of(module: torch.nn.Module) -> list[Any]:
    return fsdp_groups_of(fsdp_state_of(module))
