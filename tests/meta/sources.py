"""Where the project's sources are, for the tests that read them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "swapkit/_native"
HEADER = NATIVE / "include/swapkit.h"
IGNORED = {".git", ".venv", "build", "dist", "__pycache__"}


def list_sources() -> list[Path]:
    """Return the files of the project: those under version control or not ignored by it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return sorted(
            ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()
        )
    # An unpacked archive: everything but what building leaves behind.
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not IGNORED.intersection(path.relative_to(ROOT).parts)
    )
