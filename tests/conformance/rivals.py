"""The same programs under other libraries' activation offloading, as a table.

    python -m tests.conformance.rivals

prints a Markdown table: program by library, with "ok" (the bits of plain training; for illegal
programs: refused), "other strides", "wrong numbers", "not refused", or the error. The extra
`rivals` installs torchtune and TRL; without them their columns say so.

Their managers drive a GPU. Here they run over the CPU as it were one: streams and events do
nothing, and a copy "to the GPU" is a copy. So the table shows which orders of events their
bookkeeping survives; whether their copies are ordered rightly between streams it cannot show.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import re
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.conformance.modes import find_mode, plain
from tests.programs import ILLEGAL, PROGRAMS, is_same, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tests.programs import Entry, Evict

    Opener = Callable[[], AbstractContextManager[Evict]]

MIN_BYTES = 1024
ABSENT = "not installed"
REFUSALS = "modified by an inplace operation|backward through the graph a second time"


class Done:
    """A stream, or an event, of a device on which everything is done at once."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_options: self


class Device:
    """What a rival finds where it looks for a GPU."""

    Stream = Event = Done

    @staticmethod
    def current_stream() -> Done:
        """Return the only stream there is."""
        return Done()

    @staticmethod
    @contextlib.contextmanager
    def stream(_stream: Done) -> Iterator[None]:
        """Let nothing change."""
        yield

    @staticmethod
    def empty_cache() -> None:
        """Do nothing."""


def copy_to_device(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a `Tensor.to` that copies where it is asked to go to the GPU."""

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args and args[0] in {"cuda", "cpu"} and "non_blocking" in options:
            return tensor.clone()
        return original(tensor, *args, **options)

    return to


@contextlib.contextmanager
def gpu_in_sight() -> Iterator[None]:
    """Let the CPU pass for a GPU where a manager looks for one, when it is made."""
    device = Device()

    def find() -> torch.device:
        return torch.device("cpu")

    def module_of(_kind: object) -> Device:
        return device

    with (
        mock.patch.object(torch.cuda, "default_stream", device.current_stream),
        mock.patch.object(torch.cuda, "Stream", Done),
        mock.patch.object(torch.accelerator, "current_accelerator", find),
        mock.patch.object(torch, "get_device_module", module_of),
    ):
        yield


@contextlib.contextmanager
def gpu_in_use() -> Iterator[None]:
    """Let copies to a GPU be copies, and its streams nothing."""

    def record_stream(_tensor: torch.Tensor, _stream: Done) -> None:
        pass

    with (
        mock.patch.object(torch.cuda, "stream", Device.stream),
        mock.patch.object(torch.Tensor, "to", copy_to_device(torch.Tensor.to)),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A column of the table; without an opener the library is not there."""

    name: str
    opener: Opener | None


def manager_of(module: str) -> Any:
    """Return the library's manager, or None if the library cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module).OffloadActivations
    except ImportError:
        return None


def opener_of(manager: Any, *, streams: bool) -> Opener | None:
    """Return what opens a fresh manager over the pretended GPU."""
    if manager is None:
        return None

    @contextlib.contextmanager
    def opener() -> Iterator[Evict]:
        options = {"use_pin_memory": False, "use_streams": streams, "min_offload_size": MIN_BYTES}
        with gpu_in_sight():
            hooks = manager(**options)
        with gpu_in_use(), hooks:
            yield lambda: None

    return opener


@contextlib.contextmanager
def save_on_cpu() -> Iterator[Evict]:
    """What torch itself has."""
    with torch.autograd.graph.save_on_cpu():
        yield lambda: None


def list_rivals() -> list[Rival]:
    """Return the columns, ours first."""
    rivals = [
        Rival(name="swapkit", opener=find_mode("swap_everything").open),
        Rival(name="save_on_cpu", opener=save_on_cpu),
    ]
    libraries = {
        "torchtune": "torchtune.training._activation_offloading",
        "TRL": "trl.models.activation_offloading",
    }
    for name, module in libraries.items():
        manager = manager_of(module)
        for streams in (True, False):
            kind = "streams" if streams else "one stream"
            rivals.append(Rival(name=f"{name}, {kind}", opener=opener_of(manager, streams=streams)))
    return rivals


def judge(entry: Entry, opener: Opener | None) -> str:
    """Run a program under a rival and say how it went."""
    if opener is None:
        return ABSENT
    expected = expected_of(entry)
    try:
        results = run_quietly(entry, opener)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - that is the verdict
        if expected is None and re.search(REFUSALS, str(error)):
            return "ok"
        if entry.refusal is not None and re.search(entry.refusal, str(error)):
            return "refused"
        return f"error: {type(error).__name__}"
    return "not refused" if expected is None else compare(results, expected)


@functools.cache
def expected_of(entry: Entry) -> list[torch.Tensor] | None:
    """Return the results of plain training, or None if it refuses the program."""
    try:
        return run_quietly(entry, plain)
    except RuntimeError:
        return None


def run_quietly(entry: Entry, opener: Opener) -> list[torch.Tensor]:
    """Run a program; what it prints and warns of is not for the table."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        opener() as evict,
    ):
        warnings.simplefilter("ignore")
        return run(entry.body, evict)


def compare(results: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Say how results differ from those of plain training."""
    pairs = list(zip(results, expected, strict=False))
    if len(results) == len(expected) and all(is_same(one, other) for one, other in pairs):
        return "ok"
    same_numbers = len(results) == len(expected) and all(
        is_same(in_rows(one), in_rows(other)) for one, other in pairs
    )
    return "other strides" if same_numbers else "wrong numbers"


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor with the strides that its size suggests."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def make_table(entries: Sequence[Entry], rivals: Sequence[Rival]) -> list[list[str]]:
    """Return a row for each program: its name, then a verdict for each rival."""
    return [[entry.name, *[judge(entry, rival.opener) for rival in rivals]] for entry in entries]


def format_table(rows: list[list[str]], rivals: Sequence[Rival]) -> str:
    """Return the table in Markdown, with a count of successes below."""
    head = ["program", *[rival.name for rival in rivals]]
    lines = [head, ["---"] * len(head), *rows]
    counts = ["**ok**"]
    for column in range(1, len(head)):
        verdicts = [row[column] for row in rows]
        good = sum(verdict in {"ok", "refused"} for verdict in verdicts)
        counts.append(ABSENT if ABSENT in verdicts else f"**{good} of {len(rows)}**")
    return "\n".join("| " + " | ".join(line) + " |" for line in [*lines, counts])


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    rivals = list_rivals()
    rows = make_table([*PROGRAMS, *ILLEGAL], rivals)
    sys.stdout.write(format_table(rows, rivals) + "\n")


if __name__ == "__main__":
    main()
