"""`swapkit run`: runs an unchanged training script inside a budget."""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swapkit.api.path_arguments import read_argument
from swapkit.cli.base import AUTO, DONE, FAILED, check_budget, code_of, script_command
from swapkit.cli.script import Ended, Script
from swapkit.errors import InvalidArgument, SwapkitError
from swapkit.imports import when_imported
from swapkit.ir.codec import read_planned
from swapkit.planning import POLICIES
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.paths import check_report, check_trace
from swapkit.texts import waiting
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.session.session import Session
    from swapkit.cli.script_budget import ScriptBudget

_PATHS = ("disk", "plan", "save_plan", "report", "trace")
_UNCOUNTED = (
    "no step was counted: no optimizer of torch has stepped in this process. For processes that "
    "the script starts itself, use torchrun; in a loop without an optimizer, call "
    "swapkit.sessions()[-1].mark_step()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of the command, as the user gave them."""

    budget: str
    policy: str
    host_limit: str | None
    disk: str | None
    disk_limit: str | None
    device: str | None
    plan: str | None
    save_plan: str | None
    report: str | None
    trace: str | None

    def check(self) -> None:
        """Check what can be checked before the script runs.

        Raises:
            InvalidArgument: an amount cannot be parsed, or a file or folder does not exist.
        """
        check_budget(self.budget)
        if self.plan is not None:
            read_argument("--plan", self.plan, read_planned, "the file of a plan")
        if self.report is not None:
            check_report(self.report)
        if self.trace is not None:
            check_trace(self.trace)
        files = {"--save-plan": self.save_plan, "--report": self.report, "--trace": self.trace}
        for name, file in files.items():
            if file is not None and not Path(file).parent.is_dir():
                folder = str(Path(file).parent)
                raise InvalidArgument(f"{name} {file!r}: there is no folder {folder!r}")

    def session_options(self) -> dict[str, Any]:
        """Return the arguments of `swapkit.budget`, without budget, model, optimizer and plan."""
        return {
            "policy": self.policy,
            "host_limit": self.host_limit,
            "disk": self.disk,
            "disk_limit": self.disk_limit,
            "device": self.device,
        }


class Refused(Ended):
    """Ends the script because of an option."""

    def __init__(self, error: SwapkitError) -> None:
        super().__init__(str(error))
        self.error = error


@script_command()
@click.option(
    "--budget",
    default=AUTO,
    envvar="SWAPKIT_BUDGET",
    show_default=True,
    show_envvar=True,
    help='Bytes, or a share of the device\'s memory: "10GiB", "80%"; "auto": what is free.',
)
@click.option(
    "--policy",
    type=click.Choice((*POLICIES, "rescue")),
    default="auto",
    show_default=True,
    help="auto: swap and recompute; rescue: no plan, act when memory fills up.",
)
@click.option("--host-limit", metavar="BYTES", help="Most host memory for copies.")
@click.option("--disk", metavar="FOLDER", help="Where copies go that the host has no room for.")
@click.option("--disk-limit", metavar="BYTES", help="Most bytes on the disk.")
@click.option("--device", help='E.g. "cpu" or "cuda:1" (default: an accelerator if present).')
@click.option("--plan", metavar="FILE", help="Follow the plan in this file.")
@click.option("--save-plan", metavar="FILE", help="Write the plan, for --plan.")
@click.option("--report", metavar="FILE", help="Write a report (.html), or its data (.json).")
@click.option("--trace", metavar="FILE.json", help="Write a step's timeline for Perfetto.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, as python -m does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(*, is_module: bool, program: tuple[str, ...], **given: Any) -> int:
    """Run a training script inside a memory budget, without a change to it.

    \b
    swapkit run --budget 10GiB train.py --epochs 3
    swapkit run --budget 80% -m package.train --epochs 3
    torchrun --nproc-per-node 2 -m swapkit run --budget 10GiB train.py
    accelerate launch -m swapkit run --budget 10GiB train.py

    The budget holds from the import of torch on. Steps are counted by torch's optimizers. The exit
    code is that of the script. A summary goes to stderr, on rank 0; files of other ranks get a
    suffix, as in run.rank1.html.
    """  # noqa: D301 - the mark of click, for lines that stay as they are
    if not program:
        raise click.UsageError("expected a script, or -m and a module")
    options = RunOptions(**{name: _absolute(name, value) for name, value in given.items()})
    options.check()
    script = Script(name=program[0], is_module=is_module, arguments=program[1:])
    return _Run(options).run(script)


def _absolute(name: str, value: Any) -> Any:  # noqa: ANN401 - an option of any type
    """Return an option; a file or folder as an absolute path, because scripts change the folder."""
    return os.path.abspath(value) if name in _PATHS and value is not None else value


class _Run:
    """One run of a script."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._budget: ScriptBudget | None = None
        self._process = os.getpid()
        self._rank = own_rank()
        self._refused: SwapkitError | None = None  # why the script had to end
        self._has_failed = False  # whether the script has

    def run(self, script: Script) -> int:
        """Run the script, then write the files and the summary; return the exit code."""
        code = FAILED
        try:
            # Not before: scripts set variables such as OMP_NUM_THREADS, which torch reads there.
            when_imported("torch", self._open)
            code = script.run()
        except Refused:
            pass  # it is stored: a script may catch whatever is raised in it
        if self._refused is not None:
            if self._budget is not None:
                self._finish()
            click.echo(f"swapkit run: {self._refused}", err=True)
            return code_of(self._refused)
        self._has_failed = code != DONE
        if os.getpid() != self._process:
            return code  # a child that the script forked
        if any(_is_needed(each) for each in threading.enumerate()):
            atexit.register(self._finish)  # Python first waits for the script's threads
            return code
        finished = self._finish()
        return finished if code == DONE else code

    def _open(self) -> None:
        """Begin the budget: torch was just imported."""
        from swapkit.cli.script_budget import ScriptBudget

        options = self._options
        try:
            device = options.device or own_device()
            self._budget = ScriptBudget(
                options.budget,
                {**options.session_options(), "device": device},
                plan=options.plan,
                refuse=self._refuse,
            )
        except SwapkitError as error:
            self._refuse(error)

    def _refuse(self, error: SwapkitError) -> None:
        self._refused = error
        raise Refused(error) from None

    # ---- the end -------------------------------------------------------------------------------

    def _finish(self) -> int:
        """Write the files, end the budget, print the summary; return the exit code for these."""
        budget, code = self._budget, DONE
        if budget is None:
            self._print("the script did not import torch")
            return code
        for method, path in self._list_files():
            try:
                with waiting(f"writing {path.name}"):
                    getattr(budget.session, method)(path)
            except Exception as error:  # noqa: BLE001 - the training is done: the rest must follow
                is_known = isinstance(error, (SwapkitError, ImportError, OSError))
                text = str(error) if is_known else f"{type(error).__name__}: {error}"
                click.echo(f"swapkit run: {path.name} was not written: {text}", err=True)
                code = FAILED
        budget.close()
        for line in _summarize(budget, has_failed=self._has_failed):
            self._print(line)
        return code

    def _list_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the files that were asked for, each after the session's method that writes it."""
        options = self._options
        asked = {
            "save_plan": options.save_plan,
            "report": options.report,
            "export_trace": options.trace,
        }
        for method, file in asked.items():
            if file is not None:
                yield method, name_for_rank(Path(file), self._rank)

    def _print(self, line: str) -> None:
        if self._rank == 0:
            click.echo(f"swapkit run: {line}", err=True)


def name_for_rank(path: Path, rank: int) -> Path:
    """Return the file of a rank.

    Example:
        >>> str(name_for_rank(Path("run.html"), 0)), str(name_for_rank(Path("run.html"), 1))
        ('run.html', 'run.rank1.html')
    """
    if rank == 0:
        return path
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")


def own_rank() -> int:
    """Return the rank of this process; 0: it is none of several."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else 0


def own_device() -> str | None:
    """Return this rank's accelerator; None: there is no rank, or no such accelerator.

    The script chooses its device only after the budget has begun.
    """
    from swapkit._runtime.torch_compat.accelerators import present_accelerator

    number = os.environ.get("LOCAL_RANK", "")
    accelerator = present_accelerator() if number.isdecimal() else None
    if accelerator is None or int(number) >= accelerator.count():
        return None  # each rank may see its own device only
    return f"{accelerator.type}:{number}"


def _is_needed(thread: threading.Thread) -> bool:
    """Return whether Python waits for a thread of the script before it ends the process.

    Swapkit's own threads end with the session.
    """
    is_others = thread is not threading.main_thread() and not thread.name.startswith("swapkit")
    return is_others and not thread.daemon


def _summarize(budget: ScriptBudget, *, has_failed: bool) -> Iterator[str]:
    """Yield the lines of the summary. `has_failed`: whether the script has."""
    session, totals = budget.session, budget.totals()
    yield (
        f"budget {format_bytes(session.limit_bytes)}, peak {format_bytes(totals.peak_bytes)} "
        f"reserved, {_count(totals.steps, 'step')}, {_count(totals.rescues, 'rescue')}"
    )
    if budget.has_own:
        yield "the script has sessions of its own: these made the plans"
    elif totals.steps == 0 and not has_failed:
        yield _UNCOUNTED
    elif totals.steps > 0:
        yield _describe_plan(session)
    if budget.trainings > 1:
        yield f"{budget.trainings} trainings, each with a plan of its own; files are of the last"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _describe_plan(session: Session) -> str:
    plan, stats = session.plan, session.stats
    if plan is None:
        return f"no plan ({session.progress})" if session.progress else "no plan, rescues only"
    swapped, recomputed = plan.count_moved()
    text = f"plan: {swapped} storages swapped, {recomputed} recomputed"
    if stats.step_seconds is not None:
        text += f"; {format_seconds(stats.step_seconds)} a step"
    return f"{text}; {session.progress}"
