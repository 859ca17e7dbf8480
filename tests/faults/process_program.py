"""What every process of ``test_processes`` runs: ``process_program.py CASE[,CASE...] FOLDER``."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

import lightning_dpx as dpx
from tests.conftest import Classifier, make_trainer
from tests.trainer.process_program import own_loader

DIFFERENT: dict[str, dict[str, Any]] = {  # what rank 1 is given instead
    "gradient_packs": {"gradient_packs": 1},
    "reducer": {"reducer": "colocate"},
    "loss_reduction": {"loss_reduction": "sum"},
    "communication_dtype": {"communication_dtype": "bfloat16"},
}


class Watched(Callback):
    """Leaves a file after some steps, stops when told, and says where the run was when it ended."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder, self.case = folder, case

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            (self.folder / f"running_{trainer.global_rank}").touch()
        if trainer.global_step == 8 and trainer.global_rank == 1:
            if self.case == "raises":
                raise LookupError("on purpose")
            if self.case == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.case == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.case == "stuck":
                time.sleep(10_000)
            if self.case == "killed-elsewhere":
                os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "killed-elsewhere":  # a collective that is not ours
            torch.distributed.all_reduce(torch.ones(3))
        if trainer.global_step == 8 and trainer.global_rank == 0 and self.case == "sigterm-first":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if self.case == "killed-between" and trainer.global_step >= 6 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        print(f"exception at step {trainer.global_step}", flush=True)


def changed(case: str, model: Classifier) -> None:
    """What differs between the models of the ranks."""
    if case == "buffer":
        model.register_buffer("extra", torch.zeros(7))
    elif case == "buffer-missing":
        del model.extra
    elif case == "frozen":
        model.net[0].requires_grad_(False)
    elif case == "dtype":
        model.net[2].double()


def main() -> None:
    """``CASE`` may be several, with commas; of those, one that is refused does not end the process."""
    cases, folder = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    for case in cases:
        print(f"case {case}:", flush=True)
        started = time.monotonic()
        try:
            train(case, folder)
        except dpx.DPXError as error:
            print(f"refused after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}", flush=True)
            if len(cases) == 1:
                raise


def train(case: str, folder: Path) -> None:
    rank = int(os.environ["NODE_RANK"])
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_nodes": 2, "use_distributed_sampler": False, "devices": 2}
    arguments: dict[str, Any] = {"execution": "inline", "timeout": 20.0}
    model, loader = Classifier(optimizer="adam"), own_loader(rank, first=8)
    if case.startswith("replicas"):
        options["devices"], loader = (3, 1)[rank], own_loader(rank, first=11)
        if case != "replicas":
            options["accelerator"], arguments["reducer"] = "sim", case.partition("-")[2]
            options["devices"] = (3, 2)[rank]
    elif case in DIFFERENT and rank == 1:
        options["accelerator"] = "sim"
        arguments |= DIFFERENT[case]
    elif case in DIFFERENT:
        options["accelerator"] = "sim"
    elif case in ("buffer", "buffer-missing", "frozen", "dtype"):
        if case == "buffer-missing":
            model.register_buffer("extra", torch.zeros(7))
        elif case == "buffer":
            model.register_buffer("extra", torch.zeros(3))
        if rank == 1:
            changed(case, model)
    elif case == "accumulate" and rank == 1:
        options["accumulate_grad_batches"] = 3
    elif case == "precision" and rank == 1:
        options["precision"] = "bf16-mixed"
    elif case == "batches" and rank == 1:
        loader = torch.utils.data.DataLoader(loader.dataset, 8, sampler=range(16))
    elif case in ("raises", "stopped", "stuck", "sigterm", "sigterm-first", "killed-between", "killed-elsewhere"):
        options["max_epochs"] = 10_000
        options["callbacks"] = [Watched(folder, case)]
        arguments["timeout"] = 12.0 if case == "stopped" else 30.0
    elif case in ("alone", "taken", "silent"):
        arguments["timeout"] = 4.0
    model.net = nn.Sequential(*model.net)
    trainer = make_trainer(strategy=dpx.DPXStrategy(**arguments), **options)
    trainer.fit(model, loader, loader)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / f"{case}_{rank}.pt")
    print(f"ended well at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
