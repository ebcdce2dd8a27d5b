"""Ways to train on the CPU, tiny: the same gradients as plain training, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.gpu import trainer
from benchmarks.gpu.comparison import Results
from benchmarks.gpu.configurations import METHODS, Setup
from benchmarks.gpu.llama import SHAPES, build_model, make_tokens
from benchmarks.gpu.measure import CHUNK, Peaks, digest, median_of, spread_of, time_steps
from benchmarks.gpu.probe import OF_ALLOCATOR, OF_SESSION
from benchmarks.gpu.process import python, run_process
from benchmarks.gpu.reference import SwapReference
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.probe import Probe

PLAIN = Setup(shape="tiny", method="plain", device="cpu", warmup_steps=0, timed_steps=1)


@pytest.fixture(scope="module")
def plain() -> trainer.Figures:
    return trainer.run(PLAIN)


def test_operators_when_they_repeated_themselves_then_torchs_settings_are_as_before() -> None:
    def settings() -> tuple[bool, bool]:
        fills = torch._C._get_deterministic_fill_uninitialized_memory()
        return torch.are_deterministic_algorithms_enabled(), fills

    before = settings()
    with trainer.deterministic():
        assert settings() == (True, False)
    assert settings() == before == (False, True)


@pytest.mark.parametrize(
    "method", ["recompute", "selective", "save_on_cpu", "recompute_in_save_on_cpu", "reference"]
)
def test_method_when_trained_then_gradients_are_those_of_plain(
    method: str, plain: trainer.Figures
) -> None:
    figures = trainer.run(dataclasses.replace(PLAIN, method=method))
    assert figures["outcome"] == trainer.FINISHED, figures
    assert figures["digest"] == plain["digest"]
    assert figures["loss"] == plain["loss"]
    assert len(figures["steps_ms"]) == 1


@pytest.mark.parametrize(
    "options",
    [{"limit_bytes": 16 << 20}, {"offload": True, "prefetch": 4, "limit_bytes": 24 << 20}],
)
def test_swapkit_when_trained_in_a_process_then_gradients_are_those_of_plain(
    options: dict[str, int], plain: trainer.Figures, tmp_path: Path
) -> None:
    setup = dataclasses.replace(PLAIN, method="swapkit", **options)  # type: ignore[arg-type]
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu.trainer", setup.dump(), str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    figures = json.loads(result.read_text(encoding="utf-8"))
    assert figures["outcome"] == trainer.FINISHED, done.stderr
    assert figures["digest"] == plain["digest"]
    assert figures["loss"] == plain["loss"]
    assert figures["in_use_peak_bytes"] > figures["resident_bytes"] / 2
    assert figures["session_peak_bytes"] <= figures["budget_bytes"] == options["limit_bytes"]
    assert figures["swapped_out_bytes"] > 0
    assert figures["steps_before_stable"] is not None or "prefetch" in options
    assert set(figures) >= {*OF_SESSION, *OF_ALLOCATOR}
    assert figures["step_out_bytes"] > 0 or "prefetch" not in options
    assert figures["recorded_ms"] is None or figures["recorded_ms"] > 0


def test_trainer_when_memory_is_out_then_that_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_setup: Setup, _probe: Probe) -> trainer.Figures:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(trainer, "train", fail)
    figures = trainer.run(PLAIN)
    assert figures["outcome"] == trainer.OUT_OF_MEMORY
    assert figures["error"] == "no more"


def test_trainer_when_a_library_is_missing_then_that_is_an_outcome() -> None:
    figures = trainer.run(dataclasses.replace(PLAIN, method="torchtune"))
    assert figures["outcome"].startswith("torchtune is not installed")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ModuleNotFoundError("No module named 'x'", name="x"), "x is not installed (No module"),
        (ImportError("x.so: undefined symbol"), "failed: ImportError: x.so: undefined symbol"),
    ],
)
def test_trainer_when_an_import_fails_then_missing_and_broken_are_told_apart(
    error: ImportError, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_setup: Setup, _probe: Probe) -> trainer.Figures:
        raise error

    monkeypatch.setattr(trainer, "train", fail)
    assert trainer.run(PLAIN)["outcome"].startswith(outcome)


def test_trainer_when_it_fails_then_that_is_an_outcome(capfd: pytest.CaptureFixture[str]) -> None:
    figures = trainer.run(dataclasses.replace(PLAIN, shape="none"))
    assert figures["outcome"] == "failed: KeyError: 'none'"
    assert "Traceback" in capfd.readouterr().err


def test_setup_when_dumped_then_loads_the_same() -> None:
    setup = dataclasses.replace(PLAIN, limit_bytes=5, prefetch=2, offload=True, share=0.5)
    assert Setup.load(setup.dump()) == setup
    assert set(METHODS) >= {"plain", "swapkit", "overhead", "compile", "trl", "torchtune"}


def test_shapes_when_counted_then_as_large_as_they_are_called() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in build_model(SHAPES[name], "meta").parameters())
            for name in ("1b_4k", "8b_32k", "7b_lora", "32b_lora")
        }
    assert 0.9e9 < counts["1b_4k"] < 1.3e9
    assert counts["7b_lora"] == pytest.approx(6.74e9, rel=0.02)
    assert counts["32b_lora"] == pytest.approx(32.8e9, rel=0.02)
    block = (counts["8b_32k"] - 2 * 32000 * 4096) / SHAPES["8b_32k"].layers
    assert 0.21e9 < block < 0.23e9


def test_model_when_built_twice_then_the_same_weights_and_tokens() -> None:
    first, second = (build_model(SHAPES["tiny"], "cpu") for _ in range(2))
    assert digest(first.parameters()) == digest(second.parameters())
    assert torch.equal(make_tokens(SHAPES["tiny"], 3, "cpu"), make_tokens(SHAPES["tiny"], 3, "cpu"))
    assert next(first.parameters()).dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


def test_digest_when_one_bit_or_place_changes_then_differs() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(CHUNK + 1000).to(torch.bfloat16)
    original = digest([tensor])
    assert digest([tensor.clone()]) == original
    for place in (0, CHUNK - 1, CHUNK, CHUNK + 999):
        changed = tensor.clone()
        changed.view(torch.int16)[place] ^= 1
        assert digest([changed]) != original
    swapped = tensor.clone()
    swapped[0], swapped[CHUNK] = tensor[CHUNK], tensor[0]
    assert digest([swapped]) != original
    assert digest([tensor, tensor[:1]]) != digest([tensor[:1], tensor])
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])


def test_reference_when_a_tensor_is_saved_twice_then_one_copy_and_one_back() -> None:
    weight = torch.randn(512, 512, requires_grad=True)
    x = torch.randn(512, 512)
    hooks = SwapReference([weight])
    with hooks:
        y = x.clone() @ weight
        groups = list(hooks._groups.values())
        z = (y.sin() * y.cos()).sum()
        assert len(hooks._groups) <= 5
    del y
    z.backward()
    expected = torch.randn(0)
    other = weight.detach().clone().requires_grad_()
    y = x @ other
    (y.sin() * y.cos()).sum().backward()
    expected = other.grad  # type: ignore[assignment]
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert all(group.host.nbytes == 512 * 512 * 4 for group in groups)


def test_steps_when_timed_then_one_figure_each() -> None:
    calls: list[int] = []
    times = time_steps(lambda: calls.append(1), 3, "cpu")
    assert len(times) == len(calls) == 3
    assert all(ms >= 0 for ms in times)
    assert median_of([]) is None
    assert spread_of([1.0]) is None
    assert spread_of([2.0, 2.0, 2.0]) == 0.0


def test_peaks_when_the_cpu_has_no_counters_then_none() -> None:
    peaks = Peaks("cpu", pool=False)
    peaks.reset()
    assert set(peaks.read().values()) == {None}


def test_results_when_runs_differ_in_bits_then_said() -> None:
    results = Results()
    run = {"outcome": trainer.FINISHED, "digest": "a", "loss": "1", "steps_ms": [1.0, 3.0]}
    results.add("plain", run)
    results.add("same", run)
    results.add("other", run | {"digest": "b"})
    results.add("unknown", {"outcome": trainer.FINISHED, "steps_ms": [2.0]})
    assert results.bits("same", "plain") == "equal"
    assert results.bits("other", "plain") == "DIFFERENT"
    assert results.bits("unknown", "plain") is None
    results.add("plain", run | {"digest": "c"})
    assert results.bits("same", "plain") == "plain differs"
    assert results.step_ms("plain") == 2.0


def test_trainer_when_it_hangs_and_is_stopped_then_its_log_says_where(tmp_path: Path) -> None:
    ready, log = tmp_path / "ready", tmp_path / "log"
    code = (
        "import pathlib, sys, time\n"
        "from benchmarks.gpu import trainer\n"
        "def hang_here(*_):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)\n"
        "trainer.run = hang_here\n"
        f"sys.argv = ['trainer', {PLAIN.dump()!r}, 'result']\n"
        "trainer.main()"
    )
    done = run_process(
        python("-c", code),
        seconds=60.0,
        log=log,
        cwd=ROOT,
        watch=lambda _pid: "it hangs" if ready.exists() else "",
    )
    assert done.describe() == "stopped: it hangs"
    assert "in hang_here" in log.read_text(encoding="utf-8")


def test_model_when_its_shape_has_a_rank_then_only_adapters_are_trained() -> None:
    shape = dataclasses.replace(SHAPES["tiny"], rank=4)
    model = build_model(shape, "cpu")
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in trained} == {"down", "up"}
    assert len(trained) == 2 * 7 * shape.layers
    model(make_tokens(shape, 0, "cpu")).backward()
    assert all((each.grad is not None) == each.requires_grad for each in model.parameters())
