"""The C driver of `benchmarks/pool.py` compiles with the public headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import pool

if TYPE_CHECKING:
    from pathlib import Path


def test_driver_when_compiled_then_it_is_there(tmp_path: Path) -> None:
    assert pool.compile_driver(tmp_path).is_file()
