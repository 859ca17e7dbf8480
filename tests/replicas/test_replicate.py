from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import make_shadow_module, replicate, why_no_micro_batches
from tests.conftest import SIMULATED, MakesParametersAnew

CPU = torch.device("cpu")
NEEDS_SIMULATION = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(dpx.ReplicationError, match=r"Parameter 0\.weight is lazy"):
        replicate(nn.Sequential(nn.LazyLinear(3)), [CPU, CPU])


class ListsItsParametersItself(nn.Module):
    """A copy forgets under which names its parts share a parameter, and finds them under others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.known = {id(self.linear.weight)}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name if id(parameter) in self.known else f"other.{name}", parameter


def test_a_copy_with_other_parameters_is_refused() -> None:
    with pytest.raises(dpx.ReplicationError, match="its copy has other parameters"):
        replicate(ListsItsParametersItself(), [CPU, CPU])


def test_micro_batches_share_the_parameters_that_optimizers_step_or_are_refused() -> None:
    module = nn.Sequential(MakesParametersAnew(2, 2))
    assert len(replicate(module, [CPU, CPU])) == 2
    with pytest.raises(dpx.ReplicationError, match=r"Micro-batches cannot share parameter 0\.weight"):
        replicate(module, [CPU], micro_batches=[2])
    # Known without making them, where slices are cut later on.
    assert "cannot share parameter 0.weight" in why_no_micro_batches(Replica(0, CPU, module))
    assert not why_no_micro_batches(Replica(0, CPU, nn.Sequential(nn.Linear(2, 2))))


def test_what_a_class_makes_as_it_copies_itself_in_an_evaluation_is_no_inference_tensor() -> None:
    module = nn.Sequential(MakesParametersAnew(2, 2))
    with torch.inference_mode():
        root, copied = replicate(module, [CPU, CPU])
        shadow = make_shadow_module(root)
    for made in (copied.module, shadow):
        assert not any(parameter.is_inference() for parameter in made.parameters())
        assert torch.equal(made[0].weight, module[0].weight)


@NEEDS_SIMULATION
def test_a_shadow_of_a_class_that_makes_its_parameters_on_the_host_is_on_the_device_of_the_original() -> None:
    device = torch.device("sim:0")
    root, _ = replicate(nn.Sequential(MakesParametersAnew(2, 2)).to(device), [device, device])
    assert make_shadow_module(root)[0].weight.device == device
