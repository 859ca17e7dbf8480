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
