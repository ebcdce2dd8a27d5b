"""The text is the same every time, and its pieces are chosen by seed and step alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swapkit.demo.text import NoTextError, batch_windows, standard_library_text

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_text_when_read_twice_then_equal() -> None:
    text = standard_library_text(most_bytes=100_000)
    assert len(text) == 100_000
    assert text == standard_library_text(most_bytes=100_000)
    assert b"import" in text


def test_text_when_files_were_made_in_any_order_then_sorted_by_path(tmp_path: Path) -> None:
    write(tmp_path, {"z.py": b"z" * 9, "b/a.py": b"b" * 9, "b.py": b"B" * 9, "a/a.py": b"a" * 9})
    assert standard_library_text(tmp_path, most_bytes=30) == b"a" * 9 + b"B" * 9 + b"b" * 9 + b"zzz"


def test_text_when_packages_and_tests_lie_beside_then_left_out(tmp_path: Path) -> None:
    others = {"site-packages/x.py": b"x" * 9, "json/tests/y.py": b"y" * 9, "data.txt": b"d" * 9}
    write(tmp_path, {**others, "own.py": b"own" * 9})
    assert standard_library_text(tmp_path, most_bytes=20) == (b"own" * 9)[:20]


def test_text_when_there_is_too_little_then_says_where(tmp_path: Path) -> None:
    write(tmp_path, {"own.py": b"own"})
    with pytest.raises(NoTextError, match="holds only 3 bytes") as caught:
        standard_library_text(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_windows_when_seed_and_step_are_the_same_then_equal() -> None:
    text = bytes(range(256)) * 40

    def choose(seed: int, step: int) -> tuple[bytes, ...]:
        return batch_windows(text, seed=seed, step=step, batch=3, tokens=16)

    assert choose(0, 5) == choose(0, 5)
    assert choose(0, 5) != choose(0, 6)
    assert choose(0, 5) != choose(1, 5)
    assert [len(window) for window in choose(0, 5)] == [17, 17, 17]
    assert all(window in text for window in choose(0, 5))


def test_windows_when_the_text_is_just_long_enough_then_whole() -> None:
    windows = batch_windows(b"abcde", seed=0, step=0, batch=2, tokens=4)
    assert windows == (b"abcde", b"abcde")
