"""The demo's training text: the Python sources of the standard library, as bytes."""

import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TEXT_BYTES = 2 << 20
_LEAST_BYTES = 64 << 10
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class NoTextError(RuntimeError):
    """This Python comes without the sources of its standard library."""


def standard_library_text(folder: Path | None = None, *, most_bytes: int = TEXT_BYTES) -> bytes:
    """Return the standard library's `.py` files, in the order of their relative paths.

    Args:
        folder: folder to read instead of this Python's standard library.
        most_bytes: stop after this many bytes; the last file is cut.

    Returns:
        The files' bytes, one after another: always the same for the same Python.

    Raises:
        NoTextError: there are fewer than 64 KiB of sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    parts: list[bytes] = []
    missing_bytes = most_bytes
    for path in _sources(root):
        parts.append(path.read_bytes()[:missing_bytes])
        missing_bytes -= len(parts[-1])
        if missing_bytes <= 0:
            break
    text = b"".join(parts)
    if len(text) < min(_LEAST_BYTES, most_bytes):
        msg = (
            f"the demo trains on the standard library's .py files, but {root} holds only "
            f"{len(text)} bytes of them; run it with a Python that has its sources"
        )
        raise NoTextError(msg)
    return text


def _sources(root: Path) -> Iterator[Path]:
    """Return the `.py` files below `root` in a fixed order, without third-party code and tests."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT  # `os.walk` then skips those folders
        found += (
            Path(folder, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(".py")
        )
    return (root / path for path in sorted(found))


def batch_windows(
    text: bytes, *, seed: int, step: int, batch: int, tokens: int
) -> tuple[bytes, ...]:
    """Choose the pieces of text for one step.

    Args:
        text: the whole text.
        seed: the same seed gives the same pieces.
        step: index of the step, from 0.
        batch: number of pieces.
        tokens: bytes to predict in each.

    Returns:
        `batch` pieces of `tokens + 1` bytes: inputs and, shifted by one, targets.
    """
    chooser = random.Random(f"{seed}:{step}")
    starts = [chooser.randrange(len(text) - tokens) for _ in range(batch)]
    return tuple(text[start : start + tokens + 1] for start in starts)
