"""What a program is, and the lists that hold them all.

A program is a plain function: it builds a graph, calls `evict()` wherever a training step could run
out of memory, and returns the tensors whose bits must not depend on what `evict` does. `run` adds
what else the program leaves behind (`remains.py`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tests.cuda.simulated import INSIDE
from tests.programs.remains import note_leaf, noted_remains
from tests.support.place import ON_CPU

Evict: TypeAlias = Callable[[], object]
Program: TypeAlias = Callable[[Evict], list[torch.Tensor]]

SIDE = 96  # 36 KiB a matrix: above the least size that is moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A program and what is known of it.

    Attributes:
        body: the program.
        gotchas: which measured facts of autograd it is about (`G1` .. `G30`).
        moves: it saves strided memory that swapping can move; if not, it must merely work.
        refusal: pattern of the error with which torch refuses it under plain saved-tensor hooks.
        cpu_only: it is about memory, or kernels, that only the CPU has.
        device_code: its operators have no kernel of the CPU, which a simulated GPU needs.
    """

    body: Program
    gotchas: tuple[str, ...] = ()
    moves: bool = True
    refusal: str | None = None
    cpu_only: bool = False
    device_code: bool = False

    @property
    def obstacle(self) -> str | None:
        """Why it cannot run on the device, or None."""
        if self.cpu_only and not ON_CPU:
            return "is about the CPU"
        if self.device_code and INSIDE in os.environ:
            return "needs device code, which the simulated GPU does not run"
        return None

    @property
    def name(self) -> str:
        """Its name in test ids."""
        return "-".join([self.body.__name__, *self.gotchas])


PROGRAMS: list[Entry] = []
"""Legal in plain autograd: the same bits are wanted."""
ILLEGAL: list[Entry] = []
"""Plain autograd refuses them in backward, and so must we."""


def program(*gotchas: str, **known: Any) -> Callable[[Program], Program]:
    """Add a legal program to the list, with what else is known of it."""

    def add(body: Program) -> Program:
        PROGRAMS.append(Entry(body=body, gotchas=gotchas, **known))
        return body

    return add


def illegal(*gotchas: str) -> Callable[[Program], Program]:
    """Add a program that must raise to the list."""

    def add(body: Program) -> Program:
        ILLEGAL.append(Entry(body=body, gotchas=gotchas))
        return body

    return add


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a random tensor that wants a gradient; without a shape a square matrix."""
    made = torch.randn(*(shape or (SIDE, SIDE)), dtype=dtype, requires_grad=True)
    note_leaf(made)
    return made


def gradients(loss: torch.Tensor, *leaves: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return the gradients of the leaves."""
    return list(torch.autograd.grad(loss, leaves, **options))


def run(body: Program, evict: Evict) -> list[torch.Tensor]:
    """Run a program from a fixed seed; return its results and all that it leaves behind."""
    torch.manual_seed(0)
    with noted_remains() as remains:
        results = [result.detach() for result in body(evict)]
        return results + remains.tensors()


@functools.cache
def results_of_plain_training(entry: Entry) -> list[torch.Tensor]:
    """Run a program without swapkit, once for all who compare with it."""
    return run(entry.body, lambda: None)
