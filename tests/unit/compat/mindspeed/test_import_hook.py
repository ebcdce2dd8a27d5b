"""The original import paths, answered while the module is installed, whatever else is."""

from __future__ import annotations

import argparse
import importlib
import pickle
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import swapkit
from swapkit.compat import mindspeed
from swapkit.config import flags, smart_swap
from swapkit.config.smart_swap import SwapPolicyPref, read_smart_swap
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FUNCTION = "mindspeed.core.memory.adaptive_memory.adaptive_memory_function"
LAYERS = "mindspeed.core.memory.adaptive_recomputing.adaptive_recompute"


def forget_mindspeed() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspeed"]:
        del sys.modules[name]


@pytest.fixture
def _installed() -> Iterator[None]:
    mindspeed.install()
    yield
    mindspeed.uninstall()
    forget_mindspeed()


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for an installed original, which the finder knows nothing of."""
    folder = tmp_path / "mindspeed" / "core" / "memory" / "adaptive_memory"
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:3]):
        (package / "__init__.py").touch()
    (folder / "adaptive_memory_function.py").write_text("adapt_mem_func_wrapper = 'original'\n")
    (folder / "adaptive_memory_cache.py").write_text("kept = 'original'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mindspeed.uninstall()
    forget_mindspeed()
    yield folder
    mindspeed.uninstall()
    forget_mindspeed()
    importlib.invalidate_caches()


@pytest.mark.usefixtures("_installed")
@pytest.mark.promise("D7")
def test_wrapper_when_imported_by_its_original_path_then_swapkits_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(swapkit), "adapt_mem_func_wrapper", print)
    namespace: dict[str, Any] = {}
    exec(f"from {FUNCTION} import adapt_mem_func_wrapper", namespace)
    assert namespace["adapt_mem_func_wrapper"] is print
    assert importlib.import_module(FUNCTION).adapt_mem_func_wrapper is print


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("path", sorted(mindspeed.MODULES))
def test_module_when_imported_then_it_lists_and_answers_its_names(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(swapkit), "adapt_mem_func_wrapper", print)
    module = importlib.import_module(path)
    assert dir(module) == sorted(mindspeed.MODULES[path])
    assert all(getattr(module, name) is not None for name in dir(module))


@pytest.mark.usefixtures("_installed")
@pytest.mark.promise("C10")
def test_policy_when_edited_as_in_the_original_then_read_with_the_edits() -> None:
    from mindspeed.core.memory.smart_swap.swap_policy_config import (  # type: ignore[import-not-found]
        SwapPolicyConfig,
        swap_policy_config,
    )
    from mindspeed.core.memory.smart_swap.swap_policy_config import (
        SwapPolicyPref as Preference,
    )

    assert swap_policy_config is mindspeed.swap_policy_config
    mine = SwapPolicyConfig()
    mine.policy_pref = Preference.BETTER_MEMORY_SAVING
    mine.swap_bucket_size = 0
    config = read_smart_swap(mine)
    assert config.policy_pref is SwapPolicyPref.BETTER_MEMORY_SAVING
    assert config.moves_optimizer
    assert config.bucket_bytes == 0
    assert "'swap_bucket_size': 0" in str(mine)
    assert read_smart_swap(swap_policy_config) == read_smart_swap()


@pytest.mark.usefixtures("_installed")
@pytest.mark.promise("F1")
@pytest.mark.parametrize(
    ("name", "value"), [("num_attn_layers_per_stage", 3), ("swap_bucket_size", -1)]
)
def test_policy_when_edited_and_the_flag_is_given_then_the_edits_count(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smart_swap, "swap_policy_config", smart_swap.SwapPolicyConfig())
    monkeypatch.setattr(flags, "swap_policy_config", smart_swap.swap_policy_config)
    parser = flags.add_arguments(argparse.ArgumentParser())
    before = flags.from_arguments(parser.parse_args(["--smart-swap"]))
    setattr(smart_swap.swap_policy_config, name, value)
    after = flags.from_arguments(parser.parse_args(["--smart-swap"]))
    assert before.smart_swap is not None
    assert after.smart_swap is not None
    assert not before.smart_swap.has_stages
    assert after.smart_swap.has_stages
    assert getattr(after.smart_swap, name) == value
    assert flags.from_arguments(parser.parse_args([])).smart_swap is None


@pytest.mark.usefixtures("_installed")
def test_layer_class_when_registered_then_accepted_and_nothing_happens() -> None:
    module = importlib.import_module(LAYERS)
    module.allowed_recomputing_module_wrapper(int)
    with pytest.raises(InvalidArgument, match="3: expected a module class"):
        module.allowed_recomputing_module_wrapper(3)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        (
            f"from {FUNCTION} import FunctionProfilingWrapper",
            "it has adapt_mem_func_wrapper. Train",
        ),
        (
            "import mindspeed.megatron_adaptor",
            r"Swapkit does not patch frameworks: .*swapkit.install",
        ),
        (
            "from mindspeed.core.memory.smart_swap.swap_engine import SwapEngine",
            "policy='swap'",
        ),
        (
            "import mindspeed.core.memory.memory_fragmentation.memory_recorder",
            "pool has no recorder",
        ),
        ("import mindspeed.no_such_module", "swapkit has no mindspeed.no_such_module. Train"),
    ],
)
def test_name_when_it_has_no_counterpart_then_the_error_says_what_to_use(
    statement: str, advice: str
) -> None:
    with pytest.raises(ImportError, match=advice):
        exec(statement, {})


@pytest.mark.usefixtures("_installed")
def test_module_when_python_looks_for_what_it_may_lack_then_attribute_error() -> None:
    module = importlib.import_module(FUNCTION)
    assert not hasattr(module, "__wrapped__")
    assert not hasattr(module, "FunctionProfilingWrapper")
    with pytest.raises(AttributeError, match=r"it has adapt_mem_func_wrapper\. Train"):
        module.FunctionProfilingWrapper  # noqa: B018 - raises


@pytest.mark.usefixtures("_installed")
def test_modules_when_pickle_searches_them_for_a_name_then_they_are_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def somewhere() -> None:
        """Pickle searches all modules for a function that does not name its own."""

    for path in mindspeed.MODULES:
        importlib.import_module(path)
    last = ModuleType("last_of_all")
    vars(last)["somewhere"] = somewhere
    monkeypatch.setitem(sys.modules, last.__name__, last)
    monkeypatch.setattr(somewhere, "__module__", None)
    monkeypatch.setattr(somewhere, "__qualname__", "somewhere")
    assert pickle.loads(pickle.dumps(somewhere)) is somewhere


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("path", sorted(mindspeed.MODULES))
def test_module_when_all_of_it_is_imported_then_its_names_and_no_others(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(swapkit), "adapt_mem_func_wrapper", print)
    namespace: dict[str, Any] = {}
    exec(f"from {path} import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == sorted(mindspeed.MODULES[path])


@pytest.mark.usefixtures("_installed")
def test_package_when_imported_then_it_is_one_and_leads_to_its_modules() -> None:
    package = importlib.import_module("mindspeed.core.memory")
    importlib.import_module(FUNCTION)
    assert package.adaptive_memory.adaptive_memory_function.__name__ == FUNCTION
    assert "swapkit.compat.mindspeed" in str(package.__doc__)


def test_path_when_uninstalled_then_as_unknown_as_before() -> None:
    mindspeed.install()
    importlib.import_module(FUNCTION)
    before = list(sys.meta_path)
    mindspeed.install()  # again: nothing more
    assert sys.meta_path == before
    mindspeed.uninstall()
    mindspeed.uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'mindspeed'"):
        importlib.import_module(FUNCTION)


@pytest.mark.usefixtures("original")
def test_original_when_it_is_installed_then_only_what_is_listed_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(swapkit), "adapt_mem_func_wrapper", print)
    mindspeed.install()
    assert importlib.import_module(FUNCTION).adapt_mem_func_wrapper is print
    other = importlib.import_module("mindspeed.core.memory.adaptive_memory.adaptive_memory_cache")
    assert other.kept == "original"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mindspeed\.core\.absent'"):
        importlib.import_module("mindspeed.core.absent")
    assert dir(importlib.import_module(LAYERS)) == ["allowed_recomputing_module_wrapper"]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("package", ["mindspeed.fsdp.memory", "mindspeed.lite.memory"])
def test_package_when_it_is_replaced_itself_then_its_modules_are_found(package: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"from {package}.swap_optimizer import AdamWSwap", namespace)
    exec(f"from {package}.swap_optimizer import swap_optimizer", namespace)
    exec(f"from {package}.swap_optimizer.swap_optimizer import AdamWSwap as same", namespace)
    assert namespace["swap_optimizer"].AdamWSwap is namespace["AdamWSwap"] is namespace["same"]


def test_original_package_when_replaced_and_restored_then_with_its_modules(
    original: Path, tmp_path: Path
) -> None:
    assert original.exists()
    folder = tmp_path / "mindspeed" / "fsdp" / "memory" / "swap_optimizer"
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:2]):
        (package / "__init__.py").touch()
    (folder / "swap_optimizer.py").write_text("AdamWSwap = 'original'\n")
    name = "mindspeed.fsdp.memory.swap_optimizer"
    first = importlib.import_module(f"{name}.swap_optimizer")
    mindspeed.install()
    assert importlib.import_module(f"{name}.swap_optimizer").AdamWSwap != "original"
    mindspeed.uninstall()
    assert importlib.import_module(f"{name}.swap_optimizer") is first
    assert sys.modules[name].swap_optimizer is first
    assert sys.modules["mindspeed.fsdp.memory"].swap_optimizer is sys.modules[name]


@pytest.mark.usefixtures("original")
def test_original_when_imported_before_then_replaced_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(swapkit), "adapt_mem_func_wrapper", print)
    first = importlib.import_module(FUNCTION)
    package = importlib.import_module(FUNCTION.rpartition(".")[0])
    mindspeed.install()
    namespace: dict[str, Any] = {}
    exec(f"from {package.__name__} import adaptive_memory_function as replaced", namespace)
    assert namespace["replaced"].adapt_mem_func_wrapper is print
    mindspeed.uninstall()
    assert importlib.import_module(FUNCTION) is first
    assert package.adaptive_memory_function is first
