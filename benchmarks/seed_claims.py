"""Gains over full recompute: claims of the seed documents, and the gains of swapkit.

The documents that swapkit follows claim gains in throughput over recomputing every layer, using
memory that full recompute leaves free: `t_full / t - 1`. Each claim is compared with ours:

- measured: real training steps of the demo's model on this CPU, each way in its own process, all
  training the same step in turns; medians. The budget is the peak of the run that recomputes every
  block (`torch.utils.checkpoint`), plus the share that is free there according to the claim.
  `--link` throttles copies; without it they are as fast as memory. All runs must agree bit for bit.
- simulated: the model and the pipeline of the document, recorded on the meta device for an Ascend
  910B, one tensor-parallel group counted as one device, planned and simulated for the first stage.

"at most" is the gain of the same step without any limit: no plan can gain more.
S2's 25 % come from replacing eight tensor-parallel devices by one:
`benchmarks.pipelines` computes them. It also plans all stages of S3's pipelines, not only the
first.

`--json FILE` writes one flat object: `s0_measured_gain`, `s3_1f1b_simulated_gain`, ..., each with
`_claim`, `_most`, `_reached` and `_valid`. A gain above the most is not valid: its row has
"measurement invalid", and the claim is not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

BENCHMARKS = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCHMARKS.parent))

from swapkit.units import format_bytes, parse_bytes  # noqa: E402 - the path first

if TYPE_CHECKING:
    from collections.abc import Sequence

SPARE = 0.3  # share of the memory that is free under full recompute: promise A17
TOLERANCE = 0.02  # gains of two runs of the same steps differ by this much
WARM_STEPS = 12  # a session has its plan by then
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A document's claim. `stage`: a name in `claim_stages`; empty: measured on this CPU."""

    key: str
    seed: str
    setting: str
    gain: float  # over full recompute
    policy: str
    spare: float = SPARE
    stage: str = ""


CLAIMS = (
    Claim(key="s0_measured", seed="S0", setting="30 % free", gain=0.10, policy="recompute"),
    Claim(
        key="s2_swap_measured", seed="S2", setting="same memory", gain=0.28, policy="swap", spare=0,
    ),
    Claim(key="s2_measured", seed="S2", setting="same memory", gain=0.28, policy="auto", spare=0),
    Claim(key="s3_measured", seed="S3", setting="30 % free", gain=0.1368, policy="auto"),
    Claim(
        key="s0_simulated", seed="S0", setting="LLaMA2-7B 4K, 30 % free", gain=0.10,
        policy="recompute", stage="S0",
    ),
    Claim(
        key="s2_simulated", seed="S2", setting="40 layers 16K, same memory", gain=0.28,
        policy="auto", spare=0, stage="S2",
    ),
    Claim(
        key="s3_simulated", seed="S3", setting="GPT-175B cut, 8 layers, 30 % free", gain=0.1368,
        policy="auto", stage="S3",
    ),
    Claim(
        key="s3_1f1b_simulated", seed="S3", setting="the same, PP4, 30 % free", gain=0.1417,
        policy="auto", stage="S3_PIPELINE",
    ),
    Claim(
        key="s3_interleaved_simulated", seed="S3", setting="the same, PP4 VPP2, 30 % free",
        gain=0.1465, policy="auto", stage="S3_INTERLEAVED",
    ),
)  # fmt: skip


class Runner:
    """One way to train, in its own process."""

    def __init__(self, **setting: object) -> None:
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        environment |= {"PYTHONPATH": str(BENCHMARKS.parent)}
        self._process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / "_claim_training.py"), json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.seconds: list[float] = []
        self.latest: Figures = {}

    def train(self, steps: int, *, timed: bool = True) -> None:
        """Train some steps."""
        to, back = cast("TextIO", self._process.stdin), cast("TextIO", self._process.stdout)
        to.write(f"{steps}\n")
        to.flush()
        line = back.readline()
        if not line:
            raise SystemExit(f"a run ended with status {self._process.wait()}: see above")
        self.latest = json.loads(line)
        if timed:
            self.seconds += self.latest["seconds"]

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            cast("TextIO", self._process.stdin).close()
        self._process.wait()
        cast("TextIO", self._process.stdout).close()


def measure(claims: Sequence[Claim], options: argparse.Namespace) -> Figures:
    """Train all ways in turns; return the figures of the measured claims."""
    common = {"size": options.size, "threads": options.threads, "bytes_per_s": options.link}
    none = {"policy": None, "limit_bytes": 0}
    with contextlib.ExitStack() as stack:

        def start(**setting: object) -> Runner:
            runner = Runner(**common, **setting)
            stack.callback(runner.close)
            runner.train(options.warm, timed=False)
            return runner

        full = start(recompute=True, **none)
        runners = {"full": full, "plain": start(recompute=False, **none)}
        for claim in claims:
            limit_bytes = int(full.latest["peak_bytes"] / (1 - claim.spare))
            runners[claim.key] = start(
                recompute=False, policy=options.policy or claim.policy, limit_bytes=limit_bytes
            )
        for _ in range(options.rounds):
            for runner in runners.values():
                runner.train(1)
    return summarize(claims, runners)


def summarize(claims: Sequence[Claim], runners: dict[str, Runner]) -> Figures:
    """Return the median gains over the rounds, and whether all runs agree."""
    full, plain = runners["full"], runners["plain"]
    most = gain_of(full.seconds, plain.seconds)
    figures: Figures = {
        "threads": full.latest["threads"],
        "full_seconds": statistics.median(full.seconds),
        "plain_seconds": statistics.median(plain.seconds),
        "full_peak_bytes": full.latest["peak_bytes"],
        "plain_peak_bytes": plain.latest["peak_bytes"],
        "bit_equal": len({runner.latest["digest"] for runner in runners.values()}) == 1,
    }
    for claim in claims:
        runner = runners[claim.key]
        figures |= {
            f"{claim.key}_gain": gain_of(full.seconds, runner.seconds),
            f"{claim.key}_most": most,
            f"{claim.key}_seconds": statistics.median(runner.seconds),
            f"{claim.key}_budget_bytes": int(full.latest["peak_bytes"] / (1 - claim.spare)),
            f"{claim.key}_peak_bytes": runner.latest["peak_bytes"],
            f"{claim.key}_stage": runner.latest["stage"],
            f"{claim.key}_rescues": runner.latest["rescues"],
        }
    return figures


def gain_of(full: Sequence[float], ours: Sequence[float]) -> float:
    """Return the gain in throughput: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(full, ours, strict=True)) - 1


def simulate(claims: Sequence[Claim], options: argparse.Namespace) -> Figures:
    """Return the figures of the simulated claims."""
    from benchmarks.pipelines import claim_stages

    figures: Figures = {}
    for claim in claims:
        found = claim_stages.simulate_claim(
            getattr(claim_stages, claim.stage),
            policy=claim.policy,
            spare=claim.spare,
            link_bytes_per_s=options.simulated_link,
        )
        figures |= {f"{claim.key}_{name}": value for name, value in found.items()}
    return figures


def is_possible(gain: float | None, most: float) -> bool:
    """Return whether a gain is possible: steps within a limit are not faster than without one.

    Other programs that run during some of the rounds can cause an impossible gain.
    """
    return gain is None or gain <= most + TOLERANCE


def conclude(claims: Sequence[Claim], figures: Figures) -> Figures:
    """Return the figures with the claims and whether they are reached."""
    for claim in claims:
        gain = figures[f"{claim.key}_gain"]
        figures[f"{claim.key}_claim"] = claim.gain
        is_valid = is_possible(gain, figures[f"{claim.key}_most"])
        figures[f"{claim.key}_valid"] = is_valid
        figures[f"{claim.key}_reached"] = is_valid and gain is not None and gain >= claim.gain
    return figures


# ---- the table -----------------------------------------------------------------------------------


def print_table(claims: Sequence[Claim], figures: Figures) -> None:
    head = ("seed", "setting", "policy", "claim", "swapkit", "at most", "reached", "how")
    rows = [head]
    for claim in claims:
        reached, is_valid = figures[f"{claim.key}_reached"], figures[f"{claim.key}_valid"]
        possible = figures[f"{claim.key}_most"] >= claim.gain
        verdict = "yes" if reached else "no" if possible else "no: not possible here"
        rows.append(
            (
                claim.seed,
                claim.setting,
                figures.get("policy") or claim.policy,
                show_gain(claim.gain),
                show_gain(figures[f"{claim.key}_gain"]),
                show_gain(figures[f"{claim.key}_most"]),
                verdict if is_valid else "measurement invalid",
                "simulated" if claim.stage else "measured",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("Gain in throughput over full recompute")
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_notes(claims: Sequence[Claim], figures: Figures, options: argparse.Namespace) -> None:
    measured = [claim for claim in claims if not claim.stage]
    if measured:
        link = f"{options.link / 1e6:,.0f} MB/s" if options.link else "as fast as memory"
        print(
            f"\nmeasured: {options.size} model, {figures['threads']} threads, link {link}; "
            f"step {figures['full_seconds']:.3f} s with full recompute, "
            f"{figures['plain_seconds']:.3f} s without a limit; peaks "
            f"{format_bytes(figures['full_peak_bytes'])} and "
            f"{format_bytes(figures['plain_peak_bytes'])}; all runs bit-equal: "
            f"{'yes' if figures['bit_equal'] else 'NO'}"
        )
        for claim in measured:
            print(
                f"  {claim.seed} {figures.get('policy') or claim.policy}: budget "
                f"{format_bytes(figures[f'{claim.key}_budget_bytes'])}, peak "
                f"{format_bytes(figures[f'{claim.key}_peak_bytes'])}, "
                f"{figures[f'{claim.key}_seconds']:.3f} s, {figures[f'{claim.key}_stage']}, "
                f"{figures[f'{claim.key}_rescues']} rescues"
            )
    if len(measured) < len(claims):
        print(f"\nsimulated: Ascend 910B, link {options.simulated_link / 1e9:g} GB/s each way")


def show_gain(gain: float | None) -> str:
    return "no plan fits" if gain is None else f"{gain:+.1%}"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="small", help="size of the demo's model (default: small)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--warm", type=int, default=WARM_STEPS, help="untimed steps before these")
    parser.add_argument(
        "--threads", type=int, default=0, help="torch's threads; 0: torch's default"
    )
    parser.add_argument(
        "--link",
        type=lambda text: parse_bytes(text, name="--link"),
        default=0,
        metavar="BYTES",
        help='bytes per second of each direction of the measured link, "500MB" (default: no limit)',
    )
    parser.add_argument(
        "--simulated-link",
        type=float,
        default=24e9,
        metavar="BYTES",
        help="bytes per second of the simulated link",
    )
    parser.add_argument("--policy", help="policy for all measured rows (default: the seed's)")
    parser.add_argument("--only", choices=("measured", "simulated"), help="run only these rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    how = {"measured": False, "simulated": True}.get(options.only)
    claims = [claim for claim in CLAIMS if how is None or bool(claim.stage) is how]
    measured = [claim for claim in claims if not claim.stage]
    simulated = [claim for claim in claims if claim.stage]
    figures: Figures = {"policy": options.policy, "link_bytes_per_s": options.link}
    if measured:
        figures |= measure(measured, options)
    if simulated:
        figures |= simulate(simulated, options)
    conclude(claims, figures)
    print_table(claims, figures)
    print_notes(claims, figures, options)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if not figures.get("bit_equal", True):
        raise SystemExit("the runs are not bit-equal")


if __name__ == "__main__":
    main()
