"""A list of a model's parts is one model whose parts are called."""

from __future__ import annotations

import pytest
from torch import nn

from swapkit._runtime.model.tracker import (
    ModelParts,
    find_called,
    gather_parts,
    parts_of,
    runs,
)
from swapkit.errors import InvalidArgument


def make_part() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_parts_when_given_as_a_list_then_one_module_names_them_and_they_do_not_know() -> None:
    parts = [make_part(), make_part()]
    before = [sorted(vars(module)) for part in parts for module in part.modules()]
    whole = gather_parts(tuple(parts))
    assert isinstance(whole, ModelParts)
    assert list(whole.children()) == parts
    assert "1.0" in dict(whole.named_modules())
    assert [sorted(vars(module)) for part in parts for module in part.modules()] == before


def test_parts_when_there_is_one_then_it_is_the_model() -> None:
    part = make_part()
    assert gather_parts([part]) is gather_parts(part) is part
    assert gather_parts(None) is None


def twice() -> object:
    part = make_part()
    return [part, part]


def nested() -> object:
    part = make_part()
    return [part[0], part]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (3, "expected a torch.nn.Module, or a list"),
        ([], "expected a torch.nn.Module, or a list"),
        ([make_part(), 3], "expected a torch.nn.Module, or a list"),
        (twice(), "part 0 is inside part 1. Pass each part once"),
        (nested(), "part 0 is inside part 1. Pass each part once"),
    ],
    ids=["number", "empty", "mixed", "twice", "nested"],
)
def test_parts_when_they_are_no_model_then_they_are_refused(given: object, why: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"model=.*{why}"):
        gather_parts(given)


def test_call_when_it_is_of_a_part_then_that_is_found() -> None:
    parts = [make_part(), make_part()]
    whole = gather_parts(parts)
    assert find_called(parts[1], whole) is parts[1]
    assert find_called(parts[1][0], whole) is None
    assert find_called(parts[1], None) is None
    assert find_called(parts[1], parts[0]) is None
    assert find_called(parts[0], parts[0]) is parts[0]


class OptimizedModule(nn.Module):
    """Stands for what `torch.compile` makes of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_call_when_a_part_is_compiled_then_it_is_found() -> None:
    parts = [make_part(), make_part()]
    compiled = OptimizedModule(parts[1])
    assert find_called(compiled, gather_parts(parts)) is parts[1]
    assert find_called(compiled, parts[1]) is parts[1]


def test_parts_when_a_model_has_no_forward_then_they_are_its_elements() -> None:
    part, other = make_part(), make_part()
    whole = nn.ModuleList([nn.ModuleDict({"a": part}), other])
    assert not runs(whole)
    assert list(parts_of(whole)) == [part, other]
    assert list(parts_of(part)) == [part]
    assert find_called(part, whole) is part
