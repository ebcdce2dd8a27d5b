"""Integrations without their package: what an import says."""

from __future__ import annotations

import pytest

from swapkit.integrations.opening import require
from tests.support import run_python


def test_package_when_missing_then_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match=r"swapkit\.x needs nowhere, .*: pip install nowhere"):
        require("nowhere", "swapkit.x", "nowhere_else")


def test_package_when_another_serves_as_well_then_its_name() -> None:
    assert require("nowhere", "swapkit.x", "pytest") == "pytest"


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_integration_when_its_package_is_missing_then_import_error(name: str) -> None:
    code = f"""
    import importlib.util
    find = importlib.util.find_spec
    hidden = ("transformers", "lightning", "pytorch_lightning", "accelerate")
    importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)
    try:
        import swapkit.integrations.{name}
    except ImportError as error:
        print(error)
    """
    said = f"swapkit.integrations.{name} needs {name}, which is not installed: pip install {name}\n"
    assert run_python(code) == said
