"""What is seen of a run can be compared later, whatever happens to the objects meanwhile."""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_dpx.lightning.rehearsal.comparison.comparer import unstable_between
from lightning_dpx.lightning.rehearsal.comparison.observation import (
    Observation,
    attributes_of,
    host_copy,
    own_attributes_of,
    python_state,
)
from lightning_dpx.replicas.merging.tolerance import Tolerance


class Node:
    """Knows its parent and all of its siblings, as nodes of configurations do."""

    asked = 0

    def __init__(self, siblings: list[Any]) -> None:
        self.siblings = siblings
        self.parent = {"children": siblings, "again": siblings}
        self.number = 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_objects_that_refer_to_each_other_are_looked_at_once_each() -> None:
    """By way of six containers a thousand nodes lead to 10^12 places."""
    siblings = list[Any]()
    siblings += [Node(siblings) for _ in range(1000)]
    first = python_state(iter([("config", siblings), ("again", siblings)]))
    siblings[-1].number = 2
    second = python_state(iter([("config", siblings), ("again", siblings)]))
    before = Observation(state=first)
    tolerance = Tolerance.of(torch.float32, 1)
    assert unstable_between(before, Observation(state=second), tolerance) >= {"state:config", "state:again"}
    assert not unstable_between(before, Observation(state=first), tolerance)


def test_values_stay_as_they_were_seen() -> None:
    tensor = torch.zeros(2)
    array = np.zeros(2)
    items = deque([1, {"a": 2}])
    seen = python_state(iter([("tensor", tensor), ("array", array), ("items", items)]))
    tensor += 1
    array += 1
    items.append(3)
    assert torch.equal(seen["tensor"], torch.zeros(2))
    assert np.array_equal(seen["array"], np.zeros(2))
    assert seen["items"] == [1, {"a": 2}]


def test_of_very_long_containers_the_number_of_items_is_seen() -> None:
    words = {str(index): index for index in range(20_000)}
    assert python_state(iter([("words", words)])) == {"words": 20_000}


def test_sets_are_seen_in_one_order() -> None:
    first = python_state(iter([("names", {"b", "a", "c"})]))
    assert first == python_state(iter([("names", {"c", "b", "a"})]))


def test_copies_of_compiled_functions_are_alike() -> None:
    """Torch numbers them by their addresses."""
    first, second = (nn.Sequential(torch.compile(nn.Dropout(), backend="eager")) for _ in range(2))
    for module in (first, second):
        module.step = torch.compile(torch.relu, backend="eager")
    assert python_state(own_attributes_of(first)) == python_state(own_attributes_of(second))
    assert dict(own_attributes_of(first)).keys() >= {"step"}
    assert not [path for path, _ in own_attributes_of(first) if path.startswith("0.forward")]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.child = nn.BatchNorm1d(2)
        self.num_hits = 3


def test_attributes_are_those_of_submodules_with_states_of_metrics_and_buffers() -> None:
    module = Counts()
    module.metric.update(torch.tensor([1.0, 3.0]))
    found = dict(attributes_of(module))
    assert found["num_hits"] == 3
    assert found["metric.mean_value"] == 4
    assert found["child.running_mean"].shape == (2,)
    own = dict(own_attributes_of(module))
    assert own["num_hits"] == 3
    assert not [path for path in own if path.startswith("metric.") or path == "child.running_mean"]


def test_copies_are_dense_and_on_the_host() -> None:
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    copied = host_copy(sparse)
    assert copied.layout == torch.strided
    assert torch.equal(copied, sparse.to_dense())
    tensor = torch.ones(2, requires_grad=True)
    kept: Any = host_copy(tensor)
    assert not kept.requires_grad
    assert kept.data_ptr() != tensor.data_ptr()


def test_what_compiled_functions_have_captured_is_state() -> None:
    """They were taken for what nobody looks into, and numbers that slices add up there went unsaid."""
    total = torch.zeros(1)
    step = torch.compile(lambda rows: total.add_(rows.sum()), backend="eager")
    before = Observation(state=python_state(iter([("step", step)])))
    total += 1
    after = Observation(state=python_state(iter([("step", step)])))
    assert unstable_between(before, after, Tolerance.of(torch.float32, 1)) == {"state:step"}
