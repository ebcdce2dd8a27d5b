"""Lifetimes without a session on CUDA: a plain training loop lies at planned addresses."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.cuda.processes import TRAIN, run

if TYPE_CHECKING:
    from pathlib import Path


# Backward runs on a thread of autograd's own here, which only autograd knows to be in backward.
@pytest.mark.promise("E5")
@pytest.mark.parametrize("way", ["argument", "variable"])
def test_training_when_lifetimes_are_asked_for_then_it_lies_as_planned_with_equal_gradients(
    way: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "results.pt")
    run(f"{TRAIN}\ntorch.save(train(steps=8), {file!r})")
    lines = run(
        f"""
        {textwrap.indent(TRAIN, " " * 8).strip()}
        import numpy as np
        from swapkit._native.layout import TAG_BACKWARD, Lives
        from swapkit._runtime.allocators.installation import require_installation
        from swapkit.planning.beside import at_once
        from swapkit.planning.layout.steps import LIFE
        swapkit.install(device="cuda", lifetimes={True if way == "argument" else None})
        with at_once():
            print(equal(train(steps=8), torch.load({file!r})))
        installation = require_installation(torch.device("cuda", 0))
        stats = installation.layout.stats()
        print(stats.hits > 0, stats.hit_share > 0.9)
        lives = np.frombuffer(Lives(installation.pool).read()[0], LIFE)
        phases = lives["phase"][lives["tag"] == TAG_BACKWARD]
        print(len(phases) > 0, set(phases.tolist()) == {{1}})
        swapkit.uninstall()
        print(installation.layout.stats().height_bytes)
        """,
        MEMORY_FRAGMENTATION=str(int(way == "variable")),
    )
    assert lines == ["True", "True True", "True True", "0"]
