"""What torchrun starts, and starts again: ``restart_program.py FOLDER``; where FOLDER has a ``kill``, one is lost."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer

NUM_EPOCHS = 4


class KilledOnce(Callback):
    """The process of the last rank is lost in the middle of the third epoch, if nothing was lost before.

    Args:
        order: A file, which is there as long as a process shall be killed.
    """

    def __init__(self, order: Path) -> None:
        self.order = order

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        is_last = trainer.strategy.global_rank == trainer.world_size - 1
        if is_last and trainer.current_epoch == 2 and self.order.exists():
            self.order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saved = ModelCheckpoint(folder, save_last=True, every_n_epochs=1, save_on_train_epoch_end=True)
    trainer = make_trainer(
        strategy=dpx.DPXStrategy(execution="inline", timeout=60.0),
        devices=2,
        num_nodes=2,
        max_epochs=NUM_EPOCHS,
        enable_checkpointing=True,
        callbacks=[saved, KilledOnce(folder / "kill")],
    )
    last = folder / "last.ckpt"
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    model = Classifier(optimizer="adam")
    resumed = str(last) if last.exists() else None
    trainer.fit(model, make_loader(48, 4), ckpt_path=resumed)
    if trainer.strategy.global_rank == 0:
        torch.save(model.state_dict(), folder / "weights.pt")
    print(f"ended well in attempt {attempt}, resumed: {resumed is not None}", flush=True)


if __name__ == "__main__":
    main()
