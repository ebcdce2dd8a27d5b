"""
Training with Lightning
=======================

Lightning's ``Trainer`` takes the session as a callback. It covers ``fit`` from the sanity check
to the end, any number of optimizers, and manual optimization. Needs ``pip install lightning``.
"""

import logging
import warnings

import lightning
import torch

import swapkit
from swapkit.integrations.lightning import SwapkitCallback

swapkit.install(device="cpu")  # before the module is built
MIB = 1 << 20
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# %%
# A module
# --------
#
# As ever. Nothing in it is about memory.


class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*[Block() for _ in range(6)])
        self.losses = []

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.blocks(batch), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = torch.randn(8 * 1024, 128, generator=torch.Generator().manual_seed(1))


def fit(*callbacks):
    """Train one epoch; return the losses and the parameters."""
    lightning.seed_everything(0, verbose=False)
    module = Autoencoder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1024))
    return module.losses, [parameter.detach().clone() for parameter in module.parameters()]


plain_losses, plain = fit()
needed = swapkit.memory_stats()["reserved_bytes.all.peak"]
print(f"plain training reserves {needed / MIB:.0f} MiB")

# %%
# Within four fifths
# ------------------

limit = 4 * needed // 5
callback = SwapkitCallback(limit)
losses, parameters = fit(callback)
print(callback.session)
assert callback.session.stats.peak_bytes <= limit
assert losses == plain_losses
assert all(map(torch.equal, parameters, plain))

# %%
# What happened
# -------------

print(callback.session.explain().split("\n\n")[0])
