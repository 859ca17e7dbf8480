"""What happens to operators in a shifted step, where they write, are checkpointed or are interrupted."""

from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from tests.conftest import SIMULATED, sim_device
from tests.shifting.test_shift import ROWS, Functional, Recomputed

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HOME, SPARE = sim_device(0), sim_device(1)


def test_shifting_twice_and_writing_across_the_cut_are_refused() -> None:
    model = Functional().to(HOME)
    dpx.shift_activations(model, "b", {HOME: SPARE})
    with pytest.raises(dpx.ConfigurationError, match="shifted already"):
        dpx.shift_activations(model, "c", {HOME: SPARE})
    dpx.unshift_activations(model)
    with pytest.raises(dpx.ConfigurationError, match="not shifted"):
        dpx.unshift_activations(model)

    class Writes(Functional):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).add_(1.0)

    writes = Writes().to(HOME)
    dpx.shift_activations(writes, "b", {HOME: SPARE})
    with pytest.raises(dpx.UnsupportedError, match=r"add_ writes into a tensor on sim:1 .* cannot cross the cut at b"):
        writes(torch.randn(ROWS).to(HOME))


def test_a_recomputed_region_across_the_cut_is_refused() -> None:
    model = Recomputed().to(HOME)
    dpx.shift_activations(model, "blocks.2", {HOME: SPARE})
    with pytest.raises(
        dpx.UnsupportedError, match=r"runs on sim:0 and on sim:1: it must lie on one side of the cut at"
    ):
        model(torch.randn(ROWS).to(HOME))


class Interrupted(nn.Module):
    """Rows to rows; raises ``error`` if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(4, 4), None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.linear(rows)


@pytest.mark.parametrize("error", [LookupError(), KeyboardInterrupt()])
def test_a_call_that_ctrl_c_ended_leaves_no_mode_behind(sim: Any, error: BaseException) -> None:
    """Torch calls no hooks then, not even those that it always calls."""
    module = nn.Sequential(nn.Linear(4, 4), Interrupted(), nn.Linear(4, 4)).to("sim:0")
    rows = torch.ones(2, 4, device="sim:0")
    expected = module(rows)
    dpx.shift_activations(module, "1", {"sim:0": "sim:4"})
    module[1].error = error
    with pytest.raises(type(error)):
        module(rows)
    assert (rows + rows).device == rows.device
    module[1].error = None
    ours = module(rows)
    assert ours.device == rows.device
    torch.testing.assert_close(ours, expected)
    module[1].error = error
    with pytest.raises(type(error)):
        module(rows)
    dpx.unshift_activations(module)
    assert not torch.overrides._get_current_function_mode_stack()
