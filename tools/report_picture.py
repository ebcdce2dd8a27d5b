"""Make the picture of docs/report.md: train a small GPT-2 in a budget, and photograph its report.

    python -m tools.report_picture [FOLDER]

Writes run.html, run.json and report.png (1280 pixels wide) into the folder, by default the current
one. Needs transformers and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import swapkit

BUDGET = "150MiB"
STEPS = 24
SIZE = "1280,1340"  # of the window: the head of the page, and the figures of one step


def train(folder: Path) -> None:
    """Train, and write the report."""
    swapkit.install()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so that other programs disturb the step times less
    config = transformers.GPT2Config(  # type: ignore[no-untyped-call]
        n_layer=6, n_embd=256, n_head=4, n_positions=256, vocab_size=2048, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with swapkit.budget(BUDGET, model, optimizer) as session:
        for _ in range(STEPS):
            tokens = torch.randint(0, config.vocab_size, (4, 256))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    session.report(folder / "run.html")
    session.report(folder / "run.json")
    print(session)


def photograph(page: Path, picture: Path) -> None:
    """Write the upper part of a page as a PNG."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        sys.exit("the picture needs Chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}",
            f"--window-size={SIZE}", "--virtual-time-budget=20000", f"--screenshot={picture}",
            page.absolute().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


def main(arguments: list[str]) -> None:
    """Write all files."""
    folder = Path(*arguments[:1])
    train(folder)
    photograph(folder / "run.html", folder / "report.png")
    size = (folder / "run.html").stat().st_size
    print(f"{folder / 'run.html'}: {size:,} bytes; {folder / 'report.png'}")


if __name__ == "__main__":
    main(sys.argv[1:])
