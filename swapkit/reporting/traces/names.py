"""The names of trace files: the suffix says for which viewer."""

from __future__ import annotations

import os

from swapkit.errors import InvalidArgument, InvalidType
from swapkit.units import show

STEPS = (".json", ".json.gz")
MEMORY = ".pickle"


def check_suffix(path: object) -> str:
    """Return the suffix of a trace's file.

    Raises:
        InvalidArgument: it is none of the known ones.
        InvalidType: `path` is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"path={show(path)}: expected the path of the file to write")
    name = os.fspath(path)
    text = name if isinstance(name, str) else os.fsdecode(name)
    for suffix in (*STEPS, MEMORY):
        if text.endswith(suffix):
            return suffix
    raise InvalidArgument(
        f"path={show(text)}: expected a name that ends in .json or .json.gz (steps, for Perfetto "
        "and chrome://tracing), or in .pickle (memory, for torch's memory_viz)"
    )
