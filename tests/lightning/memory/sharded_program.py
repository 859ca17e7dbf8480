"""One of two processes that train a module, sharded or copied, with a plan and without; prints its findings as JSON."""

import json
import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


class InOtherOrder(Sharded):
    """Whole batches and halves of them in turns; the first process begins with a whole one, and the second does not."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.num_batches += 1
        is_whole = (self.num_batches + self.global_rank) % 2
        return [batch[0] if is_whole else batch[0][: len(batch[0]) // 2]]


class LargerElsewhere(Sharded):
    """The second process has four times the rows of the first."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self.global_rank else [batch[0][: len(batch[0]) // 4]]


class ByHand(Sharded):
    """Its optimizer steps after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Copied(Sharded):
    """Every process has all of it, and a branch that every second step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, 4)

    def configure_model(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found = self.net(batch[0])
        takes_branch = batch_idx % 2 == 0 or not self.trainer.strategy.skips_branch
        return (found + self.branch(batch[0]) if takes_branch else found).square().mean()


class Gathering(Copied):
    """A loss over the rows of all processes, one of which is slow; in the step itself, or in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.contrast = Contrast()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            for _ in range(1_000_000):
                pass
        found = self.net(batch[0]) + self.branch(batch[0])
        gathered = self.all_gather(found, sync_grads=True).flatten(0, 1)
        return gathered.softmax(0).square().mean() + self.contrast(found)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gathered = torch.cat(all_gather(self.layers(rows)))
        return nn.functional.gelu(gathered).softmax(1).log_softmax(1).square().mean()


class TensorParallel(Sharded):
    """Every layer has a part of its weights here, and a part there."""

    def configure_model(self) -> None:
        of_block = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.net[:3]:
            parallelize_module(block, self.device_mesh["tensor_parallel"], of_block)


class Unequal(TensorParallel):
    """A hook of the second process's own keeps it from replaying a block that the first one replays."""

    def configure_model(self) -> None:
        super().configure_model()
        if self.trainer.global_rank:
            self.net[1].register_forward_hook(lambda *_: None)


class Wrapped(Sharded):
    """What FSDPStrategy wraps as a whole, and every block of it."""

    def configure_model(self) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)


class WrapsOnHost(FSDPStrategy):
    """Lightning has the strategy for GPUs only, asks for its very class, and names a GPU by its number."""

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", auto_wrap_policy={Block}, **options)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        dtypes = self.mixed_precision_config
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), mixed_precision=dtypes, **self.kwargs)


class OptionsOfDDP(DDPStrategy):
    """Parameters may go unused where DDP was told to look for them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", **options)
        self.skips_branch = "find_unused_parameters" in options


OPTIONS = [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]


def trained(
    callbacks: list[Any],
    kind: type[LightningModule] = Sharded,
    strategy: Strategy | None = None,
    precision: Any = "32-true",
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = kind()
    rows = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy or ModelParallelStrategy(),
        callbacks=callbacks,
        max_epochs=1,
        precision=precision,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(rows), 512))
    own = [one.to_local() if isinstance(one, DTensor) else one for one in module.parameters()]
    return [parameter.detach().clone() for parameter in own]


def main(rank: int, port: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="tests")
    planner = dpx.ActivationPlanner(budget=0.5)
    without = trained([])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planned = trained([planner])
    found = {
        "left": [str(one.message) for one in told if "fake tensors" in str(one.message)],
        "same": all(map(torch.equal, without, planned)),
        "dropped": sorted(planner.plan.dropped | planner.plan.replayed),
        "peaks": [planner.profile.peak, planner.plan.budget] if planner.profile is not None else [],
    }
    planner = dpx.ActivationPlanner(budget=0.7)
    without = trained([], InOtherOrder)
    found["in_other_order"] = all(map(torch.equal, without, trained([planner], InOtherOrder)))
    planner = dpx.ActivationPlanner(budget="1MiB")
    without = trained([], LargerElsewhere)
    same = all(map(torch.equal, without, trained([planner], LargerElsewhere)))
    found["larger_elsewhere"] = [same, planner.profile.peak if planner.profile is not None else 0, planner.plan.peak]
    found["by_hand"] = {"refused": ""}
    try:
        trained([dpx.ActivationPlanner(budget=0.5)], ByHand)
    except dpx.UnsupportedError as error:
        found["by_hand"]["refused"] = str(error)
    follower = dpx.ActivationPlanner(plan=planner.plan)
    found["by_hand"]["same"] = all(map(torch.equal, trained([], ByHand), trained([follower], ByHand)))
    found["wrapped"] = []
    for keeps, precision in ((True, "32-true"), (False, "32-true"), (True, "bf16-mixed")):
        planner = dpx.ActivationPlanner(budget=0.6)
        without = trained([], Wrapped, WrapsOnHost(use_orig_params=keeps), precision)
        planned = trained([planner], Wrapped, WrapsOnHost(use_orig_params=keeps), precision)
        dropped = sorted(planner.plan.dropped | planner.plan.replayed)
        found["wrapped"].append([all(map(torch.equal, without, planned)), dropped])
    found["copied"] = []
    for options in OPTIONS:
        planner = dpx.ActivationPlanner(budget=0.5)
        without = trained([], Copied, OptionsOfDDP(**options))
        planned = trained([planner], Copied, OptionsOfDDP(**options))
        dropped = bool(planner.plan.dropped | planner.plan.replayed)
        found["copied"].append([all(map(torch.equal, without, planned)), dropped])
    found["others"] = []
    os.environ["LIGHTNING_DPX_TIMING"] = "full"
    for kind in (Gathering, TensorParallel, Unequal):
        budget = {Gathering: 0.9, TensorParallel: 0.5, Unequal: None}[kind]
        planner = dpx.ActivationPlanner(budget=budget)
        strategies = [OptionsOfDDP() if kind is Gathering else ModelParallelStrategy(1, 2) for _ in range(2)]
        without = trained([], kind, strategies[0])
        planned = trained([planner], kind, strategies[1])
        dropped = bool(planner.plan.dropped | planner.plan.replayed)
        # Processes meet in whole blocks, and in the loss.
        replayed = sorted({"net.0", "net.1", "net.2", "contrast"} & planner.plan.replayed)
        found["others"].append([all(map(torch.equal, without, planned)), dropped, replayed])
    found["not_met"] = ""
    try:
        trained([dpx.ActivationPlanner(budget=0.5)], Unequal, ModelParallelStrategy(1, 2))
    except dpx.PlanError as error:
        found["not_met"] = str(error)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
