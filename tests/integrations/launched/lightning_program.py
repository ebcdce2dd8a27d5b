"""Lightning's strategies on two ranks; run by `test_launchers.py`: STRATEGY [LIMIT].

Lightning starts the second rank itself: it runs this file once more.
"""

from __future__ import annotations

import sys
from typing import Any

import swapkit

swapkit.install(device="cpu")

import lightning as L  # noqa: E402, N812 - after the pool is installed; the usual name
import torch  # noqa: E402

from swapkit.integrations.lightning import SwapkitCallback  # noqa: E402
from tests.integrations.launched.digests import tell_digest  # noqa: E402


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(6)]
        self.blocks = torch.nn.Sequential(*blocks)

    def configure_model(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        if mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        for block in self.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.blocks, mesh=mesh["data_parallel"])

    def training_step(self, batch: tuple[torch.Tensor], _batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss: torch.Tensor = (self.blocks(x) - x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.blocks.parameters())


def make_strategy(name: str) -> Any:
    """Return a strategy: DDP, or FSDP2 by Lightning's strategy for device meshes."""
    if name == "ddp":
        return "ddp"
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def main(strategy: str, limit: str | None) -> None:
    rows = torch.randn(32_768, 128, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=1024)
    callback = None if limit is None else SwapkitCallback(limit)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=make_strategy(strategy), max_steps=14, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=True, callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, loader)
    tell_digest(trainer.global_rank, module)
    if callback is not None:
        assert callback.session is not None
        stats = callback.session.stats
        held = 0 < stats.peak_bytes <= stats.budget_bytes
        moved = stats.swapped_out_bytes + stats.recomputed_regions > 0
        sys.stdout.write(f"session {trainer.global_rank} {held} {moved} {stats.steps}\n")
    else:
        peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
        sys.stdout.write(f"peak {trainer.global_rank} {peak_bytes}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
