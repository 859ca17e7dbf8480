"""Trains with Ray Train on a cluster of this machine: ``ray_program.py CASE FOLDER``."""

import os
import sys
from pathlib import Path
from typing import Any

# Before Ray is imported: it would send a report of the run to its makers.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import ray.train
import torch
from lightning.pytorch import Callback
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer

import lightning_dpx as dpx
from tests.conftest import Classifier, make_trainer
from tests.lightning.processes.process_program import Checked, own_loader


class Fails(Callback):
    """Rank 1 ends with an error in the second epoch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            raise ValueError("lost on purpose")


def train(config: dict[str, Any]) -> None:
    """What every worker does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Classifier(optimizer="adam")
    options: dict[str, Any] = {"strategy": "dpx", "callbacks": [RayTrainReportCallback()]}
    checkpoint = ray.train.get_checkpoint()
    if config["case"] == "environment":
        torch.manual_seed(0)
        model = Checked(optimizer="adam")
        options["strategy"] = dpx.DPXStrategy(execution="inline", timeout=120.0)
        options["plugins"] = [RayLightningEnvironment()]
    elif checkpoint is None:
        options["callbacks"].append(Fails())
    trainer = make_trainer(devices=2, precision="64-true", use_distributed_sampler=False, **options)
    assert trainer.local_rank == ray.train.get_context().get_local_rank()
    loader = own_loader(trainer.global_rank, first=8)
    if checkpoint is None:
        trainer.fit(model, loader, loader)
        return
    with checkpoint.as_directory() as found:
        trainer.fit(model, loader, loader, ckpt_path=f"{found}/{RayTrainReportCallback.CHECKPOINT_NAME}")
    # A file, as not all that workers print has reached this program when it ends.
    Path(config["folder"], f"rank {trainer.global_rank} went on").touch()


def main() -> None:
    case, folder = sys.argv[1:]
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    result = TorchTrainer(
        train,
        train_loop_config={"case": case, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=case, storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.metrics is not None
    assert result.metrics["epoch"] == 1
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as found:
        saved = torch.load(f"{found}/{RayTrainReportCallback.CHECKPOINT_NAME}", weights_only=True)
    torch.save(saved["state_dict"], f"{folder}/{case}.pt")
    ray.shutdown()
    print("ended well", flush=True)


if __name__ == "__main__":
    main()
