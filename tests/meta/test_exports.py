"""The public names: these and no others, documented, typed, and shadowed by no module."""

from __future__ import annotations

import importlib
import inspect
from types import FunctionType

import pytest

import swapkit
from tests.meta.sources import ROOT

PUBLIC_NAMES = {
    "SwapkitError",
    "adapt_mem_func_wrapper",
    "add_arguments",
    "budget",
    "checkpoint",
    "choices",
    "configure",
    "estimate",
    "from_arguments",
    "include_path",
    "install",
    "keep",
    "library_path",
    "memory_stats",
    "memory_summary",
    "offload",
    "op",
    "plan",
    "record",
    "reset_peak_memory_stats",
    "sessions",
    "simulate",
    "uninstall",
}
MOST_NAMES = 23


def test_names_when_listed_then_these_and_sorted() -> None:
    assert set(swapkit.__all__) == PUBLIC_NAMES
    assert list(swapkit.__all__) == sorted(swapkit.__all__)
    assert len(swapkit.__all__) <= MOST_NAMES
    assert set(dir(swapkit)) >= PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_name_when_imported_then_documented(name: str) -> None:
    public = getattr(swapkit, name)
    assert public.__doc__, f"{name} has no docstring"
    assert public.__doc__.strip()


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_name_when_inspected_then_fully_annotated(name: str) -> None:
    public = getattr(swapkit, name)
    function = public.__init__ if inspect.isclass(public) else public
    if not isinstance(function, FunctionType):
        return  # an exception with its builtin's constructor
    bare = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation is parameter.empty and parameter.name != "self"
    ]
    assert not bare, f"{name}: no annotation for {bare}"
    assert "return" in function.__annotations__


def test_errors_when_public_then_one_root() -> None:
    classes = [getattr(swapkit, name) for name in PUBLIC_NAMES if name[0].isupper()]
    assert all(issubclass(error, swapkit.SwapkitError) for error in classes)


def test_modules_when_named_then_none_like_a_public_name() -> None:
    modules = {path.stem for path in (ROOT / "swapkit").rglob("*.py")}
    packages = {path.parent.name for path in (ROOT / "swapkit").rglob("__init__.py")}
    assert not PUBLIC_NAMES & (modules | packages)


def test_unknown_name_when_asked_for_then_attribute_error() -> None:
    module = importlib.import_module("swapkit")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
