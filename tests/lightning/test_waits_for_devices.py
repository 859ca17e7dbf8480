"""A step between two looks reads nothing from its devices that one device does not read: each read waits for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import lightning_dpx as dpx
from tests.conftest import Classifier, StepsByHand, make_loader, make_trainer

_STEADY = range(8, 12)  # batches; the one before is looked at, and then the sixteenth
_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::allclose"}


class Reads(TorchDispatchMode):
    """Counts operators for whose result the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _READS:
            self.num += _is_on_device(args[0])
        elif name == "aten::_to_copy":
            self.num += _is_on_device(args[0]) and not _is_on_device(result)
        elif name == "aten::copy_":
            self.num += _is_on_device(args[1]) and not _is_on_device(args[0])
        return result


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "sim"


class CountReads(Callback):
    """Counts those of steady steps, hooks included."""

    def __init__(self, reads: Reads) -> None:
        self.by_batch: list[int] = []
        self._reads = reads

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.by_batch.append(self._reads.num)

    def in_steady_steps(self) -> int:
        return self.by_batch[_STEADY.stop] - self.by_batch[_STEADY.start]


class Plain(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        return F.cross_entropy(self.net(rows), labels)


class ByHand(StepsByHand, Plain):
    pass


class Logs(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max")
        return {"loss": loss, "logits": self.net(batch[0]).detach()}


class Counts(Plain):
    """Keeps numbers and averages of its own."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.register_buffer("mean", torch.zeros(3))
        self.rows = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean = self.mean * 0.9 + self.net(batch[0]).detach().mean(0) * 0.1
        self.running = getattr(self, "running", 0.0) * 0.9 + loss.detach() * 0.1
        self.rows += len(batch[0])
        return loss


class Measures(Plain):
    """Gives numbers and rows to metrics, some of which wait for the device themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.average = MeanMetric()
        self.accuracy = MulticlassAccuracy(3, validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        loss = super().training_step(batch, batch_idx)
        self.average.update(loss)
        self.accuracy.update(self.net(rows), labels)
        self.log("average", self.average)
        return loss


class Collects(Plain):
    """Keeps outputs for the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.by_name: dict[str, torch.Tensor] = {}
        self.register_buffer("queue", torch.zeros(4, 3))
        self.scale = torch.ones(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]) * self.scale.to(batch[0].device)
        self.outputs.append(logits.detach())
        self.by_name["last"] = logits.detach()
        return F.cross_entropy(logits, batch[1])


class Averages(Plain):
    """Has a teacher that follows after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)
        self.student = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.student(batch[0]), self.teacher(batch[0]))

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)


def _reads_of(make: Callable[[], Classifier], **options: Any) -> int:
    torch.manual_seed(0)
    reads = Reads()
    count = CountReads(reads)
    loader = make_loader(num_rows=16 * (_STEADY.stop + 1))
    trainer = make_trainer(accelerator="sim", max_epochs=1, callbacks=[count], limit_val_batches=0, **options)
    with reads:
        trainer.fit(make(), loader, loader)
    return count.in_steady_steps()


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "micro_batches": 2}], ids=["devices", "slices"])
@pytest.mark.parametrize("make", [Plain, ByHand, Logs, Counts, Measures, Collects, Averages])
def test_a_steady_step_waits_for_its_devices_as_often_as_one_device(
    sim: Any, make: Callable[[], Classifier], options: dict[str, Any]
) -> None:
    chosen = dict(options)
    strategy = dpx.DPXStrategy(micro_batches=chosen.pop("micro_batches", 1))
    on_one = _reads_of(make, strategy=dpx.DPXStrategy(), devices=1)
    assert _reads_of(make, strategy=strategy, **chosen) == on_one
