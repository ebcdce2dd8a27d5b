"""Building operators with hooks: in a clean folder, with only include and link lines."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import swapkit
from build_native import build_library
from swapkit import cli as command_line
from swapkit.errors import NativeBuildError
from tests.meta.sources import ROOT
from tests.support.operator_extension import EXAMPLE
from tests.support.sessions import Training, train_both
from tests.support.stateful import RecomputeAll
from tests.unit._runtime.rig import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = ROOT / "tests" / "operators" / "hooked.c"
TORCH = ("torch", "c10", "python")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def flags(*options: str, cwd: Path) -> list[str]:
    """Return what the command line prints, to a shell in another folder."""
    return shlex.split(run(sys.executable, "-m", "swapkit", *options, cwd=cwd))


@pytest.mark.promise("F3")
def test_program_when_built_with_the_flags_then_runs_without_python_and_torch(
    tmp_path: Path,
) -> None:
    program = tmp_path / "hooked"
    run(
        *("gcc", "-Wall", "-Werror", *flags("--cflags", cwd=tmp_path), str(PROGRAM)),
        *("-o", str(program), *flags("--libs", cwd=tmp_path)),
        cwd=tmp_path,
    )
    assert run(program, cwd=tmp_path) == "0 0\n"
    lines = run("ldd", program, cwd=tmp_path).splitlines()
    loaded = {line.split()[0] for line in lines}  # an address may look like any name
    assert "libswapkit.so" in loaded
    assert not [(name, each) for name in TORCH for each in loaded if name in each]


@pytest.mark.promise("F3")
def test_program_when_the_folder_is_on_the_library_path_then_needs_no_other_flag(
    tmp_path: Path,
) -> None:
    include, library = f"-I{swapkit.include_path()}", f"-L{swapkit.library_path()}"
    run("gcc", include, PROGRAM, "-o", "hooked", library, "-lswapkit", cwd=tmp_path)
    found = run(tmp_path / "hooked", cwd=tmp_path, LD_LIBRARY_PATH=swapkit.library_path())
    assert found == "0 0\n"


class Builder:
    """A builder of an extension, whose link lines are those of SmartSwap's document."""

    def extra_ldflags(self) -> list[str]:
        root_extensions_dir = os.environ.get("TORCH_EXTENSIONS_DIR")
        return ["-L" + f"{root_extensions_dir}/smart_swap/", "-lsmart_swap"]


@pytest.mark.promise("F24")
def test_program_when_linked_by_the_lines_of_smart_swap_then_loads_our_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^(ln -s .*TORCH_EXTENSIONS_DIR.*)$", guide, re.MULTILINE)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run("sh", "-c", command, cwd=ROOT, PATH=path)
    folder = tmp_path / "smart_swap"
    run(
        *("gcc", f"-I{swapkit.include_path()}", PROGRAM, "-o", "hooked"),
        *Builder().extra_ldflags(),
        cwd=tmp_path,
    )
    variables = {"LD_LIBRARY_PATH": f"{folder}/:"}
    assert run(tmp_path / "hooked", cwd=tmp_path, **variables) == "0 0\n"
    assert f"libswapkit.so => {folder}/" in run("ldd", "hooked", cwd=tmp_path, **variables)


def test_flags_when_printed_then_quoted_and_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapkit._native import hooks

    monkeypatch.setattr(hooks, "INCLUDE", Path("/a folder/include"))
    monkeypatch.setattr(hooks, "COMPAT", Path("/a folder/include/compat"))
    assert command_line.main(["--cflags", "--compat"]) == 0
    said = capsys.readouterr().out
    assert shlex.split(said) == ["-I/a folder/include", "-I/a folder/include/compat"]
    loads = run(sys.executable, "-X", "importtime", "-m", "swapkit", "--libs", cwd=ROOT)
    assert "torch" not in loads


def test_command_when_none_is_given_then_says_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main([]) == 2
    assert "Commands:\n  run " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--cflags", "--compat", "doctor"],
            "--cflags --compat with the command 'doctor': a call prints options or runs a "
            "command. Call 'swapkit --cflags --compat' or 'swapkit doctor ...'.",
        ),
        (["--libs", "machine"], "--libs with the command 'machine': a call prints"),
        (
            ["--compat"],
            "--compat without --cflags: it adds a folder to the compiler's options. Call "
            "'swapkit --cflags --compat'.",
        ),
        (["--compat", "--libs"], "Call 'swapkit --cflags --libs --compat'."),
    ],
)
def test_flags_when_they_do_not_go_together_then_error_says_what_to_call(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""


def test_library_when_the_environment_has_flags_then_built_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "a folder" / "flags.h"
    header.parent.mkdir()
    text = '__attribute__((visibility("default"))) int from_cppflags = FROM_CFLAGS;'
    header.write_text(text, encoding="utf-8")
    monkeypatch.setenv("CFLAGS", "-DFROM_CFLAGS=7")
    monkeypatch.setenv("CPPFLAGS", f"-include '{header}'")
    monkeypatch.setenv("LDFLAGS", "-Wl,-rpath,/from/ldflags")
    library = build_library(tmp_path)
    read = run("readelf", "-dW", "--dyn-syms", library, cwd=tmp_path)
    assert "from_cppflags" in read
    assert "/from/ldflags" in read


def test_library_when_missing_then_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from swapkit._native import hooks

    monkeypatch.setattr(hooks, "LIBRARY", Path("/nowhere/libnowhere.so"))
    with pytest.raises(NativeBuildError, match=r"libnowhere\.so.*pip install --force"):
        hooks.hook_addresses(["sk_op_begin"])


PROBE = """
import ctypes, sys
first = ctypes.CDLL({copy!r})                    # an extension loads a copy of the library
from swapkit._native.hooks import hook_addresses
theirs = ctypes.cast(first.sk_op_begin, ctypes.c_void_p).value
assert hook_addresses(["sk_op_begin"]) == {{"sk_op_begin": theirs}}, "two copies of the state"
"""


def test_library_when_an_extension_has_loaded_a_copy_then_there_is_one_state(
    tmp_path: Path,
) -> None:
    copy = shutil.copy(Path(swapkit.library_path()) / "libswapkit.so", tmp_path)
    run(sys.executable, "-c", PROBE.format(copy=str(copy)), cwd=ROOT)


FOREIGN = """
import ctypes, sys
ctypes.CDLL({library!r})
import swapkit
try:
    swapkit.install()
except swapkit.SwapkitError as error:
    print(type(error).__name__, error)
"""


def test_library_when_an_extension_has_loaded_a_foreign_one_then_error_names_its_path(
    tmp_path: Path,
) -> None:
    source = tmp_path / "foreign.c"
    source.write_text("int sk_foreign(void) { return 0; }\n", encoding="utf-8")
    library = tmp_path / "a folder" / "libswapkit.so"
    library.parent.mkdir()
    run(
        *("gcc", "-shared", "-fPIC", "-Wl,-soname,libswapkit.so", source, "-o", library),
        cwd=tmp_path,
    )
    said = run(sys.executable, "-c", FOREIGN.format(library=str(library)), cwd=ROOT)
    assert said.startswith(f"NativeBuildError the process has loaded {library}, which has no")


def test_library_when_loaded_then_takes_two_pointers_of_the_thread_local_memory_of_all(
    tmp_path: Path,
) -> None:
    library = Path(swapkit.library_path()) / "libswapkit.so"
    segments = run("readelf", "-lW", library, cwd=tmp_path)
    (sizes,) = re.findall(r"^ *TLS +\S+ +\S+ +\S+ +\S+ +(\S+)", segments, re.MULTILINE)
    assert 0 < int(sizes, 16) <= 16


EXTENSION = """
import ctypes, sys
import swapkit
{first}
try:
    ctypes.CDLL({extension!r})
except OSError as error:
    print(error)
else:
    print("loaded")
"""


@pytest.mark.promise("F3")
@pytest.mark.parametrize(
    ("first", "said"),
    [("swapkit.install()", "loaded"), ("swapkit.library_path()", "libswapkit.so: cannot open")],
)
def test_extension_without_a_run_path_when_swapkit_was_installed_first_then_loads(
    first: str, said: str, tmp_path: Path
) -> None:
    include, library = f"-I{swapkit.include_path()}", f"-L{swapkit.library_path()}"
    extension = tmp_path / "extension.so"
    run(
        *("gcc", "-shared", "-fPIC", include, PROGRAM, "-o", extension, library, "-lswapkit"),
        cwd=tmp_path,
    )
    script = EXTENSION.format(first=first, extension=str(extension))
    assert said in run(sys.executable, "-c", script, cwd=ROOT)
    guide = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert "not needed if `swapkit.install()` runs before the import of the operator" in guide


def test_guide_when_its_operator_is_compiled_then_it_is_right(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cpp\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    source = tmp_path / "operator.cpp"
    source.write_text(block, encoding="utf-8")
    headers = Path(torch.__file__).parent / "include"
    run(
        *("g++", "-std=c++20", "-fsyntax-only", "-w", f"-I{headers}"),
        *(*flags("--cflags", cwd=tmp_path), str(source)),
        cwd=tmp_path,
    )


def test_source_of_the_example_when_read_then_its_hooks_are_the_documents() -> None:
    text = (EXAMPLE / "gmm.cpp").read_text(encoding="utf-8")
    calls = re.findall(r"c10_npu::swap::NPUSwapManager::GetInstance\(\)\.(\w+)\((.*?)\);", text)
    assert calls == [
        ("BeginHook", '"gmm_forward"'),
        ("TensorHook", "x"),
        ("TensorHook", "weight"),
        ("TensorHook", "y"),
        ("PostHook", ""),
        ("EndHook", ""),
    ]
    assert '#include "NPUSwapManager.h"' in text


@pytest.mark.slow
@pytest.mark.promise("F3")
def test_example_when_built_with_cmake_then_right(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    folder = tmp_path / "gmm"
    shutil.copytree(EXAMPLE, folder)
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-S", ".", "-B", "build", python, cwd=folder)
    run("cmake", "--build", "build", cwd=folder)
    (built,) = (folder / "build").glob("gmm*.so")
    spec = importlib.util.spec_from_file_location("gmm", built)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, weight = torch.rand(6, 4), torch.rand(2, 4, 3)
    (y,) = module.npu_gmm([x], [weight], [2, 6])
    torch.testing.assert_close(y, torch.cat([x[:2] @ weight[0], x[2:] @ weight[1]]))


# ---- operators that need no hooks ---------------------------------------------------------------


calls: list[int] = []  # of the kernel


@torch.library.custom_op("swapkit_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    """A kernel that torch runs, whatever it does inside."""
    calls.append(1)
    made = torch.empty_like(x)
    np.power(x.numpy(), 3, out=made.numpy())
    return made


def save_operand(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def cube_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    x, y = ctx.saved_tensors
    made: torch.Tensor = grad * (3 * x * x) + 0 * y
    return made


cube.register_autograd(cube_backward, setup_context=save_operand)


class Cubes(nn.Module):
    """Layers with the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(cube(layer(x)))
        return x


def make_training() -> Training:
    torch.manual_seed(0)
    model = Cubes()
    return Training(model, torch.optim.AdamW(model.parameters(), 1e-3))


@pytest.mark.promise("C14")
@pytest.mark.usefixtures("installation", "steady_machine")
def test_custom_operator_of_torch_when_swapped_or_recomputed_then_same_bits_without_hooks() -> None:
    log = train_both(make_training, 0.7, 6, policy="swap", search_steps=1)
    assert log.session.stats.swapped_in_bytes > 0
    calls.clear()
    train_both(make_training, 3.0, 6, policy=RecomputeAll(), search_steps=1)
    assert len(calls) > 2 * 6 * 4, "forward alone has run the kernel"


@pytest.mark.gpu
@pytest.mark.promise("C14")
def test_triton_kernel_when_everything_is_evicted_then_same_bits_without_hooks() -> None:
    triton = pytest.importorskip("triton")
    language = pytest.importorskip("triton.language")

    @triton.jit
    # Triton compiles it, and reads annotations as types of its own.
    def double(x, y, count, BLOCK: language.constexpr):  # type: ignore[no-untyped-def,name-defined]  # noqa: ANN001, ANN202, N803
        at = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
        language.store(y + at, 2 * language.load(x + at, mask=at < count), mask=at < count)

    def run(evict: Callable[[], object]) -> torch.Tensor:
        x = torch.linspace(0, 1, 1 << 20, device="cuda").requires_grad_()
        made = x * 1
        y = torch.empty_like(made)
        double[(triton.cdiv(made.numel(), 1024),)](made, y, made.numel(), BLOCK=1024)
        loss = (made.sin() * y).sum()
        del made, y
        evict()
        loss.backward()
        assert x.grad is not None
        return x.grad

    expected = run(int)
    with swapkit.budget("90%") as session:
        assert torch.equal(run(lambda: session.rescue(EVERYTHING)), expected)
