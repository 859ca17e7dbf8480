from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.replicas.replicate import replicate

CPU = torch.device("cpu")


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


class MakesParametersAnew(nn.Linear):
    """As containers of parameters that clone what they hold: the memo of a copy is passed by."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "MakesParametersAnew":
        copied = MakesParametersAnew(self.in_features, self.out_features)
        copied.load_state_dict(self.state_dict())
        return copied


def test_micro_batches_share_the_parameters_that_optimizers_step_or_are_refused() -> None:
    module = nn.Sequential(MakesParametersAnew(2, 2))
    assert len(replicate(module, [CPU, CPU])) == 2
    with pytest.raises(dpx.ReplicationError, match=r"Micro-batches cannot share parameter 0\.weight"):
        replicate(module, [CPU], micro_batches=[2])
