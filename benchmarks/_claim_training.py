"""Training of the demo's model on command, in its own process: `_claim_training.py SETTING`.

SETTING is JSON: `size`, `threads`, `recompute` (every block, by torch), `policy` and `limit_bytes`
of a session (null: none), `bytes_per_s` of the link (0: as fast as memory). Each line on stdin is a
number of steps to train; each answer is one line of JSON, including a digest of the parameters.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

import swapkit
from examples.language_model import SIZES, Training
from swapkit.testing import planning_at_once, slow_link

if TYPE_CHECKING:
    from swapkit._runtime.session.session import Session


def main() -> None:
    setting: dict[str, Any] = json.loads(sys.argv[1])
    if setting["threads"]:
        torch.set_num_threads(setting["threads"])
    swapkit.install(device="cpu")
    training = Training(SIZES[setting["size"]], seed=0, recompute=setting["recompute"])
    with contextlib.ExitStack() as stack:
        session: Session | None = None
        if setting["policy"] is not None:
            if setting["bytes_per_s"]:
                stack.enter_context(slow_link(bytes_per_s=setting["bytes_per_s"]))
            stack.enter_context(planning_at_once())
            session = stack.enter_context(
                swapkit.budget(
                    setting["limit_bytes"],
                    training.model,
                    training.optimizer,
                    policy=setting["policy"],
                )
            )
        for line in sys.stdin:
            seconds = []
            for _ in range(int(line)):
                begin = time.perf_counter()
                training.step()
                seconds.append(time.perf_counter() - begin)
            answer = {"seconds": seconds, **describe(training, session)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def describe(training: Training, session: Session | None) -> dict[str, Any]:
    """Return the peak so far, the state of the session, and a digest of the parameters."""
    found: dict[str, Any] = {
        "peak_bytes": swapkit.memory_stats()["reserved_bytes.all.peak"],
        "digest": training.digest(),
        "threads": torch.get_num_threads(),
    }
    if session is not None:
        stats = session.stats
        found |= {
            "peak_bytes": stats.peak_bytes,
            "stage": session.stage,
            "rescues": stats.oom_rescues,
        }
    return found


if __name__ == "__main__":
    main()
