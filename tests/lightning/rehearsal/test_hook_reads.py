"""Which attributes hooks read, by the names in their code, and what becomes of what steps keep there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning.rehearsal.hook_reads import HookNames
from tests.conftest import make_loader, make_trainer

NAMES = (
    "replaced",
    "after",
    "by_helper",
    "by_parent",
    "only_set",
    "of_validation",
    "in_step",
    "early",
    "by_callback",
    "on_object",
)


class Base(LightningModule):
    def on_train_epoch_end(self) -> None:
        self.log("parent", self.by_parent)

    def on_train_epoch_start(self) -> None:
        self.log("replaced", self.replaced)


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.on_fit_end = lambda: self.on_object  # type: ignore[method-assign]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.in_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.only_set = None
        self.log("after", self.after)
        self.helper()

    def helper(self) -> None:
        self.log("helper", max(row.by_helper for row in [self]))

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()

    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("validation", self.of_validation)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.early.retain_grad()


class Looks(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("callback", pl_module.by_callback)


def test_names_are_those_that_hooks_and_their_methods_load() -> None:
    module = Hooked()
    module.trainer = make_trainer(callbacks=[Looks()])
    attributes = [(f"net.{name}" if name == "after" else name, 0) for name in NAMES]
    reads = HookNames(module, "training_step").among(attributes)
    assert reads.paths == {"net.after", "by_helper", "by_parent", "early", "by_callback", "on_object"}
    assert reads.joined == reads.paths - {"early"}, "its graph may still be used"
    reads = HookNames(module, "validation_step").among(attributes)
    assert "of_validation" in reads.paths
    assert "net.after" not in reads.paths


class ReadsWeights(LightningModule):
    def on_train_epoch_end(self) -> None:
        self.log("norm", self.net.weight.norm())
        layer = self.net
        self.log("bias", layer.bias.norm())
        self.log("margin", self.trainer.lightning_module.head.margin)


def test_names_of_parts_are_not_those_of_the_module() -> None:
    module = ReadsWeights()
    module.trainer = make_trainer()
    paths = ["weight", "net.weight", "body.net.weight", "other.weight", "net.bias", "margin", "head.margin"]
    reads = HookNames(module, "training_step").among((path, 0) for path in paths)
    assert reads.paths == {"net.weight", "body.net.weight", "net.bias", "head.margin"}


class Keeps(LightningModule):
    """Rows (B, 8) to logits (B, 3); a hook reads what a step keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.keep(batch[0])
        return F.cross_entropy(self.net(self.features), batch[1])

    def keep(self, rows: torch.Tensor) -> None:
        self.features = rows.clone().requires_grad_()

    def read(self) -> Any:
        return self.features.grad.abs().sum()

    def on_after_backward(self) -> None:
        self.seen.append(float(self.read()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KeepsInDict(Keeps):
    def keep(self, rows: torch.Tensor) -> None:
        self.features = rows
        self.kept = {"rows": rows * 2}

    def read(self) -> Any:
        return self.kept["rows"].sum()


@pytest.mark.parametrize("kind", [Keeps, KeepsInDict])
def test_what_they_read_and_slices_cannot_give_is_a_difference(hardware: str, kind: Callable[[], Any]) -> None:
    def seen(**options: Any) -> list[float]:
        torch.manual_seed(0)
        model = kind()
        make_trainer(max_epochs=1, **options).fit(model, make_loader(23, 8))
        return model.seen

    with pytest.warns(UserWarning, match="self.(features|kept), which hooks read, is of one slice"):
        ours = seen(strategy=dpx.DPXStrategy(execution="inline", verify="first"), devices=2, accelerator=hardware)
    assert ours == pytest.approx(seen())
