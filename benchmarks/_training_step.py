"""Times training steps on command, in a process of its own: `_training_step.py plain|pool SIZE`.

Each line on stdin is one step to train; the answer is its seconds on stdout. The training is the
demo's. "pool" puts swapkit's pool below torch first; "plain" imports nothing of it.
"""

from __future__ import annotations

import sys
import time

import torch

from swapkit.demo.sizes import SIZES
from swapkit.demo.training import Training


def main() -> None:
    kind, size = sys.argv[1:]
    if kind == "pool":
        import swapkit

        swapkit.install()
    training = Training(SIZES[size], seed=0, recompute=False)
    sys.stdout.write(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        begin = time.perf_counter()
        training.step()
        sys.stdout.write(f"{time.perf_counter() - begin:.9f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
