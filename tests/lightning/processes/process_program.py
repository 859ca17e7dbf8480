"""What every process of ``test_processes`` runs: ``process_program.py CASE FOLDER``."""

import atexit
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer


class Running(Callback):
    """Leaves a file once a few steps are done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            self.path.touch()


class ComesLast(Callback):
    """Rank 1 goes on to its backward when rank 0 has come to its own, and does more before.

    Args:
        path: Of a file by which they tell.
    """

    def __init__(self, path: Path) -> None:
        self.store = torch.distributed.FileStore(str(path), 2)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        here = f"step {trainer.global_step}"
        if trainer.global_rank == 0:
            self.store.set(here, "")
        else:
            self.store.wait([here])
            time.sleep(0.3)  # longer than the small backward of rank 0


class Checked(Classifier):
    """Ranks count the replicas of all processes inside a step, and the processes outside."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.world_size == 4
        assert 0 <= self.global_rank < 4
        self.log("rows_of_all", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        assert self.trainer.world_size == 2
        assert self.trainer.strategy.broadcast(self.global_rank) == 0
        assert self.all_gather(torch.tensor(self.global_rank)).tolist() == [0, 1]
        assert self.trainer.strategy.reduce(torch.tensor(float(self.global_rank)), reduce_op="sum") == 1


class Summed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 16


class Gathers(Classifier):
    """Meets the other process in its step, which a rehearsal does as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        means = self.all_gather(batch[0].mean(), sync_grads=False)
        return super().training_step(batch, batch_idx)["loss"] + 0 * means.sum()


class Meets(Checked):
    """Every collective once inside a step, among the replicas of both processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy, rank = self.trainer.strategy, self.global_rank
        assert self.all_gather({"rank": torch.tensor(float(rank))})["rank"].tolist() == [0, 1, 2, 3]
        assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum").item() == 6
        assert strategy.reduce(torch.tensor(float(rank)), reduce_op="max").item() == 3
        assert strategy.broadcast(f"from {rank}", src=2) == "from 2"
        assert strategy.reduce_boolean_decision(rank == 3, all=False)
        assert not strategy.reduce_boolean_decision(rank == 3)
        strategy.barrier()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.all_gather(torch.tensor(float(self.global_rank))).tolist() == [0, 1, 2, 3]
        return super().validation_step(batch, batch_idx)


class Contrastive(Classifier):
    """Compares every row with every other of the whole batch; of rows that other replicas have, gradients flow back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = F.normalize(self.net(batch[0]), dim=-1)
        everyone = self.all_gather(own, sync_grads=True)
        everyone = everyone.flatten(0, 1) if everyone.dim() == 3 else everyone
        labels = torch.arange(len(own)) + self.global_rank * len(own)
        return F.cross_entropy(own @ everyone.t() / 0.1, labels)


class Centered(Classifier):
    """Every row minus the mean of the whole batch, with gradients through that mean; slices may differ in size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        totals = torch.cat([logits.sum(0), logits.new_tensor([float(len(logits))])])
        if self.trainer.world_size > 1:
            totals = self.all_gather(totals, sync_grads=True).sum(0)
        return F.cross_entropy(logits - totals[:-1] / totals[-1].detach(), batch[1])


class OneRunsOut(Classifier):
    """Rank 1 has no memory left in its second step.

    Args:
        case: Whether it meets the other process, and whether before or after that; or whether it is out of memory as
            soon as the step on all rows is tried.
    """

    def __init__(self, case: str) -> None:
        super().__init__(optimizer="adam")
        self.case = case
        self.failures = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.case in ("runs-out-late", "runs-out-tried"):
            self.all_gather(batch[0].mean(), sync_grads=False)
        if self.case == "runs-out-tried" and torch.distributed.get_rank() == 1 and len(batch[0]) == 4:
            raise torch.OutOfMemoryError("for the test")
        if self.global_step and torch.distributed.get_rank() == 1 and self.failures:
            self.failures = 0
            raise torch.OutOfMemoryError("for the test")
        if self.case == "runs-out-early":
            self.all_gather(batch[0].mean(), sync_grads=False)
        return super().training_step(batch, batch_idx)


WITH_MEETINGS: dict[str, type[Classifier]] = {
    "meets": Meets, "merged": Contrastive, "contrastive": Contrastive, "centered-uneven": Centered
}  # fmt: skip


# Cases that are compared with one device: in float64, where the order of additions changes next to nothing.
PARITY = (
    "sum-late", "joined", "runs-out-alone",
    "even", "colocate", "uneven", "sum-accumulated", "sparse-uneven", "sparse-sum", "meets", "merged", "contrastive",
    "centered-uneven", "batchnorm", "batchnorm-uneven", "batchnorm-merged",
)  # fmt: skip


class Embedded(Classifier):
    """Sparse gradients of two tables, one of them without any in most steps of most processes."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.table, self.rare = nn.Embedding(40, 8, sparse=True), nn.Embedding(9, 8, sparse=True)
        self.summed = case == "sparse-sum"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        inputs = rows + self.table((rows[:, 0].abs() * 10).long())
        large = rows[:, 1] > 1.5
        if large.any():
            inputs = inputs + self.rare((rows[:, 1].abs() * 2).long().clamp(max=8)) * large[:, None]
        loss = F.cross_entropy(self.net(inputs), labels, reduction="sum" if self.summed else "mean")
        return loss / 16 if self.summed else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.table.weight.grad.is_sparse

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SecondOrder(Classifier):
    """By hand, the gradient of the gradients' norm."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        self.manual_backward(sum(gradient.square().sum() for gradient in gradients))


def own_loader(rank: int, first: int) -> DataLoader[Any]:
    """Of every sixteen rows the ``first`` ones for rank 0 and the rest for rank 1."""
    rows, labels = make_loader(48).dataset.tensors  # type: ignore[attr-defined]
    parts = [slice(at, at + first) if rank == 0 else slice(at + first, at + 16) for at in (0, 16, 32)]
    chosen = TensorDataset(torch.cat([rows[part] for part in parts]), torch.cat([labels[part] for part in parts]))
    return DataLoader(chosen, first if rank == 0 else 16 - first)


LATE = ((1, 1), (15, 1), (8, 8))  # rows of both ranks, batch by batch


def late_batches(rank: int | None = None) -> list[Any]:
    """Batches of a rank, or of both together."""
    data: Any = make_loader(48).dataset
    batches, start = [], 0
    for sizes in LATE:
        ends = (start, start + sizes[0], start + sum(sizes))
        own = slice(ends[0], ends[-1]) if rank is None else slice(ends[rank], ends[rank + 1])
        batches.append(data[own])
        start = ends[-1]
    return batches


def planned_ddp(case: str, folder: Path) -> None:
    """Two DDP processes, with the planner as a callback or without."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)) for _ in range(6)))
    module = Classifier()
    module.net = nn.Sequential(model, nn.Linear(8, 3))
    planner = dpx.ActivationPlanner(budget=0.6)
    callbacks = [planner] if case == "planned" else []
    trainer = make_trainer(strategy="ddp", devices=1, num_nodes=2, callbacks=callbacks, use_distributed_sampler=False)
    trainer.fit(module, own_loader(trainer.global_rank, first=8), make_loader(48))
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    if callbacks:
        assert planner.plan is not None
        assert not planner.plan.keeps_all
    torch.save(state, folder / f"{case}_{trainer.global_rank}.pt")
    print("ended well", flush=True)


def model_of(case: str) -> Any:
    """The model of a case, with the weights that a test gives it on one device."""
    model = Checked(optimizer="adam")
    if case == "sum-accumulated":
        summed = Summed(optimizer="sgd")
        summed.load_state_dict(model.state_dict())
        return summed
    if case == "second-order":
        return SecondOrder()
    if case.startswith("runs-out"):
        out = OneRunsOut(case)
        out.load_state_dict(model.state_dict())
        return out
    kinds: dict[str, Any] = {
        **WITH_MEETINGS,
        "sum-late": partial(Summed, optimizer="sgd"),  # with loss_reduction="auto"
        "shapes": Gathers,
    }
    make = kinds.get(case)
    if case.startswith("batchnorm"):
        make = partial(Classifier, norm=True)
    elif case.startswith("sparse"):
        make = partial(Embedded, case)
    if make is None:
        return model
    torch.manual_seed(0)
    return make()


def trainer_options(case: str) -> dict[str, Any]:
    """What a case asks of the Trainer."""
    options: dict[str, Any] = {"num_nodes": 2, "use_distributed_sampler": case == "dealt"}
    if case in PARITY:
        options["precision"] = "64-true"
    if case == "colocate":
        options["accelerator"] = "sim"
    elif case == "sum-accumulated":
        options["accumulate_grad_batches"] = 2
    elif case.startswith("batchnorm"):
        options["sync_batchnorm"] = True
    elif case in ("joined", "checkpoint"):  # nothing tells Lightning of another process
        del options["num_nodes"]
    elif case == "endless":
        options["max_epochs"] = 10_000
    return options


def strategy_arguments(case: str) -> dict[str, Any]:
    """What a case asks of the strategy."""
    arguments: dict[str, Any] = {"execution": "inline", "timeout": 120.0}
    if case == "colocate":
        arguments["reducer"] = "colocate"
    elif case == "sum-accumulated":
        arguments["loss_reduction"] = "sum"
    elif case in ("merged", "batchnorm-merged"):
        arguments["execution"] = "auto"
    elif case.startswith("sparse"):
        arguments["loss_reduction"] = "sum" if case == "sparse-sum" else "mean"
    elif case == "shapes":
        arguments["memory_budget"] = "auto"
    elif case == "runs-out-tried":
        arguments |= {"memory_budget": "auto", "verify": "off"}
    elif case.startswith("runs-out"):
        arguments["on_oom"] = "replan"
    return arguments


def loader_of(case: str, rank: int, shared: DataLoader[Any]) -> DataLoader[Any]:
    """The batches of a rank; ``shared`` has the rows of both."""
    if case == "dealt":  # by Lightning's sampler, which always shuffles
        return shared
    if case == "sum-late":  # neither rank sees one at first, and then only rank 0
        return DataLoader(late_batches(rank), None)
    own = own_loader(rank, first=10 if case.endswith("uneven") else 8)
    if case == "shapes":  # rank 1 has a larger batch in the second step, and rank 0 has not
        sizes = (8, 8, 4) if rank == 0 else (4, 8, 8)
        return DataLoader([own.dataset[:rows] for rows in sizes], None)
    return own


def fit(trainer: Any, model: Any, loader: DataLoader[Any]) -> None:
    """Trains; says how long a refusal took."""
    started = time.monotonic()
    try:
        trainer.fit(model, loader, loader)
    except dpx.ReplicationError:
        print(f"refused after {time.monotonic() - started:.1f} s", flush=True)
        raise


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    atexit.register(lambda: print(f"a process group at the end: {torch.distributed.is_initialized()}", flush=True))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if case in ("planned", "unplanned"):
        planned_ddp(case, folder)
        return
    shared, model = make_loader(48, 8), model_of(case)
    if case == "joined":
        torch.distributed.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=2)
    options = trainer_options(case)
    monitor = dpx.DeviceThroughputMonitor(save_to=folder / "waits.csv", every_n_steps=1)
    if case.startswith("waits"):
        options["callbacks"] = [ComesLast(folder / "store"), monitor]
        if case == "waits-alone" and os.environ["NODE_RANK"] == "1":
            options["callbacks"].pop()
    trainer = make_trainer(strategy=dpx.DPXStrategy(**strategy_arguments(case)), devices=2, **options)
    rank = trainer.global_rank
    loader = loader_of(case, rank, shared)
    if case == "different":
        model = Classifier()
        if rank == 1:
            model.net[2] = nn.Linear(16, 5)
    elif case == "endless":
        trainer.callbacks.append(Running(folder / f"running_{rank}"))
    fit(trainer, model, loader)
    if case == "dealt":
        sampler = trainer.train_dataloader.sampler
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (2, rank, 24)
    if case.startswith("waits"):
        found = {"waiting_ms": monitor.waiting_ms, "last_process": monitor.last_process}
        (folder / f"waits_{rank}.json").write_text(json.dumps(found))
    if case == "checkpoint":
        trainer.save_checkpoint(folder / "half.ckpt")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / f"{case}_{rank}.pt")
    if case == "joined":  # whoever makes a group ends it
        torch.distributed.destroy_process_group()
    print("ended well", flush=True)


if __name__ == "__main__":
    main()
