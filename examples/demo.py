"""Train a small language model with and without a memory budget, and compare: `make demo`.

Each run is a process of its own, which prints one line of JSON. Where its memory is fullest it
stops itself, and the demo reads from the kernel how much of its pool is resident. The demo fails if
a run exceeds its budget, or differs from plain training in one bit. `--sweep` also compares all
policies at shares of the activations, over a fast and a slow link: ten minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import swapkit
from swapkit._native.pool import Ring
from swapkit._runtime.allocators.installation import require_installation
from swapkit.testing import planning_at_once, slow_link
from swapkit.units import MIB, format_bytes, parse_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.language_model import SIZES, Training

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from swapkit._runtime.session.session import Session

STABLE = "stable"  # the stage of a session that follows its plan, or needs none
MOST_STEPS = 16  # before the timed ones
COMMAND = [sys.executable, __file__, "--run"]
# On a CPU copies need processors, too; threads that spin while they wait would take them.
THREADS = str(max(1, len(os.sched_getaffinity(0)) // 2))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": THREADS, "OMP_WAIT_POLICY": "PASSIVE"}
CONSOLE = Console(width=None if sys.stdout.isatty() else 110, highlight=False, markup=False)
MAPPING = re.compile(rb"^(\w+)-(\w+) [^\n]*\n(?:[A-Z]\w+:[^\n]*\n)*?Rss: +(\d+) kB$", re.MULTILINE)
RACE = "run|limit\nMiB|peak\nMiB|resident\nMiB|host copies\nMiB|step\nms|vs.\nplain|same\nbits"
SWEEP = "link|budget|no limit\nms|recompute\nall\nms|rescue\nms|swap\nms|recompute\nms|auto\nms|"
SWEEP += "auto\nrecovers|possible|same\nbits"
RACE_NOTES = """\
limit, peak: device memory as the pool counts it. resident: what the kernel says of the pool.
host copies are outside the limit: here they use the same RAM, next to a GPU the host's.
step: the median, timed once the plan is stable. The runs follow each other; plain uses the pool.
same bits: all losses, and the last parameters and states, equal those of torch's allocator."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a process trains. The limit is a session's; without a policy, it is the pool's."""

    label: str
    size: str
    has_pool: bool = True  # else torch's own allocator
    limit_bytes: int | None = None
    policy: str = ""
    recompute: bool = False
    bytes_per_s: float = 0  # of the link to the host; 0: as fast as memory


@dataclass(kw_only=True)
class Result:
    """What a run did, as its process says; `resident_bytes` is from the kernel."""

    run: Run
    error: str = ""
    losses: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of the last state; without a pool, of each
    seconds: list[float] = field(default_factory=list)  # of the timed steps
    state_bytes: int = 0
    peak_bytes: int = 0  # that the pool reserved
    host_peak_bytes: int | None = None
    stage: str = ""
    bound_s: float | None = None  # no plan's steps are faster, where steps without a limit take
    unlimited_s: float | None = None
    series: list[tuple[int, int]] = field(default_factory=list)  # ns and bytes in use, last step
    ranges: list[list[tuple[int, int]]] = field(default_factory=list)  # of the pool, at every stop
    resident_bytes: int | None = None

    @property
    def step_s(self) -> float:
        """Median time of the timed steps; not a number if there are none."""
        return statistics.median(self.seconds or [math.nan])

    def equals(self, other: Result) -> bool:
        """Return whether losses and last state are those of `other` after as many steps."""
        end = len(self.losses)
        return (self.losses, self.digests[-1:]) == (
            other.losses[:end],
            other.digests[end - 1 : end],
        )


def train(run: Run) -> Result:
    """Train until the plan is stable, then the timed steps, then two more."""
    result = Result(run=run)
    if run.has_pool:
        swapkit.install(None if run.policy else run.limit_bytes, device="cpu")
    training, session = Training(SIZES[run.size], seed=0, recompute=run.recompute), None
    with ExitStack() as stack:
        if run.policy and run.limit_bytes:
            parts = training.model, training.optimizer
            session = swapkit.budget(run.limit_bytes, *parts, policy=run.policy)
            for each in slow_link(bytes_per_s=run.bytes_per_s), planning_at_once(), session:
                stack.enter_context(each)
        try:
            _train(result, training, session)
        except torch.OutOfMemoryError as error:
            result.error = f"ran out of memory in step {training.steps_done + 1}: {error}"
        if session is not None:
            stats, result.stage = session.stats, session.stage
            result.host_peak_bytes = stats.host_peak_bytes
            result.bound_s = stats.bound_step_seconds
            result.unlimited_s = stats.unlimited_step_seconds
    result.state_bytes = training.state_bytes()
    if run.has_pool:
        result.peak_bytes = swapkit.memory_stats()["reserved_bytes.all.peak"]
    return result


def _train(result: Result, training: Training, session: Session | None) -> None:
    pool = require_installation().pool if result.run.has_pool else None

    def stop() -> None:
        if pool is not None:
            result.ranges.append([(each.address, each.nbytes) for each in pool.segments()])
            os.kill(os.getpid(), signal.SIGSTOP)

    def step(*, watched: bool = False) -> float:
        start = time.perf_counter()
        result.losses.append(training.step(stop if watched else None))
        seconds = time.perf_counter() - start
        if pool is None:
            result.digests.append(training.digest())
        return seconds

    step(watched=True)
    step()  # the first one with optimizer states
    for _ in range(MOST_STEPS - 2):
        if pool is None or (session is not None and session.stage != STABLE):
            step()
    result.seconds = [step() for _ in range(SIZES[result.run.size].steps)]
    step(watched=True)
    ring = Ring(1 << 17)
    if pool is not None:
        pool.attach(ring)
    step()  # not stopped, for the picture
    if pool is not None:
        pool.detach()
    result.series = [(each.time_ns, each.in_use_bytes) for each in ring.read()[0]]
    result.digests.append(training.digest())


def execute(run: Run) -> Result:
    """Run in a new process, ask the kernel at each of its stops, print a line at its end."""
    command, looks = [*COMMAND, json.dumps(asdict(run))], []
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, env=ENVIRONMENT, start_new_session=True)
        try:
            while os.WIFSTOPPED(status := os.waitpid(process.pid, os.WUNTRACED)[1]):
                looks.append(Path(f"/proc/{process.pid}/smaps").read_bytes())
                os.kill(process.pid, signal.SIGCONT)
        finally:
            process.kill()
            process.wait()
        if code := os.waitstatus_to_exitcode(status):
            raise SystemExit(f'The demo failed: the run "{run.label}" ended with status {code}')
        output.seek(0)
        result = Result(**json.load(output) | {"run": run})
    seen = [resident_bytes(*each) for each in zip(looks, result.ranges, strict=True)]
    result.resident_bytes = max(seen, default=None)
    peak = f", peak {format_bytes(result.peak_bytes)}" if run.has_pool else ""
    what = result.error.partition(":")[0]
    what = what or f"{len(result.losses)} steps{peak}, {result.step_s * 1000:.0f} ms a step"
    print(f"{run.label}: {what}", flush=True)
    return result


def resident_bytes(smaps: bytes, ranges: Iterable[Sequence[int]]) -> int:
    """Return the resident bytes of all mappings that overlap the ranges: never too few."""
    kib = 0
    for start, end, resident in MAPPING.findall(smaps):
        overlaps = (int(start, 16) < at + nbytes and at < int(end, 16) for at, nbytes in ranges)
        kib += int(resident) * any(overlaps)
    return kib * 1024


def problems(result: Result, alone: Result) -> Iterator[str]:
    """Yield a sentence for each promise that a run broke; `alone` has the right numbers."""
    run = result.run
    if result.error:
        yield f"{run.label} {result.error.splitlines()[0]}"
    elif not result.equals(alone):
        yield f"{run.label} is not bit-equal to {alone.run.label}"
    elif run.policy and result.stage != STABLE:
        yield f"{run.label} has no stable plan after {len(result.losses)} steps"
    for what, nbytes in ("reserved", result.peak_bytes), ("had resident", result.resident_bytes):
        if run.limit_bytes and not 0 < (nbytes or 0) <= run.limit_bytes:
            budget = f"not within its budget of {format_bytes(run.limit_bytes)}"
            yield f"{run.label} {what} {format_bytes(nbytes or 0)}, {budget}"


def race(budgets: list[str], size: str) -> list[Result]:
    """Return plain training, with torch's allocator, full recompute, and two runs per budget."""
    plain = execute(Run(label="plain", size=size))
    alone = execute(Run(label="plain, torch's allocator", size=size, has_pool=False))
    runs = [plain, alone, execute(Run(label="recompute every block", size=size, recompute=True))]
    for name, policy in ("swapkit", "auto"), ("plain", ""):
        for text in budgets:
            limit = parse_bytes(text, whole_bytes=plain.peak_bytes, name="--budget")
            asked = Run(label=f"{name} at {text}", size=size, policy=policy, limit_bytes=limit)
            runs.append(execute(asked))
    return runs


def sweep(shares: list[str], size: str) -> Iterator[tuple[str, str, list[Result]]]:
    """Yield link, share, and runs of every policy: over a link as memory, then over a slow one."""
    slow = 0.0
    for link, share in ((link, share) for link in ("as memory", "slow") for share in shares):
        where = f"at {share}, link {link}"
        free = execute(Run(label=f"no limit {where}", size=size))
        runs = [free, execute(Run(label=f"recompute all {where}", size=size, recompute=True))]
        activation_bytes = max(nbytes for _, nbytes in free.series) - free.state_bytes
        slow = slow or activation_bytes / (0.75 * free.step_s)  # swapping all adds half a step
        speed = slow if link == "slow" else 0
        limit = free.state_bytes + parse_bytes(share, whole_bytes=activation_bytes, name="--sweep")
        for policy in ("rescue", "swap", "recompute", "auto"):
            asked = Run(label=f"{policy} {where}", size=size, policy=policy, limit_bytes=limit)
            runs.append(execute(replace(asked, bytes_per_s=speed)))
        yield f"{format_bytes(int(speed))}/s" if speed else link, share, runs


def sweep_row(link: str, share: str, runs: list[Result], alone: Result) -> list[str]:
    """Return the row of a budget and a link."""
    free, full, *_, auto = runs
    bound_s = free.step_s * (auto.bound_s or math.nan) / (auto.unlimited_s or math.nan)
    times = ["OOM" if each.error else f"{1000 * each.step_s:.0f}" for each in runs]
    saved = [(full.step_s - each) / (full.step_s - free.step_s) for each in (auto.step_s, bound_s)]
    same = all(each.error or each.equals(alone) for each in runs)
    return [link, share, *times, *(f"{each:.2f}" for each in saved), "yes" if same else "no"]


def race_row(result: Result, plain: Result, alone: Result) -> list[str]:
    """Return a run's row of the table."""
    run, resident, host = result.run, result.resident_bytes, result.host_peak_bytes
    sizes = run.limit_bytes, result.peak_bytes or None, resident, host
    cells = ["-" if each is None else f"{each / MIB:.1f}" for each in sizes]
    if result.error:
        return [run.label, cells[0], "out of memory"]
    same = "-" if result is alone else "yes" if result.equals(alone) else "no"
    times = f"{result.step_s * 1000:.0f}", f"{result.step_s / plain.step_s:.2f}"
    return [run.label, *cells, *times, same]


def show(headings: str, rows: list[list[str]], notes: str) -> None:
    """Print a table and what its columns mean, if it has rows."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings.split("|")):
        table.add_column(heading, justify="right" if index else "left", vertical="bottom")
    for row in rows:
        table.add_row(*row)
    if rows:
        CONSOLE.print("", table, "", notes, "", sep="\n")


def draw(runs: list[Result], path: Path) -> None:
    """Draw the bytes in use over the last step of every run."""
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    panel = figure.subplots()
    for index, each in enumerate(run for run in runs if run.series):
        colour, (times, counts) = f"C{index}", zip(*each.series, strict=True)
        xs = [(at - times[0]) / (times[-1] - times[0]) for at in times]
        mib = [count / MIB for count in counts]
        panel.step(xs, mib, colour, where="post", label=each.run.label)
        if each.run.limit_bytes:
            panel.axhline(each.run.limit_bytes / MIB, color=colour, linestyle="--", linewidth=0.8)
    panel.set(xlabel="share of a step (dashed: budgets)", ylabel="in use, MiB", xlim=(0, 1), ylim=0)
    panel.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=140)


def compare(budgets: list[str], shares: list[str], size: str, folder: Path) -> int:
    """Run everything; print the tables, draw the picture, write all figures."""
    runs = race(budgets, size)
    (plain, alone), trained, trials = runs[:2], runs[: -len(budgets)], runs[-len(budgets) :]
    points = list(sweep(shares, size))
    checked = [*trained, *(each for *_, more in points for each in more if not each.error)]
    broken = [text for each in checked for text in problems(each, alone)]
    broken += [f"{each.run.label} did not run out of memory" for each in trials if not each.error]
    if broken:
        CONSOLE.print("BROKEN: " + "\nBROKEN: ".join(broken), style="bold red")
    else:
        tight = min(trained[3:], key=lambda each: each.peak_bytes)
        share, ratio = tight.peak_bytes / plain.peak_bytes, tight.step_s / plain.step_s
        text = f"swapkit trains within {share:.0%} of the memory that plain training needs, at"
        CONSOLE.print(f"{text} {ratio:.2f} times the step time, with the same bits.", style="green")
    show(RACE, [race_row(each, plain, alone) for each in runs], RACE_NOTES)
    rows = [sweep_row(*point, alone) for point in points]
    show(SWEEP, rows, "The columns: docs/planning.md.")
    folder.mkdir(parents=True, exist_ok=True)
    draw(trained, folder / "chart.png")
    facts = {"problems": broken, "runs": [asdict(each) for each in runs], "sweep": rows}
    (folder / "result.json").write_text(json.dumps(facts), encoding="utf-8")
    CONSOLE.print(f"The picture and all figures: {folder}")
    return int(bool(broken))


def amounts(text: str) -> list[str]:
    """Return the parts of a list of shares or bytes; each must be one."""
    return [each for each in text.split(",") if parse_bytes(each, whole_bytes=MIB, name="amount")]


def main() -> int:
    """Run what the command line asks for; return 1 if a run broke its promise."""
    if sys.argv[1:2] == ["--run"]:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the demo
        print(json.dumps(asdict(train(Run(**json.loads(sys.argv[2]))))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=amounts, default="60%,45%", help="shares, or bytes")
    parser.add_argument("--size", default="compact", choices=SIZES, help="of the model")
    parser.add_argument("--sweep", type=amounts, nargs="?", const="80%,60%,45%,30%,20%", default=[])
    parser.add_argument("--output", type=Path, default=Path("swapkit-demo"), help="folder")
    options = parser.parse_args()
    return compare(options.budget, options.sweep, options.size, options.output)


if __name__ == "__main__":
    sys.exit(main())
