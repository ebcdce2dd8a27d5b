"""
Reading the report
==================

``session.report("run.html")`` writes one file that shows what a session did: memory over a step
with the budget line, computing and copies on one time axis, every decision with its reason, and
the steps of the run. It works offline, in any browser.
"""

import json
import tempfile
from pathlib import Path

import torch

import swapkit
from swapkit.testing import slow_link

swapkit.install(device="cpu")
folder = Path(tempfile.mkdtemp())


class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


# %%
# A session to look at
# --------------------
#
# ``slow_link`` makes copies on the CPU as slow as a GPU's link would be, so that there is
# something to see. ``on_step`` is called after each step: here it prints what a logger would get.

torch.manual_seed(0)
model = torch.nn.Sequential(*[Block() for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())


def log(session):
    last = session.history[-1]
    print(f"step {last.step:2} {last.stage:7} {last.rescues:3} rescues, {last.peak_bytes:>9} bytes")


with (
    slow_link(bytes_per_s=1e9),
    swapkit.budget("26MiB", model, optimizer, on_step=log) as session,
):
    for _ in range(12):
        model(torch.randn(512, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

# %%
# The page
# --------
#
# Open the file in a browser. From the top:
#
# *Memory over a step*
#     by category, with the budget as a line, and what the step would have taken without it. Where
#     the curve touches the line, the session had to move something.
# *Lanes*
#     computing, copies out, copies back, and recomputation. A gap in the first lane under a copy
#     is a stall.
# *Decisions*
#     one row for each storage, with the reason. Search for a module's name to see what became of
#     it.
# *Time against budget*
#     the predicted step for other budgets, and the present one. A flat curve: take a smaller
#     budget.
# *Steps*
#     time, peak, rescues and stage over the run. Rescues belong into the first steps.

session.report(folder / "run.html")
print((folder / "run.html").stat().st_size // 1024, "KiB")
assert (folder / "run.html").read_text().startswith("<!")

# %%
# The data alone
# --------------
#
# ``run.json`` holds what the page shows; ``swapkit report run.json`` draws it later, on any
# computer.

session.report(folder / "run.json")
print(sorted(json.loads((folder / "run.json").read_text())))

# %%
# In numbers
# ----------
#
# The same as texts and values, without a browser:

print(session.stats)
settled = [each for each in session.history if each.stage == "stable"]
print(f"{len(settled)} settled steps, {sum(each.rescues for each in settled)} rescues in them")
