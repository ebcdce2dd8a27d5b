"""`swapkit estimate`: how small a budget an unchanged training script can have."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from swapkit.api.path_arguments import read_argument
from swapkit.cli.base import (
    AUTO,
    DONE,
    check_budget,
    machine_option,
    script_command,
    take_stdout,
)
from swapkit.cli.run import Refused, own_device, own_rank
from swapkit.cli.script import Ended, Script
from swapkit.errors import InvalidArgument, SwapkitError
from swapkit.imports import when_imported
from swapkit.ir.codec import read_machine, read_trace
from swapkit.planning.hardware import find_hardware
from swapkit.texts import waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.session.session import Session
    from swapkit.api.estimation import BudgetNeed, BudgetTrial
    from swapkit.cli.script_budget import ScriptBudget
    from swapkit.ir.traces import Trace
    from swapkit.reporting.estimates import Estimate

_TRACE_SUFFIX = ".json"
_MACHINE = "a file of `swapkit machine --json`, or H100, H200, A100, 4090 or 910B"


class _Recorded(Ended):
    """Ends the script: its step is recorded."""


@script_command()
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    help='Also predict a step within this memory: bytes, "10GiB"; a share of what the step takes '
    'without a budget, "60%"; "auto": what is free. May be repeated.',
)
@machine_option
@click.option("--device", help='E.g. "cpu" or "cuda:1" (default: an accelerator if present).')
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of text.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, as python -m does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]... | TRACE")
def estimate(
    *,
    budgets: tuple[str, ...],
    machine_file: str | None,
    device: str | None,
    as_json: bool,
    is_module: bool,
    program: tuple[str, ...],
) -> int:
    """Estimate how small a script's budget can be, and how long its steps take then.

    \b
    swapkit estimate train.py --epochs 3
    swapkit estimate --budget 10GiB --budget 60% train.py
    swapkit estimate step.json

    The script runs until one of its steps is recorded, within the memory that is free, and a few
    more ran in the smallest budget, which grows where it has to. Then it ends: the steps do train.
    With --json, what the script prints goes to stderr. A TRACE is a recorded step, as `swapkit
    plan` takes it.

    With --machine H100, the step is recorded here, and its times on an H100 are modelled; "auto",
    the budget without --budget, is what is free on it.
    """  # noqa: D301 - the mark of click, for lines that stay as they are
    if not program:
        raise click.UsageError("expected a script, -m and a module, or the file of a trace")
    for budget in budgets:
        check_budget(budget)
    _check_machine(machine_file)
    stdout: TextIO | None = None
    if not is_module and Path(program[0]).suffix == _TRACE_SUFFIX:
        trace = _read_trace(program)
        tried = None
    else:
        stdout = take_stdout() if as_json else None
        script = Script(name=program[0], is_module=is_module, arguments=program[1:])
        recording = _Recording(device)
        recorded = recording.run(script)
        if isinstance(recorded, int):
            return recorded
        trace, tried = recorded, recording.tried
    if own_rank() == 0:
        found = _estimate(trace, budgets, machine_file, tried)
        text = json.dumps(found.to_dict(), indent=2) if as_json else str(found)
        click.echo(text, file=stdout)
    return DONE


def _check_machine(machine_file: str | None) -> None:
    if machine_file is not None and find_hardware(machine_file) is None:
        read_argument("--machine", machine_file, read_machine, _MACHINE)


def _read_trace(program: Sequence[str]) -> Trace:
    if len(program) > 1:
        raise click.UsageError(f"{program[0]} is a trace: it takes no arguments")
    return read_trace(program[0])


def _estimate(
    trace: Trace, budgets: Sequence[str], machine_file: str | None, tried: BudgetNeed | None
) -> Estimate:
    from swapkit.api.estimation import estimate_trace

    with waiting("planning for several budgets"):
        return estimate_trace(trace, budgets, machine_file, tried=tried)


class _Recording:
    """Runs a script until one of its steps is recorded, and a few ran in the smallest budget."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._budget: ScriptBudget | None = None
        self._trace: Trace | None = None
        self._trial: BudgetTrial | None = None
        self._trials = contextlib.ExitStack()  # while steps are tried

    @property
    def tried(self) -> BudgetNeed | None:
        """What steps of the script needed; None: none was tried."""
        return None if self._trial is None else self._trial.result()

    def run(self, script: Script) -> Trace | int:
        """Return the recorded step, or the exit code of a script that ended before.

        Raises:
            InvalidArgument: the script ended without an error, too early.
        """
        code = DONE
        try:
            when_imported("torch", self._open)
            code = script.run()
        except _Recorded:
            pass
        except Refused as refused:
            raise refused.error from None
        finally:
            self._trials.close()
            if self._budget is not None:
                self._budget.close()
        if self._trace is not None:
            return self._trace
        if code != DONE:
            click.echo("swapkit estimate: the script failed before a step was recorded", err=True)
            return code
        raise InvalidArgument(
            "the script ended before a step was recorded: it has to train for about four steps in "
            "this process. A step ends at the step() of an optimizer of torch; a loop without one "
            "trains inside `with swapkit.budget(...) as session:` and ends each step with "
            "session.mark_step(): see swapkit.estimate(step, model) for its figures"
        )

    def _open(self) -> None:
        from swapkit.cli.script_budget import ScriptBudget

        try:
            self._budget = ScriptBudget(
                AUTO,
                {"device": self._device or own_device(), "on_step": self._try_steps},
                plan=None,
                refuse=_refuse,
            )
        except SwapkitError as error:
            _refuse(error)

    def _try_steps(self, session: Session) -> None:
        """Try steps once the session has a recorded one, then end the script."""
        assert self._budget is not None
        if self._trial is None and session.trace is not None:
            from swapkit.api.estimation import BudgetTrial

            self._trace = session.trace
            self._trial = BudgetTrial(self._trace, self._budget.before_bytes)
            restart = partial(self._budget.restart, profile_steps=BudgetTrial.profile_steps)
            self._trials.enter_context(self._trial.begin(restart))
        elif self._trial is not None and self._trial.is_over():
            raise _Recorded


def _refuse(error: SwapkitError) -> None:
    raise Refused(error) from None
