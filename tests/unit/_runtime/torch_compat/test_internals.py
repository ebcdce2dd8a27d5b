"""The door to torch's private names: torch has each of them, and nobody uses others."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._runtime.torch_compat import internals

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(swapkit.__file__).parent
DOOR = PACKAGE / "_runtime" / "torch_compat" / "internals.py"
COMPILERS = DOOR.with_name("compilers.py")  # its part that is loaded with the compilers
OPERATORS = "torch.ops."  # whose names may begin with an underscore
# What torch's objects have that nobody but the door looks at.
ATTRIBUTES = {
    *("_cdata", "_base", "_version", "_schema", "_overloadname", "_weak_ref", "_fix_weakref"),
    *("_modules", "_parameters", "_buffers", "_optimizer_step_pre_hooks", "_is_zerotensor"),
    *("_backward_cls", "_forward_cls", "_engine_run_backward", "_local_tensor"),
}


def is_private(name: str) -> bool:
    """Return whether a dotted name has a part that is private, and no part of Python's own."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a file imports of torch: the name there, and torch's in full."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(each.asname or each.name.split(".")[0], each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}."
            found += [(each.asname or each.name, start + each.name) for each in node.names]
    yield from (each for each in found if each[1].split(".")[0] == "torch")


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Yield torch's names in a file, in full, whatever it calls them."""
    known = dict(imports_of(tree))
    yield from known.values()
    known.update((name, name) for name in known if name == "torch")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = dotted(node)
            if parts and parts[0] in known:
                yield ".".join([known[parts[0]], *parts[1:]])
            elif node.attr in ATTRIBUTES and parts[:1] != ["self"]:
                yield f"torch.{node.attr}"


def private_names(source: str) -> set[str]:
    found = {name for name in torch_names(ast.parse(source)) if is_private(name)}
    return {name for name in found if not name.startswith(OPERATORS)}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_file_when_it_is_not_the_door_then_it_uses_no_private_name_of_torch(file: Path) -> None:
    names = private_names(file.read_text())
    if file == DOOR:
        assert len(names) > 40
    elif file == COMPILERS:
        assert len(names) > 5
    else:
        assert names == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._get_tracing_state()",
        "from torch import _C as c\nc.x",
        "from torch._ops import OpOverload",
        "import torch.utils._pytree as pytree",
        "def address(storage):\n    return storage._cdata",
    ],
)
def test_look_when_a_private_name_is_used_then_it_is_found(source: str) -> None:
    assert private_names(source)


@pytest.mark.parametrize("name", internals.__all__)
def test_name_when_asked_of_the_torch_at_hand_then_it_is_there(name: str) -> None:
    assert getattr(internals, name) is not None


def test_attributes_when_read_through_the_door_then_torchs_objects_have_them() -> None:
    tensor = torch.ones(2)
    view = tensor[:1]
    assert internals.base_of(view) is tensor
    assert internals.base_of(tensor) is None
    tensor.add_(1)
    assert internals.version_of(view) == internals.version_of(tensor) == 1
    storage = tensor.untyped_storage()
    assert internals.storage_address(storage) == internals.storage_id(view)
    weak = internals.weak_storage(storage)
    found = internals.storage_from_weak(weak)
    assert found is not None
    assert found.data_ptr() == storage.data_ptr()
    internals.free_weak_storage(weak)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert internals.submodules_of(module) == dict(module.named_children())
    assert internals.parameters_of(module[0]) == dict(module[0].named_parameters())
    assert internals.buffers_of(module[0]) == dict(module[0].named_buffers())
    add = torch.ops.aten.add.Tensor
    assert internals.schema_of(add).name == "aten::add"
    assert internals.overload_of(add) == "Tensor"
    assert not internals.is_zero_tensor(tensor)
    assert not internals.is_cow(tensor)
    optimizer = torch.optim.SGD([torch.nn.Parameter(tensor)])
    assert not internals.step_pre_hooks_of(optimizer)


def test_modules_when_called_then_by_the_code_that_the_door_names() -> None:
    seen = []

    class Seeing(torch.nn.Module):
        def forward(self) -> None:
            frame = inspect.currentframe()
            while frame is not None:
                seen.append(frame.f_code)
                frame = frame.f_back

    Seeing()()
    assert internals.MODULE_CALL in seen
    assert seen.index(internals.AROUND_MODULE_CALL) > seen.index(internals.MODULE_CALL)
    for torchs, tables in (
        (internals.module_hooks, internals.MODULE_HOOK_TABLES),
        (internals.optimizer_hooks, internals.OPTIMIZER_HOOK_TABLES),
    ):
        assert all(isinstance(getattr(torchs, table), dict) for table in tables)
    assert callable(getattr(torch.autograd, internals.ENGINE_CALL))
