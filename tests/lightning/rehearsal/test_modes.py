"""Parts that are in training mode, or trained, at one time and not at another: what is checked follows them."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer
from tests.lightning.rehearsal.test_rehearsal import Model


class Normalized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


class NormalizedImages(Model):
    """Of an image batch norm has many values for each channel: one row is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)
        )


def fitted(kind: type[Model], batch_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    make_trainer(max_epochs=1, limit_train_batches=4, **options).fit(model, make_loader(4 * batch_size, batch_size))
    return model


@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_batch_norm_that_fails_on_slices_of_one_row_has_its_batches_whole(execution: Any, recwarn: Any) -> None:
    model = fitted(Normalized, 2, devices=2, strategy=dpx.DPXStrategy(execution=execution))
    said = "\n".join(str(warning.message) for warning in recwarn)
    assert "Batch norm (net.1) is trained on slices of one row, and there it raises ValueError" in said
    assert "give batches at least two rows for each device" in said
    expected = fitted(Normalized, 2)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])


def test_batch_norm_that_can_do_with_one_row_is_left_alone(recwarn: Any) -> None:
    fitted(NormalizedImages, 2, devices=2, strategy=dpx.DPXStrategy(execution="inline"))
    assert "whole" not in "\n".join(str(warning.message) for warning in recwarn)


class Frozen(Model):
    """A backbone, as BackboneFinetuning wants it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[:2]
        self.head = self.net[2]
        del self.net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_a_step_is_checked_anew_once_parts_are_unfrozen(caplog: pytest.LogCaptureFixture) -> None:
    weights = []
    for options in ({}, {"devices": 2, "strategy": dpx.DPXStrategy(execution="inline")}):
        torch.manual_seed(0)
        model = Frozen()
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)
        make_trainer(max_epochs=4, limit_train_batches=2, callbacks=[finetuning], **options).fit(
            model, make_loader(32, 16)
        )
        weights.append(model.backbone[0].weight.detach())
    torch.testing.assert_close(*weights)
    said = [record.getMessage() for record in caplog.records if "dpx: checked on" in record.getMessage()]
    assert ["2 gradients" in text for text in said] == [True, False], "frozen first, and once more when they are not"
    assert "4 gradients" in said[1]


class Tagged(torch.Tensor):
    """A class of tensors with the constructor of torch."""


class AttendsByPlace(Model):
    """Weights of the rows by their place in the batch, as residual-based attention keeps them: no slice has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("attention", torch.ones(16))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = Tagged(batch[0]).as_subclass(torch.Tensor)
        losses = F.cross_entropy(self.net(rows), batch[1], reduction="none")
        attention = self.attention[: len(losses)]
        attention.lerp_(losses.detach() / losses.max().detach(), 0.5)
        return (attention * losses).mean()


def test_a_step_that_makes_tensors_of_its_own_class_is_checked(recwarn: Any) -> None:
    """Under the modes that watch a rehearsal it raised, and what slices cannot give was not seen."""
    options = {"devices": 2, "strategy": dpx.DPXStrategy(execution="inline", verify="first")}
    model = fitted(AttendsByPlace, 16, **options)
    said = "\n".join(str(warning.message) for warning in recwarn)
    assert "training_step gets all of its batches whole" in said
    expected = fitted(AttendsByPlace, 16)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])
