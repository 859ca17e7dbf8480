"""Small tensors in attributes are what they were before a step that runs again; of large ones it is known."""

from typing import Any

import torch
from torch import nn

from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.replicas.seen_values import remembered
from lightning_dpx.replicas.tensors_before import HiddenBefore, TensorsBefore


def before(attributes: dict[str, Any]) -> TensorsBefore:
    return TensorsBefore([(attributes, remembered(attributes))])


def test_what_was_rebound_or_written_is_put_back() -> None:
    weight = torch.ones(2, requires_grad=True)
    with_graph = weight * 2
    first, second, third = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    attributes: dict[str, Any] = {"set": first, "written": second, "both": third, "graph": with_graph, "text": "a"}
    tensors = before(attributes)
    attributes["set"] = first + 1
    second.add_(1)
    third.add_(1)
    attributes["both"] = torch.ones(2)
    attributes["graph"] = torch.zeros(2)
    assert not tensors.are_lost
    tensors.put_back()
    assert attributes["set"] is first
    assert attributes["written"] is second
    assert attributes["both"] is third
    assert not any(value.any() for value in (first, second, third))
    assert attributes["graph"].tolist() == [2, 2]
    assert not attributes["graph"].requires_grad, "the graph of an earlier step is not held for it"


def test_what_was_not_touched_stays_itself() -> None:
    kept = torch.ones(2, requires_grad=True) * 2
    attributes = {"kept": kept}
    tensors = before(attributes)
    tensors.put_back()
    assert attributes["kept"] is kept


def test_large_tensors_are_lost_once_they_have_changed() -> None:
    attributes = {"rows": torch.zeros(5000), "other": torch.zeros(5000)}
    tensors = before(attributes)
    assert not tensors.are_lost
    attributes["rows"] = torch.zeros(5000)
    assert tensors.are_lost
    tensors = before(attributes)
    attributes["other"].add_(1)
    assert tensors.are_lost


class Sums(nn.Module):
    """Keeps a sum between its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.total = torch.zeros(2)


def test_what_was_held_for_one_step_is_not_put_back_in_a_later_one() -> None:
    module = Sums()
    replicas = ReplicaSet(module, [torch.device("cpu")] * 2)
    state = replicas.python_state
    state.share()
    state.hold_tensors()
    module.total = torch.ones(2)
    state.collect(replicas.replicas)
    state.share()
    module.total = torch.full((2,), 2.0)
    state.put_back()
    assert module.total.tolist() == [2, 2]


def test_tensors_in_containers_are_put_back_where_they_are_small() -> None:
    small, other = torch.zeros(2), torch.zeros(3)
    large, weight = torch.zeros(5000), nn.Parameter(torch.zeros(2))
    tensors = HiddenBefore([small, other, large, weight])
    small.add_(1)
    assert not tensors.are_lost
    tensors.put_back()
    assert not small.any()
    with torch.no_grad():
        weight.add_(1)
    assert tensors.are_lost, "there may be a whole teacher"
    tensors = HiddenBefore([small, large])
    large.add_(1)
    assert tensors.are_lost
