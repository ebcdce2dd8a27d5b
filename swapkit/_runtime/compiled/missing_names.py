"""What to say where this torch's compilers differ from those that swapkit knows."""

from __future__ import annotations

from swapkit.texts import get_logger

_log = get_logger("compiled")
reported: list[str] = []  # what was missing


def report_missing(error: Exception) -> None:
    """Say once that this torch lacks a name: hooks then run around compiled graphs, not inside."""
    if not reported:
        reported.append(str(error))
        _log.warning(
            "saved tensors of compiled graphs are swapped only between the graphs, because this "
            "torch has changed (%s). Compile blocks instead of the whole model",
            error,
        )
