"""What both processes of a test of case 16 run: ``none_program.py FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer


class PartlyNone(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_rank == 1 else F.cross_entropy(self.net(batch[0]), batch[1])


def main() -> None:
    torch.manual_seed(0)
    model, (rows, labels) = PartlyNone(), next(iter(make_loader()))
    strategy = dpx.DPXStrategy(verify="off", execution="inline", timeout=120.0)
    trainer = make_trainer(strategy=strategy, devices=2, num_nodes=2, max_epochs=1, use_distributed_sampler=False)
    half = slice(0, 8) if trainer.global_rank == 0 else slice(8, 16)
    batches: Any = DataLoader([(rows[half], labels[half])] * 3, batch_size=None)
    trainer.fit(model, batches, batches)
    torch.save(model.state_dict(), Path(sys.argv[1]) / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
