"""An optimizer that steps in hooks of parameters steps once for a batch, as on one device."""

from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.lightning.stepping_hooks import SteppingHooks
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer

OPTIMIZERS: dict[nn.Parameter, torch.optim.Optimizer] = {}


def step_at_once(parameter: nn.Parameter) -> None:
    OPTIMIZERS[parameter].step()
    OPTIMIZERS[parameter].zero_grad()


class StepsInHooks(Classifier):
    """The last layer has an optimizer, the first one steps in its own backward."""

    def on_fit_start(self) -> None:
        self.handles = []
        OPTIMIZERS.clear()
        for parameter in self.net[0].parameters():
            OPTIMIZERS[parameter] = torch.optim.SGD([parameter], lr=0.01)
            self.handles.append(parameter.register_post_accumulate_grad_hook(step_at_once))

    def on_fit_end(self) -> None:
        OPTIMIZERS.clear()
        for handle in self.handles:
            handle.remove()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


def fitted(**options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = StepsInHooks()
    loader = make_loader()
    make_trainer(**options).fit(model, loader, loader)
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


@pytest.mark.usefixtures("hardware")
def test_such_a_module_gets_its_batches_whole(execution: str) -> None:
    one = fitted()
    # Either is enough: the hook finds its optimizer in a dict by the parameter.
    told = r"A hook of parameter net.0.weight leads to an opt|looked up in OPTIMIZERS"
    with pytest.warns(UserWarning, match=told):
        assert_equal(fitted(strategy=dpx.DPXStrategy(execution=execution), devices=2), one)


def test_hooks_that_lead_to_no_optimizer_are_no_obstacle() -> None:
    layer = nn.Linear(2, 2)
    hooks = SteppingHooks()
    assert hooks.find(layer.parameters()) is None
    seen: list[torch.Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    assert hooks.find(layer.parameters()) is None
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    assert hooks.find(layer.parameters()) is layer.bias
