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
from tests.lightning.processes.process_program import own_loader

DIFFERENT: dict[str, dict[str, Any]] = {  # what rank 1 is given instead
    "gradient_buckets": {"gradient_buckets": 1},
    "reducer": {"reducer": "colocate"},
    "loss_reduction": {"loss_reduction": "sum"},
    "communication_dtype": {"communication_dtype": "bfloat16"},
}


TOLD: dict[str, tuple[int, str, int]] = {  # the rank that gets SIGTERM (-1: all), in which hook, at which step
    "sigterm": (1, "on_train_batch_end", 7),
    "sigterm-first": (0, "on_train_batch_end", 7),
    "sigterm-all": (-1, "on_train_batch_end", 7),
    "sigterm-forward": (1, "on_train_batch_start", 7),
    "sigterm-update": (0, "on_before_optimizer_step", 6),
    "sigterm-accumulated": (1, "on_train_batch_start", 3),
    "sigterm-manual": (1, "on_train_batch_start", 2),
    "sigterm-last": (1, "on_train_epoch_end", 6),
    "sigterm-sanity": (1, "on_validation_batch_start", 0),
    "sigterm-validation": (1, "on_validation_batch_start", 3),
    "sigterm-uneven": (1, "on_validation_batch_start", 3),
    "sigterm-validate": (1, "on_validation_batch_start", 0),
    "sigterm-test": (1, "on_test_batch_start", 0),
    "sigterm-predict": (0, "on_predict_batch_start", 0),
}


class Told(Callback):
    """Sends the signal once, and says where the run was when it ended; all ranks must be there to say so."""

    def __init__(self, case: str) -> None:
        self.rank, self.hook, self.step = TOLD[case]
        self.batches, self.sent = 0, False

    def _reach(self, hook: str, trainer: Any) -> None:
        here = (hook, trainer.global_step) == (self.hook, self.step)
        if here and self.rank in (-1, trainer.global_rank) and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._reach("on_train_batch_start", trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._reach("on_before_optimizer_step", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._reach("on_train_batch_end", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._reach("on_train_epoch_end", trainer)

    def on_validation_start(self, *_: Any) -> None:
        self.batches = 0

    def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.batches += 1
        self._reach("on_validation_batch_start", trainer)

    def on_test_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.batches += 1
        self._reach("on_test_batch_start", trainer)

    def on_predict_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.batches += 1
        self._reach("on_predict_batch_start", trainer)

    def on_exception(self, trainer: Any, _: Any, exception: BaseException) -> None:
        trainer.strategy.barrier("the end")
        print(f"{type(exception).__name__} at step {trainer.global_step}, batch {self.batches}", flush=True)


class ByHand(Classifier):
    """Steps in every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


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
            if self.case == "stuck":
                time.sleep(10_000)
            if self.case == "killed-elsewhere":
                os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "killed-elsewhere":  # a collective that is not ours
            torch.distributed.all_reduce(torch.ones(3))

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
        except SystemExit as stop:
            if len(cases) == 1:
                raise
            print(f"exit status {stop.code}", flush=True)


def train(case: str, folder: Path) -> None:
    rank = int(os.environ["NODE_RANK"])
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_nodes": 2, "use_distributed_sampler": False, "devices": 2}
    arguments: dict[str, Any] = {"execution": "inline", "timeout": 120.0}
    model, loader = Classifier(optimizer="adam"), own_loader(rank, first=8)
    if case.startswith("replicas"):
        options["devices"], loader = (3, 1)[rank], own_loader(rank, first=11)
        options["precision"] = "64-true"
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
    elif case in ("endless", "raises", "stopped", "stuck", "killed-between", "killed-elsewhere"):
        options["max_epochs"] = 10_000
        options["callbacks"] = [Watched(folder, case)]
        arguments["timeout"] = 20.0 if case == "stopped" else 120.0
    elif case in ("alone", "taken", "silent"):
        arguments["timeout"] = 4.0
    evaluated, run = loader, "fit"
    if case in TOLD:
        options["max_epochs"] = 2 if case == "sigterm-last" else 10_000
        options["callbacks"], arguments["timeout"] = [Told(case)], 120.0
        options["accumulate_grad_batches"] = 3 if case == "sigterm-accumulated" else 1
        run = case.partition("-")[2] if case in ("sigterm-validate", "sigterm-test", "sigterm-predict") else "fit"
        fewer = 4 if case in ("sigterm-uneven", "sigterm-validate") and rank == 1 else 0
        evaluated = torch.utils.data.DataLoader(loader.dataset, 1, sampler=range(12 - fewer))
        signal.signal(signal.SIGTERM, lambda *_: print("the user's own handler", flush=True))
    if case == "sigterm-manual":
        model = ByHand()
    model.net = nn.Sequential(*model.net)
    trainer = make_trainer(strategy=dpx.DPXStrategy(**arguments), **options)
    if run == "fit":
        trainer.fit(model, loader, evaluated)
    else:
        getattr(trainer, run)(model, evaluated)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / f"{case}_{rank}.pt")
    print(f"ended well at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
