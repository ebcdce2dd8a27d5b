"""Threads that train side by side, each with what it needs of swapkit: no crash, the same numbers.

The scenes are programs of their own (`thread_scenes.py`): a crash is seen from outside.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.thread_scenes import SCENES
from tests.support import ROOT


def play(scene: str, *options: str, timeout_s: float) -> str:
    """Run a scene to its end; return what it printed."""
    command = [sys.executable, "-m", "tests.integration.thread_scenes", scene, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}{done.stderr}"
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.promise("A3")
@pytest.mark.parametrize("scene", SCENES)
def test_scene_when_threads_take_turns_as_often_as_they_can_then_same_losses(scene: str) -> None:
    assert "rounds on 3 threads" in play(scene, "--rounds", "4", "--restless", timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--restless",)], ids=["usual", "restless"])
@pytest.mark.parametrize("scene", SCENES)
def test_scene_when_it_runs_for_a_minute_then_same_losses(
    scene: str, options: tuple[str, ...]
) -> None:
    assert "rounds on 3 threads" in play(scene, "--seconds", "60", *options, timeout_s=300)
