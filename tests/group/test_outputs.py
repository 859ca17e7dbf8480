"""Outputs of a group: their shapes beforehand, all of them as one, and what a metric sees of them."""

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_dpx as dpx
from tests.conftest import places
from tests.group.models import TwoHeads

pytestmark = pytest.mark.usefixtures("hardware")


def test_merged_outputs_are_those_of_a_forward(make_group) -> None:
    group = make_group(nn.Linear(3, 1), places(2))
    with pytest.raises(dpx.ConfigurationError, match=r"outputs_merged\(\) needs a forward"):
        group.outputs_merged()
    group.forward(torch.randn(4, 3))
    group.reshape(6)
    with pytest.raises(dpx.ConfigurationError, match=r"outputs_merged\(\) needs a forward"):
        group.outputs_merged()


def test_output_shapes_are_known_before_a_run_and_nothing_changes(make_group) -> None:
    group = make_group(TwoHeads(), places(2))
    before = {name: value.clone() for name, value in group.replicas[0].module.state_dict().items()}
    assert group.output_shapes({"pixels": torch.empty(10, 3)}) == {"left": (10, 2), "right": (10, 1)}
    for name, value in group.replicas[0].module.state_dict().items():
        assert torch.equal(value, before[name])


def test_metrics_are_updated_with_every_slice(make_group, execution) -> None:
    rows, labels = torch.randn(9, 3), torch.randint(2, (9,))
    group, metric = make_group(nn.Linear(3, 2), places(4), execution=execution), MulticlassAccuracy(2, average="micro")
    with pytest.raises(dpx.ConfigurationError, match="needs a forward"):
        group.update_metric(metric, labels)
    group.forward(rows)
    group.update_metric(metric, labels)
    expected = (group.outputs_merged().argmax(1).cpu() == labels).float().mean()
    assert metric.compute() == expected


class SometimesNone(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor | None:
        return super().forward(input) if input.sum() > 0 else None


def test_rows_without_outputs_are_named(make_group) -> None:
    group = make_group(SometimesNone(4, 2), places(2), execution="inline")
    group.forward(torch.tensor([[1.0] * 4, [-1.0] * 4]))
    with pytest.raises(dpx.GatherError, match=r"Replica 1 on .* returned None, and others did not"):
        group.outputs_merged()
    group.forward(-torch.ones(2, 4))
    assert group.outputs_merged() is None


class Seen:
    def __init__(self) -> None:
        self.shapes = []

    def update(self, outputs, labels) -> None:
        self.shapes.append((tuple(outputs.shape), [tuple(label.shape) for label in labels]))


def test_labels_are_cut_as_inputs_are(make_group) -> None:
    device = places(1)[0]
    layout = {"0": 1, "output": 1, "labels.0": 1, "labels.2": -1}
    group, seen = make_group(nn.Linear(3, 2), places(2), batch_dim=layout, workload=[2, 1]), Seen()
    group.forward(torch.randn(5, 6, 3, device=device))
    group.update_metric(seen, [torch.ones(5, 6), torch.ones(6), torch.ones(7)])
    assert seen.shapes == [((5, 4, 2), [(5, 4), (4,), (7,)]), ((5, 2, 2), [(5, 2), (2,), (7,)])]
    with pytest.raises(dpx.SliceError, match="do not agree on the number of rows") as caught:
        group.update_metric(seen, [torch.ones(5, 4), torch.ones(4), torch.ones(7)])
    assert caught.value.__notes__ == ["In update_metric(), after a forward of 6 rows."]
    assert len(seen.shapes) == 2
    timed = make_group(nn.Linear(3, 2), places(2), batch_dim=1)
    timed.forward(torch.randn(5, 6, 3, device=device))
    timed.update_metric(seen, [torch.ones(5, 6)])
    assert seen.shapes[2:] == [((5, 3, 2), [(5, 3)])] * 2


class KeepsOutput(nn.Linear):
    calls = 0

    def forward(self, input):
        self.calls += 1
        self.last = super().forward(input)
        return self.last


def test_asking_for_shapes_leaves_nothing_in_the_module(make_group) -> None:
    group = make_group(KeepsOutput(3, 2), places(2))
    module = group.replicas[0].module
    assert group.output_shapes(torch.ones(4, 3)) == (4, 2)
    assert module.calls == 0
    assert not hasattr(module, "last")
