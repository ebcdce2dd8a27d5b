"""Cost per saved tensor of several ways to run a step, measured in turns, over the plain way."""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit

PLAIN = "plain"


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        return func(*args, **(kwargs or {}))


def measure_ways(
    ways: Mapping[str, Callable[[], float]], *, rounds: int, saves: int
) -> dict[str, float]:
    """Return the microseconds per saved tensor of each way beyond the plain way.

    Args:
        ways: functions that run a step and return its seconds; one is `PLAIN`.
        rounds: number of rounds; every way runs once in each.
        saves: tensors that a step saves.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, run in ways.items():
            seconds[name].append(run())
    plain_seconds = statistics.median(seconds[PLAIN])
    return {
        f"{name}_us": (statistics.median(values) - plain_seconds) / saves * 1e6
        for name, values in seconds.items()
        if name != PLAIN
    }


def run_command(
    description: str, measure: Callable[[int], dict[str, float]], *, rounds: int
) -> None:
    """Measure with options from the command line, and print the figures.

    Args:
        description: description of the benchmark.
        measure: returns the figures for a number of rounds.
        rounds: default number of rounds.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swapkit.install(device="cpu")
    figures = measure(options.rounds)
    for name, value in figures.items():
        print(f"{name.removesuffix('_us'):12}{value:8.2f} us per saved tensor")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
