"""The self-test of `swapkit doctor`, in a process of its own: `python -m swapkit.cli.self_test`.

It trains a small model without and with a budget, and fails if the budget does not hold, if nothing
was moved, or if one bit differs. It prints the figures as one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

import swapkit
from swapkit._runtime.allocators.installation import choose_device

LAYERS, WIDTH, ROWS, STEPS = 12, 128, 1024, 4
SHARE = 0.5  # of the memory above that in use between steps


def main() -> int:
    """Run the test; return the exit code."""
    swapkit.install()
    device = choose_device(None)
    base_bytes, plain = _train(device)
    plain_peak_bytes = _reserved(device, "peak")
    budget_bytes = base_bytes + int(SHARE * (plain_peak_bytes - base_bytes))
    with swapkit.budget(budget_bytes, device=device, policy="rescue") as session:
        _, limited = _train(device)
    stats = session.stats
    problems = {
        f"the budget of {budget_bytes} bytes did not hold: {stats.peak_bytes} bytes": (
            stats.peak_bytes > budget_bytes
        ),
        "nothing was moved": stats.swapped_out_bytes == 0,
        "the parameters differ from those of plain training": plain != limited,
    }
    for problem, is_so in problems.items():
        if is_so:
            sys.stderr.write(f"{problem}\n")
            return 1
    figures = {
        "device": str(device),
        "plain_peak_bytes": plain_peak_bytes,
        "budget_bytes": budget_bytes,
        "peak_bytes": stats.peak_bytes,
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


def _train(device: torch.device) -> tuple[int, str]:
    """Train a new model; return the bytes in use between steps, and a digest of its parameters."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(ROWS, WIDTH).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return swapkit.memory_stats(device)["allocated_bytes.all.current"], digest.hexdigest()


def _reserved(device: torch.device, which: str) -> int:
    return int(swapkit.memory_stats(device)[f"reserved_bytes.all.{which}"])


if __name__ == "__main__":
    sys.exit(main())
