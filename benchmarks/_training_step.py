"""Training steps timed on command, in their own process: `_training_step.py plain|pool SIZE`.

Each line on stdin is one step to train; the answer on stdout is its seconds. The training is the
demo's. "pool" installs swapkit's pool first; "plain" imports nothing of it.
"""

from __future__ import annotations

import sys
import time

import torch

from examples.language_model import SIZES, Training


def main() -> None:
    kind, size = sys.argv[1:]
    if kind == "pool":
        import swapkit

        swapkit.install(device="cpu")
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
