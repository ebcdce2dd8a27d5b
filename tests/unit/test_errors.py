"""Every error has the root and the builtin that its description promises."""

from __future__ import annotations

import builtins
import re

import pytest

import swapkit
from swapkit import errors

# "    ├── OverBudget           MemoryError          it would not fit the budget"
TREE = re.findall(r"^[ │]+[├└]── (\w+) +(\w+) +\S", errors.__doc__ or "", flags=re.MULTILINE)
CLASSES = {
    name: item
    for name, item in vars(errors).items()
    if isinstance(item, type) and issubclass(item, BaseException)
}


def test_tree_when_read_then_it_names_every_error_of_the_module() -> None:
    assert {name for name, _ in TREE} | {"SwapkitError", "SwapkitWarning"} == set(CLASSES)


@pytest.mark.parametrize(("name", "builtin"), TREE)
def test_error_when_raised_then_both_root_and_builtin_catch_it(name: str, builtin: str) -> None:
    kind = CLASSES[name]
    assert issubclass(kind, errors.SwapkitError)
    with pytest.raises(getattr(builtins, builtin), match=r"^why$"):
        raise kind("why")


def test_configuration_errors_when_caught_then_as_a_wrong_argument_too() -> None:
    for kind in (errors.WrongType, errors.WrongKey, errors.WrongStage, errors.InvalidPattern):
        with pytest.raises(errors.InvalidArgument):
            raise kind("why")
    assert issubclass(errors.InvalidPattern, re.error)


def test_root_when_looked_up_in_the_package_then_found() -> None:
    assert swapkit.SwapkitError is errors.SwapkitError


def test_root_when_caught_then_torch_and_python_errors_are_not() -> None:
    assert errors.SwapkitError.__mro__[1] is Exception
