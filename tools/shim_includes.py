"""Print the compiler's options for the headers that the shim is compiled against: torch, Python."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def main() -> None:
    """Print them on one line."""
    folders = (Path(torch.__file__).parent / "include", sysconfig.get_path("include"))
    print(*(f"-isystem {folder}" for folder in folders))


if __name__ == "__main__":
    main()
