"""What is set on parameters reaches those of the other replicas, and only what has changed travels."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.parameter_attributes import ParameterAttributes, attributes_of_parameters, newly_set
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import make_shadow_module
from tests.conftest import SIMULATED
from tests.replicas.state_pairs import CPU, pair


def translated(replica: Replica, value: Any) -> Any:
    return value.to(replica.device, copy=True) if isinstance(value, torch.Tensor) else copy.copy(value)


def attributes(replica: Replica) -> dict[str, Any]:
    return vars(replica.parameters[0])


def test_what_is_set_changed_or_deleted_is_so_on_the_others() -> None:
    root, other = pair()
    carried = ParameterAttributes([root, other], translated)
    carried.follow()
    assert attributes(other) == {}
    weight: Any = root.parameters[0]
    weight.old, weight.scale = torch.ones(2), 0.5
    carried.follow()
    old = attributes(other)["old"]
    assert attributes(other)["scale"] == 0.5
    assert torch.equal(old, torch.ones(2))
    carried.follow()
    assert attributes(other)["old"] is old, "it has not changed"
    weight.old.mul_(2)
    del weight.scale
    carried.follow()
    assert attributes(other)["old"].tolist() == [2.0, 2.0]
    assert "scale" not in attributes(other)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_tensors_are_on_the_device_of_their_parameter() -> None:
    root, other = pair(torch.device("sim", 1))
    weight: Any = root.parameters[0]
    weight.old = torch.ones(2)
    ParameterAttributes([root, other], translated).follow()
    assert attributes(other)["old"].device == other.device


def test_a_shadow_has_copies_of_them() -> None:
    module = nn.Linear(2, 2)
    weight: Any = module.weight
    weight.counts = {"steps": [1]}
    weight.owner = module
    shadow = make_shadow_module(Replica(0, CPU, module))
    theirs: Any = shadow.weight
    assert theirs.owner is shadow
    theirs.counts["steps"].append(2)
    assert weight.counts == {"steps": [1]}


def test_what_a_step_sets_is_seen_and_what_it_takes_back_is_not() -> None:
    module = nn.Linear(2, 2)
    weight: Any = module.weight
    weight.count, weight.old = 1000, torch.ones(2)
    before = attributes_of_parameters(module.named_parameters())
    weight.count += 1
    weight.count -= 1
    weight.missing, weight.is_used, weight.owner = None, True, weakref.ref(module)
    assert newly_set(module.named_parameters(), before) == []
    weight.old.mul_(2)
    weight.per_row = [torch.ones(3)]
    assert newly_set(module.named_parameters(), before) == ["old", "per_row"]
