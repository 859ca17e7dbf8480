"""Optimizers that change tensors which are no parameters of the module."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning.manual.acts_once import held_optimizers
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, seeded


class Temperature(Classifier):
    """Divides its logits by a temperature that is a plain tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = torch.zeros(1, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = self.log_temperature.exp().to(self.device)
        return F.cross_entropy(self.net(batch[0]) / scale, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), self.log_temperature], lr=0.1)

    def found(self) -> dict[str, torch.Tensor]:
        return {**self.state_dict(), "temperature": self.log_temperature.detach()}


class TwoOptimizers(Temperature):
    """As soft actor-critic trains its temperature: by hand, with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        mine = torch.optim.SGD(self.parameters(), lr=0.1)
        return [mine, torch.optim.Adam([self.log_temperature], lr=0.01, eps=1e-4)]


class PlainList(Temperature):
    """Keeps a layer in a plain list, where Lightning does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        layer = self.layers[0].to(self.device)
        return F.cross_entropy(self.net(layer(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *self.layers[0].parameters()], lr=0.1)

    def found(self) -> dict[str, torch.Tensor]:
        return {**self.state_dict(), "layer": self.layers[0].weight.detach()}


def trained(kind: type[Any], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    make_trainer(max_epochs=1, **options).fit(model, make_loader(), make_loader())
    return {name: value.cpu().clone() for name, value in model.found().items()}


@pytest.mark.parametrize("kind", [Temperature, TwoOptimizers, PlainList])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_step_that_trains_a_loose_tensor_gets_its_batches_whole(kind, num_replicas, execution) -> None:
    strategy = dpx.DPXStrategy(execution=execution)
    with pytest.warns(UserWarning, match="tensors that are no parameters of the module"):
        ours = trained(kind, devices=num_replicas, strategy=strategy)
    assert_equal(ours, trained(kind))


def test_a_loose_tensor_is_named(sim) -> None:
    with pytest.warns(UserWarning, match=r"no parameters of the module \(self.log_temperature\), so"):
        ours = trained(Temperature, devices=2, accelerator="sim", strategy=dpx.DPXStrategy())
    assert_equal(ours, trained(Temperature))


def test_parameters_of_the_module_are_not_loose(recwarn) -> None:
    strategy = dpx.DPXStrategy(execution="inline", reducer="colocate")
    make_trainer(max_epochs=1, devices=2, strategy=strategy).fit(seeded(), make_loader(), make_loader())
    assert not [one for one in recwarn if "no parameters of the module" in str(one.message)]


def test_large_containers_are_not_searched_for_optimizers_in_every_step() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.few, module.vocabulary = [optimizer], [*range(200_000), optimizer]  # type: ignore[assignment]
    assert held_optimizers(module) == [optimizer]


class TrainsShift(Classifier):
    """Adds a tensor that is no parameter, and moves it along its gradient in a hook."""

    def __init__(self, place: str) -> None:
        super().__init__()
        shift = torch.zeros(3, requires_grad=True)
        if place == "buffer":
            self.register_buffer("shift", shift)
        elif place == "attribute":
            self.shift = shift
        else:
            self.shifts = [shift]
        self.place = place

    def the_shift(self) -> torch.Tensor:
        return self.shifts[0] if self.place == "list" else self.shift

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.the_shift(), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        shift = self.the_shift()
        with torch.no_grad():
            shift -= 0.1 * shift.grad
        shift.grad = None


@pytest.mark.parametrize("place", ["buffer", "attribute", "list"])
@pytest.mark.parametrize("options", [{"execution": "inline"}, {"execution": "threads"}, {"micro_batches": 2}])
def test_a_tensor_that_a_hook_trains_gets_the_gradients_of_whole_batches(place: str, options: dict[str, Any]) -> None:
    def trained(**trainer: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = TrainsShift(place)
        make_trainer(accelerator="cpu", **trainer).fit(model, make_loader(), make_loader())
        return {**model.state_dict(), "shift": model.the_shift().detach()}

    expected = trained(devices=1)
    number = 1 if "micro_batches" in options else 2
    with pytest.warns(UserWarning, match="gives gradients to self.shifts?, which is no parameter"):
        seen = trained(strategy=dpx.DPXStrategy(**options), devices=number)
    assert_equal(seen, expected)
