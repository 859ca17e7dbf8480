"""The step of a module outside of a Trainer."""

import copy

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory import profile_module
from tests.conftest import SIMULATED

ROWS = torch.randn(16, 6, 8, generator=torch.Generator().manual_seed(0))


class Attends(nn.Module):
    """Rows (B, T, 8), and by name a mask (B, T) and targets (B, T, 8), to a dict with a loss, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, rows: torch.Tensor, *, targets: torch.Tensor, mask: torch.Tensor | None = None) -> dict:
        hidden = self.layers(rows, src_key_padding_mask=mask)
        return {"loss": (hidden - targets).square().mean(), "hidden": hidden}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_step_with_keyword_inputs_is_planned_and_keeps_its_bits(micro_batches: int) -> None:
    named = {"targets": ROWS.flip(0), "mask": torch.zeros(16, 6, dtype=torch.bool)}
    module = Attends()
    plan = dpx.search_plan(module, ROWS, kwargs=named, budget=0.6, progress=False, micro_batches=micro_batches)
    assert plan.micro_batches == micro_batches
    part = {name: value[: 16 // micro_batches] for name, value in named.items()}
    rows = ROWS[: 16 // micro_batches]
    assert dpx.estimate_cost(module, plan, rows, kwargs=part)["peak"] == pytest.approx(plan.peak, rel=0.02)
    planned = copy.deepcopy(module)
    dpx.apply_plan(planned, plan)
    for one in (module, planned):
        one(rows, **part)["loss"].backward()
    for expected, ours in zip(module.parameters(), planned.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


def test_on_fake_tensors_as_well() -> None:
    real = profile_module(Attends(), ROWS, kwargs={"targets": ROWS})
    fake = profile_module(Attends(), ROWS, kwargs={"targets": ROWS}, device="cpu")
    assert fake.peak == pytest.approx(real.peak, rel=0.05)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_a_shift_is_tried_with_keyword_inputs() -> None:
    module = Attends().to("sim:0")
    rows = ROWS.to("sim:0")
    with pytest.raises(TypeError, match="targets"):
        dpx.shift_activations(module, "layers.layers.2", {"sim:0": "sim:1"}, rows)
    shift = dpx.shift_activations(module, "layers.layers.2", {"sim:0": "sim:1"}, rows, kwargs={"targets": rows})
    assert next(module.layers.layers[2].parameters()).device.index == 1
    assert shift.source == torch.device("sim:0")
    dpx.unshift_activations(module)
