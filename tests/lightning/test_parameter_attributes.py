"""What the user and libraries keep on parameters is there on every replica, and what a step puts there has all rows."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import Classifier, StepsByHand, assert_equal, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


def weights_after_fit(model: Classifier, **options: Any) -> dict[str, torch.Tensor]:
    make_trainer(**options).fit(model, make_loader(48), make_loader(6))
    return {name: value.cpu() for name, value in model.state_dict().items()}


def seeded(kind: type[Classifier]) -> Classifier:
    torch.manual_seed(0)
    return kind()


class StaysNear(Classifier):
    """A penalty on the distance from the weights at the end of the last epoch, which it keeps on them."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.importance = {"now": 0.01}  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        for parameter in self.parameters():
            loss = loss + parameter.importance["now"] * parameter.sum()
            if hasattr(parameter, "old"):
                loss = loss + parameter.strength * (parameter - parameter.old).square().sum()
        return loss

    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.old = parameter.detach().clone()  # type: ignore[attr-defined]
            parameter.strength = 0.1 * (self.current_epoch + 1)  # type: ignore[attr-defined]


def test_what_hooks_set_on_parameters_is_there_on_every_replica(execution) -> None:
    expected = weights_after_fit(seeded(StaysNear), max_epochs=3)
    for devices in (2, 3):
        strategy = dpx.DPXStrategy(execution=execution, verify="off")
        assert_equal(weights_after_fit(seeded(StaysNear), max_epochs=3, strategy=strategy, devices=devices), expected)


class Clips(torch.optim.SGD):
    """Clips the gradient of every row, which hooks of the module have left on the parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                norms = parameter.of_rows.flatten(1).norm(dim=1)
                factors = (0.3 / (norms + 1e-6)).clamp(max=1.0)
                parameter.grad = torch.einsum("n,n...->...", factors, parameter.of_rows)
        super().step()
        return loss


class ClipsInside(torch.optim.Optimizer):
    """The same as a wrapper that never calls the constructor of its class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class GradientsOfRows(Classifier):
    """Per-sample gradients, as in differentially private training."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                layer.weight.num_forwards = 0  # type: ignore[attr-defined]
                layer.register_forward_hook(self._keep)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def _keep(self, layer: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            layer.weight.num_forwards += 1
            output.register_hook(partial(self._note, layer, inputs[0].detach()))

    def _note(self, layer: Any, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        layer.weight.num_forwards -= 1
        layer.weight.of_rows = torch.einsum("no,ni->noi", gradient, rows)
        layer.bias.of_rows = gradient

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Clips(self.parameters(), lr=0.5)


class GradientsOfRowsByHand(StepsByHand, GradientsOfRows):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ClipsInside(super().configure_optimizers())


@pytest.mark.parametrize("kind", [GradientsOfRows, GradientsOfRowsByHand])
def test_what_a_backward_leaves_on_parameters_for_the_optimizer_is_of_the_whole_batch(kind) -> None:
    expected = weights_after_fit(seeded(kind))
    strategy = dpx.DPXStrategy(execution="inline")
    with pytest.warns(UserWarning, match=r"sets attributes of parameters \(of_rows\)"):
        found = weights_after_fit(seeded(kind), strategy=strategy, devices=2)
    assert_equal(found, expected)
