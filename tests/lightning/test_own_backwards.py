"""Steps with automatic optimization that run a backward themselves give what one device gives."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.lightning.own_backwards import BACKWARDS_ASK, BackwardWatch, OwnBackwardError, step_of
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer
from tests.lightning.several_replicas import on_replicas

OWN = "It runs a backward itself, which adds to the gradients of parameters what a slice has"
WAYS: dict[str, dict[str, Any]] = {
    "replicas": on_replicas(),
    "micro-batches": {"strategy": dpx.DPXStrategy(micro_batches=2), "devices": 1, "accelerator": "cpu"},
}


class Auxiliary(Classifier):
    """Runs a backward of a part of its loss, from its third batch on where that is late."""

    is_late = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(F.dropout(batch[0], 0.1))
        if batch_idx >= 2 or not self.is_late:
            hidden.pow(2).mean().backward(retain_graph=True)
        return F.cross_entropy(hidden, batch[1])


class OfInputs(Classifier):
    """Trains on inputs that are moved along their own gradient, which no parameter gets."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].clone().requires_grad_()
        torch.autograd.backward(F.cross_entropy(self.net(rows), batch[1], reduction="sum"), inputs=[rows])
        moved = checkpoint(self.net, (rows + 0.1 * rows.grad.sign()).detach().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(moved, batch[1])


class DropsGradients(Classifier):
    """As above, by a plain backward, after which ``drop`` takes away what parameters have got; not so in one batch."""

    drop = "zero_grad"
    keeps_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].clone().requires_grad_()
        F.cross_entropy(self.net(rows), batch[1]).backward()
        moved = (rows + 0.1 * rows.grad.sign()).detach()
        if self.global_step != self.keeps_at:
            (self if self.drop == "zero_grad" else self.optimizers()).zero_grad()
        return F.cross_entropy(self.net(moved), batch[1])


def weights_of(model: Classifier, accumulate: int, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    make_trainer(accumulate_grad_batches=accumulate, **options).fit(model, make_loader(), make_loader())
    return {name: value.cpu() for name, value in model.state_dict().items()}


def make_auxiliary(*, is_late: bool) -> Auxiliary:
    torch.manual_seed(0)
    model = Auxiliary()
    model.is_late = is_late
    return model


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_backward_of_a_part_of_the_loss_is_that_of_the_whole_batch(
    way: str, accumulate: int, is_late: bool, recwarn: pytest.WarningsRecorder
) -> None:
    before = torch.autograd.backward
    expected = weights_of(make_auxiliary(is_late=is_late), accumulate, devices=1, accelerator="cpu")
    seen = weights_of(make_auxiliary(is_late=is_late), accumulate, **WAYS[way])
    assert_equal(seen, expected)
    assert any(OWN in str(warning.message) for warning in recwarn)
    assert torch.autograd.backward is before


@pytest.mark.parametrize("way", sorted(WAYS))
def test_gradients_of_inputs_are_those_of_each_slice(way: str, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    expected = weights_of(OfInputs(), 1, devices=1, accelerator="cpu")
    torch.manual_seed(0)
    assert_equal(weights_of(OfInputs(), 1, **WAYS[way]), expected)
    assert not any("whole" in str(warning.message) for warning in recwarn)


def dropping(*, drop: str, keeps_at: int = -1) -> DropsGradients:
    torch.manual_seed(0)
    model = DropsGradients()
    model.drop = drop
    model.keeps_at = keeps_at
    return model


@pytest.mark.parametrize("way", sorted(WAYS))
def test_backwards_whose_gradients_a_step_drops_run_on_slices(way: str, recwarn: pytest.WarningsRecorder) -> None:
    expected = weights_of(dropping(drop="zero_grad"), 1, devices=1, accelerator="cpu")
    assert_equal(weights_of(dropping(drop="zero_grad"), 1, **WAYS[way]), expected)
    assert not any("whole" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize(
    ("drop", "keeps_at", "accumulate"), [("zero_grad", 5, 1), ("zero_grad", -1, 2), ("optimizers", -1, 1)]
)
def test_backwards_whose_gradients_stay_in_a_slice_are_those_of_the_whole_batch(
    way: str, drop: str, keeps_at: int, accumulate: int, recwarn: pytest.WarningsRecorder
) -> None:
    expected = weights_of(dropping(drop=drop, keeps_at=keeps_at), accumulate, devices=1, accelerator="cpu")
    assert_equal(weights_of(dropping(drop=drop, keeps_at=keeps_at), accumulate, **WAYS[way]), expected)
    assert any(OWN in str(warning.message) for warning in recwarn)
    assert not any("is not what it is" in str(warning.message) for warning in recwarn)


def test_only_backwards_that_come_to_a_parameter_are_seen() -> None:
    layer = torch.nn.Linear(2, 1)
    rows = torch.ones(3, 2, requires_grad=True)
    watch = BackwardWatch(refuses=False)
    with BACKWARDS_ASK, step_of(watch, layer):
        layer(rows).sum().backward(inputs=[rows])
        rows.sum().backward()
        assert not watch.seen
        layer(rows).sum().backward()
    assert watch.seen
    layer.zero_grad()
    refusing = BackwardWatch(refuses=True)
    with BACKWARDS_ASK, step_of(refusing, layer), pytest.raises(OwnBackwardError, match="runs a backward itself"):
        layer(rows).sum().backward()
    assert layer.weight.grad is None
    dropping_watch = BackwardWatch(refuses=False)
    with BACKWARDS_ASK, step_of(dropping_watch, layer):
        layer(rows).sum().backward()
    assert dropping_watch.leaves_gradients
    layer.zero_grad(set_to_none=False)
    dropping_watch.refuse_gradients()
    layer.weight.grad.fill_(1.0)
    with pytest.raises(OwnBackwardError):
        dropping_watch.refuse_gradients()
    assert layer.weight.grad is None
