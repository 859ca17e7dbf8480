"""Batches of DGL are cut by graph."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.replicas import UncuttableBatch, slicer_of
from lightning_dpx.replicas.slicing import batch_size, slice_batch
from tests.conftest import assert_equal, make_trainer
from tests.replicas.dgl_graphs import dgl_with


@pytest.fixture(params=["DGLGraph", "DGLHeteroGraph"])  # since version 1, and before
def dgl(request: pytest.FixtureRequest) -> Iterator[Any]:
    with dgl_with(request.param) as module:
        yield module


def rings(dgl: Any, *sizes: int) -> list[Any]:
    """Graphs with a feature of each node and of each edge."""
    made = []
    for size in sizes:
        nodes = torch.arange(size)
        graph = dgl.graph((nodes, (nodes + 1) % max(size, 1)), size)
        if size:
            graph.ndata["x"] = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
            graph.edata["w"] = torch.rand(size, generator=torch.Generator().manual_seed(size))
        made.append(graph)
    return made


def test_a_batch_is_cut_by_graph_and_joined_again(dgl: Any) -> None:
    whole = dgl.batch(rings(dgl, 3, 5, 2, 4))
    labels = torch.arange(4)
    assert batch_size((whole, labels)) == 4
    parts = slice_batch((whole, labels), [3, 1])
    assert [part.batch_num_nodes().tolist() for part, _ in parts] == [[3, 5, 2], [4]]
    assert [of_part.tolist() for _, of_part in parts] == [[0, 1, 2], [3]]
    assert torch.equal(parts[1][0].ndata["x"], whole.ndata["x"][10:])
    assert parts[1][0].edges()[1].tolist() == [1, 2, 3, 0]
    joined = slicer_of(whole).join([part for part, _ in parts])
    assert torch.equal(joined.batch_num_edges(), whole.batch_num_edges())
    assert torch.equal(joined.edges()[0], whole.edges()[0])
    assert torch.equal(joined.edata["w"], whole.edata["w"])


def test_several_types_of_nodes_are_cut_alike(dgl: Any) -> None:
    def one(users: int, games: int) -> Any:
        graph = dgl.heterograph(
            {("user", "plays", "game"): ([0, users - 1], [games - 1, 0])}, {"user": users, "game": games}
        )
        graph._nodes["game"]["price"] = torch.rand(games)
        return graph

    graphs = [one(2, 3), one(4, 1), one(3, 3)]
    parts = slice_batch({"graph": dgl.batch(graphs), "y": torch.zeros(3)}, [1, 2])
    assert [part["graph"].batch_num_nodes("game").tolist() for part in parts] == [[3], [1, 3]]
    assert parts[1]["graph"].edges()[1].tolist() == [0, 0, 3, 1]


def test_what_is_one_graph_is_not_cut(dgl: Any) -> None:
    whole = dgl.batch(rings(dgl, 3, 5))
    whole.add_edges([0], [2])  # forgets the parts
    with pytest.raises(UncuttableBatch, match="do not agree on the number of rows"):
        batch_size((whole, torch.zeros(8)))
    assert batch_size(whole) == 1


def test_an_empty_graph_in_a_batch_stays_one(dgl: Any) -> None:
    parts = slice_batch(dgl.batch(rings(dgl, 3, 0, 2)), [1, 2])
    assert parts[1].batch_num_nodes().tolist() == [0, 2]


class OfGraphs(LightningModule):
    """The sums of the nodes of each graph, weighted by its edges, to a label."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def scores(self, graph: Any) -> torch.Tensor:
        sources, targets = graph.edges()
        messages = self.net(graph.ndata["x"])[sources] * graph.edata["w"][:, None]
        nodes = torch.zeros(graph.num_nodes(), 1, device=messages.device).index_add(0, targets, messages)
        return torch.cat([part.sum(0) for part in nodes.split(graph.batch_num_nodes().tolist())])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.scores(batch[0]) - batch[1]).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.scores(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_training_on_batches_of_graphs_is_that_of_one_device(hardware, execution, dgl, num_replicas) -> None:
    batches = [
        (dgl.batch(rings(dgl, *sizes)), torch.arange(float(len(sizes)))) for sizes in ((3, 5, 2, 4, 6, 3, 2), (4, 3))
    ]

    def outcome(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, trainer = OfGraphs(), make_trainer(max_epochs=2, **options)
        loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
        trainer.fit(model, loader)
        predictions = torch.cat([one.cpu() for one in trainer.predict(model, loader)])
        return {**{name: value.cpu() for name, value in model.state_dict().items()}, "predictions": predictions}

    strategy = dpx.DPXStrategy(execution=execution, verify="raise")
    assert_equal(outcome(strategy=strategy, devices=num_replicas), outcome())
