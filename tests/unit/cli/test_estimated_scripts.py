"""Scripts like nanoGPT, minGPT and CleanRL's PPO train in the budget that `estimate` names."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Evaluation of large batches between steps, gradient accumulation, tied weights.
NANO_GPT = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
block, vocabulary, width, heads, batch = 48, 65, 48, 4, 4

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 192), nn.GELU(), nn.Linear(192, width))

    def forward(self, x):
        shape = (*x.shape[:2], heads, -1)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, x, y):
        x = self.wte(x) + self.wpe(torch.arange(block))
        for each in self.h:
            x = each(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten())

def get(size):
    tokens = torch.randint(vocabulary, (size, block + 1))
    return tokens[:, :-1], tokens[:, 1:]

model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    if step % 4 == 0:
        model.eval()
        with torch.no_grad():
            model(*get(24))
        model.train()
    for _ in range(2):
        (model(*get(batch)) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
# An activation function of many operators on large tensors.
MIN_GPT = """
import math, torch
from torch import nn
torch.manual_seed(0)

class NewGELU(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 192), nn.Linear(192, 48)
        self.act = NewGELU()

    def forward(self, x):
        return x + nn.functional.dropout(self.down(self.act(self.up(self.ln(x)))), 0.1)

model = nn.Sequential(nn.Embedding(10, 48), *[Block() for _ in range(3)], nn.Linear(48, 10))
weights = [each for each in model.parameters() if each.dim() > 1]
others = [each for each in model.parameters() if each.dim() < 2]
optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}])
for _ in range(12):
    tokens = torch.randint(10, (32, 49))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
# Rollouts between bursts of steps; small tensors only.
PPO = """
import torch
from torch import nn
torch.manual_seed(0)

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        def net(outputs):
            return nn.Sequential(
                nn.Linear(24, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(),
                nn.Linear(128, outputs)
            )
        self.critic, self.actor = net(1), net(6)

    def forward(self, x):
        return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x).flatten()

agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4)
for _ in range(3):
    seen = torch.zeros(64, 16, 24)
    with torch.no_grad():
        for step in range(64):
            seen[step] = torch.randn(16, 24)
            policy, value = agent(seen[step])
    for part in torch.randperm(1024).chunk(4):
        policy, value = agent(seen.flatten(0, 1)[part])
        loss = value.square().mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
"""


def swapkit(*arguments: str) -> str:
    command = [sys.executable, "-m", "swapkit", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(NANO_GPT, id="nanogpt"),
        pytest.param(MIN_GPT, id="mingpt", marks=pytest.mark.slow),
        pytest.param(PPO, id="ppo"),
    ],
)
def test_script_when_run_in_its_smallest_budget_then_trains_from_the_first_step_on(
    text: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    found = json.loads(swapkit("estimate", "--device", "cpu", "--json", str(script)))
    assert found["operator"].startswith("aten.")
    least = found["floor_bytes"] + found["operator_bytes"]  # of a session that has a plan
    assert max(least, found["outside_bytes"]) < found["smallest_budget_bytes"]
    if text is NANO_GPT:  # its evaluation decides
        assert least < found["outside_bytes"]
    swapkit("run", "--device", "cpu", "--budget", str(found["smallest_budget_bytes"]), str(script))
