"""The part that trains with an operator with hooks: what it says of right and wrong operators."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.gpu import operators
from benchmarks.gpu.context import Context
from benchmarks.gpu.process import Finished
from benchmarks.gpu.report import BROKEN, MET, Report

if TYPE_CHECKING:
    from pathlib import Path


def product(
    x: list[torch.Tensor], weight: list[torch.Tensor], ends: list[int]
) -> list[torch.Tensor]:
    begins = [0, *ends[:-1]]
    pairs = zip(begins, ends, weight[0], strict=True)
    return [torch.cat([x[0][begin:end] @ matrix for begin, end, matrix in pairs])]


def noisy(x: list[torch.Tensor], weight: list[torch.Tensor], ends: list[int]) -> list[torch.Tensor]:
    (made,) = product(x, weight, ends)
    return [made + 1e-3 * torch.rand(1)]


def context_in(folder: Path) -> Context:
    return Context(
        report=Report(part="operators"),
        device="cpu",
        quick=True,
        dry=True,
        output=folder,
        deadline=time.monotonic() + 100,
    )


@pytest.mark.parametrize(("operator", "verdict"), [(product, MET), (noisy, BROKEN)])
def test_bits_when_the_operator_is_right_or_not_then_said(
    tmp_path: Path, operator: Any, verdict: str
) -> None:
    context = context_in(tmp_path)
    operators.compare(context, operator)
    assert context.report.checks["bits"].verdict == verdict
    assert context.report.checks["evicted"].verdict == MET


def test_extension_when_not_built_then_a_note_and_nothing_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_command: list[str], *, log: Path, **_: object) -> Finished:
        log.write_text("no nvcc\n", encoding="utf-8")
        return Finished(status=1, timed_out=False, seconds=1.0, log=log)

    monkeypatch.setattr(operators, "run_process", fail)
    context = context_in(tmp_path)
    operators.run(context)
    assert "no nvcc" in context.report.notes[0]
    assert not context.report.checks
    assert (tmp_path / "operators" / "grouped_matmul.cu").exists()
