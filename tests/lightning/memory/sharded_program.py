"""One of two processes that train a sharded module, without a plan and with one; prints what it found as JSON."""

import json
import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.memory.sharded_program import WIDTH, Block


class Sharded(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 4))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net[:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(callbacks: list[Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Sharded()
    rows = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(),
        callbacks=callbacks,
        max_epochs=1,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(rows), 512))
    return [parameter.to_local().clone() for parameter in module.parameters()]


def main(rank: int, port: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="tests")
    planner = dpx.ActivationPlanner(budget=0.5)
    without = trained([])
    planned = trained([planner])
    found = {
        "same": all(map(torch.equal, without, planned)),
        "dropped": sorted(planner.plan.dropped | planner.plan.replayed),
        "peaks": [planner.profile.peak, planner.plan.budget] if planner.profile is not None else [],
    }
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
